"""The files of deployment: what can be checked without starting anything."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import re
import runpy
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pytest
import yaml

from producer import probe as producer_probe
from tests.deploy.compose import ComposeError, dotenv, interpolate, load, seconds
from tests.deploy.dockerfile import ignored, parse
from tests.support import RedisServer, free_port, output_of
from worker.ops import probe as worker_probe
from worker.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
FILLED = runpy.run_path(str(ROOT / "deploy" / "env.py"))["filled"](EXAMPLE)
SERVICES: dict[str, dict[str, Any]] = load(ROOT, dotenv(FILLED))
STAGES = {stage.name: stage for stage in parse((ROOT / "Dockerfile").read_text())}


def test_the_compose_file_is_valid_under_the_specifications_schema() -> None:
    text = (
        importlib.resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    model = yaml.safe_load(COMPOSE)
    jsonschema.validate(model, json.loads(text))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**model, "services": {"redis": {"imagine": "redis"}}}, json.loads(text))


def test_nothing_starts_without_passwords_and_none_has_a_default() -> None:
    passwords = set(re.findall(r"\$\{(\w+_PASSWORD)", COMPOSE))
    assert {
        f"REDIS_{role}_PASSWORD" for role in ("CLIENT", "WORKER", "CLERK", "GATEWAY", "OPERATOR", "PRODUCER")
    } == passwords
    for name in passwords:
        assert not re.search(rf"\$\{{{name}(?!:\?)", COMPOSE), f"{name} has a default or is optional"
        with pytest.raises(ComposeError, match=name):
            load(ROOT, {**dotenv(FILLED), name: ""})


def test_the_example_names_each_variable_of_the_compose_file_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+)(?::?-([^}]*))?", COMPOSE))
    named = dict(re.findall(r"^#?(\w+)=(.*)$", EXAMPLE, re.MULTILINE))
    others = {"COMPOSE_PROFILES", "GATEWAY_API_KEY"}  # read by the engine, and by clients
    assert set(used) | others == set(named)
    shown = {name: value for name, value in named.items() if name not in others}
    assert shown == used


def test_every_service_is_confined() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        build = service.get("build")
        user = service.get("user") if build is None else _user(build["target"])
        assert user not in (None, "0", "root"), f"{name} runs as root"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is open to other machines"


def _user(target: str) -> str | None:
    users = [rest for word, rest in STAGES[target].steps if word == "USER"]
    base = STAGES[target].base
    return users[-1] if users else _user(base) if base in STAGES else None


def test_every_service_that_stays_has_a_health_check_and_restarts() -> None:
    for name, service in SERVICES.items():
        stays = "demo" not in service.get("profiles", ())
        assert ("healthcheck" in service) == stays, name
        assert service["restart"] == ("unless-stopped" if stays else "no"), name


def test_third_party_images_are_pinned_to_a_release() -> None:
    for name, service in SERVICES.items():
        if "build" not in service:
            assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+(-\w+)?", service["image"]), name
        else:
            assert service["build"]["target"] in STAGES, name


def test_a_worker_is_given_more_time_than_its_drain() -> None:
    for name in ("worker", "worker-gpu"):
        given = SERVICES[name]["environment"]
        settings = Settings.model_validate(
            {
                field: given[f"TOKENMILL_{field.upper()}"]
                for field in Settings.model_fields
                if given.get(f"TOKENMILL_{field.upper()}")  # an empty variable counts as unset
            }
        )
        assert seconds(SERVICES[name]["stop_grace_period"]) > settings.drain_seconds + 5
        assert str(settings.http_port) in SERVICES[name]["expose"]


def test_redis_persists_accepted_jobs_and_evicts_no_key() -> None:
    options = " ".join(SERVICES["redis"]["command"])
    for wanted in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--maxmemory 1gb"):
        assert wanted in options


def test_the_gpu_profile_reserves_one_device_and_is_off_by_default() -> None:
    service = SERVICES["worker-gpu"]
    assert service["profiles"] == ["gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert service["environment"]["TOKENMILL_REDIS"] == SERVICES["worker"]["environment"]["TOKENMILL_REDIS"]


def test_the_image_for_gpus_has_the_compiler_that_triton_calls_and_keeps_kernels_on_a_volume() -> None:
    installed = next(rest for word, rest in STAGES["worker-cuda"].steps if word == "RUN")
    assert {"gcc", "libc6-dev"} <= set(installed.split()), "a C compiler, and the headers that Python.h includes"
    assert "-slim" in STAGES["runtime"].base or "PYTHON" in STAGES["runtime"].base, "the base image has Python.h"
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    folders = [volume.split(":")[1] for volume in SERVICES["worker-gpu"]["volumes"] if volume.startswith("cache:")]
    assert any(cache.startswith(folder + "/") for folder in folders)
    assert any(rest.endswith("-r gpu.txt") for word, rest in STAGES["cuda-build"].steps if word == "RUN"), "Triton"


def test_the_kv_pool_of_a_gpu_is_not_limited_to_that_of_a_cpu() -> None:
    given = SERVICES["worker-gpu"]["environment"]
    assert given["TOKENMILL_KV_CACHE_MEMORY"] == ""
    assert float(given["TOKENMILL_GPU_MEMORY_UTILIZATION"]) == 0.9
    assert SERVICES["worker"]["environment"]["TOKENMILL_KV_CACHE_MEMORY"] == "2GiB"


def test_commands_and_checks_of_the_images_are_in_exec_form() -> None:
    for stage in STAGES.values():
        for word, rest in stage.steps:
            if word in ("CMD", "ENTRYPOINT"):
                assert json.loads(rest), f"{stage.name}: {word} {rest}"
            if word == "HEALTHCHECK":
                assert json.loads(rest[rest.index("CMD ") + 4 :]) == SERVICES["worker"]["healthcheck"]["test"][1:]


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for path in (
        "tokenmill/protocol/lua/start.lua",
        "kernels/csrc/native.cpp",
        "pyproject.toml",
        "deploy/requirements.py",
    ):
        assert not ignored(path, patterns), path
    for path in (
        ".env",
        ".git/config",
        "tests/support.py",
        "worker/__pycache__/x.pyc",
        "kernels/_native.so",
        "deploy/env.py",
    ):
        assert ignored(path, patterns), path


def test_requirements_of_an_image_are_those_of_the_project_without_torch() -> None:
    command = [sys.executable, "deploy/requirements.py", "worker"]
    lines = output_of(command, cwd=ROOT).split("\n")
    assert any(line.startswith("transformers") for line in lines)
    assert any(line.startswith("redis[hiredis]") for line in lines)
    assert not any(line.startswith("torch") for line in lines)


def test_an_env_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"]
    (tmp_path / ".env.example").write_text(EXAMPLE)
    assert main(tmp_path) == 0
    made = (tmp_path / ".env").read_text()
    values = dotenv(made)
    assert len(set(values.values())) == 7
    assert all(len(value) >= 32 for value in values.values())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert main(tmp_path) == 1
    assert (tmp_path / ".env").read_text() == made


@pytest.mark.parametrize("without", ["REDIS_CLERK_PASSWORD=.*\n", "(?<=REDIS_CLERK_PASSWORD=).*"])
def test_a_new_role_gets_a_password_and_the_others_keep_theirs(tmp_path: Path, without: str) -> None:
    main = runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"]
    (tmp_path / ".env.example").write_text(EXAMPLE)
    own = FILLED.replace("#QUEUE=default", "QUEUE=mine") + "# mine\nMY_SETTING=a b  # c\n"
    (tmp_path / ".env").write_text(re.sub(without, "", own))
    (tmp_path / ".env").chmod(0o640)
    assert main(tmp_path) == 0
    old, new = dotenv(own), dotenv((tmp_path / ".env").read_text())
    assert len(new.pop("REDIS_CLERK_PASSWORD")) >= 32
    assert new == {name: value for name, value in old.items() if name != "REDIS_CLERK_PASSWORD"}
    assert "# mine\nMY_SETTING=a b  # c\n" in (tmp_path / ".env").read_text()
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.glob(".env.*")) == [tmp_path / ".env.example"]
    assert main(tmp_path) == 1


def _keys(root: Path) -> list[str]:
    """The lines of the gateway's keys file without comments."""
    lines = (root / "deploy" / "keys" / "gateway.keys").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def _line(root: Path) -> str:
    """The line of the keys file that lets the key of `.env` in."""
    key = dotenv((root / ".env").read_text())["GATEWAY_API_KEY"]
    return f"{hashlib.sha256(key.encode()).hexdigest()} default"


def test_the_first_key_of_the_gateway_is_in_the_env_file_and_its_hash_in_the_keys_file(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"]
    (tmp_path / ".env.example").write_text(EXAMPLE)
    mask = os.umask(0o077)
    try:
        assert main(tmp_path) == 0
    finally:
        os.umask(mask)
    assert _keys(tmp_path) == [_line(tmp_path)]
    file = tmp_path / "deploy" / "keys" / "gateway.keys"
    assert file.stat().st_mode & 0o777 == 0o644, "the gateway's user reads it"
    (folder,) = [text.split(":")[0] for text in SERVICES["gateway"]["volumes"] if text.endswith("keys:ro")]
    assert (tmp_path / folder).resolve() == file.parent
    target = next(text.split(":")[1] for text in SERVICES["gateway"]["volumes"] if text.endswith("keys:ro"))
    assert SERVICES["gateway"]["environment"]["TOKENMILL_API_KEYS"] == f"{target}/{file.name}"


def test_a_new_key_is_added_to_the_keys_file_and_a_removed_one_stays_removed(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"]
    (tmp_path / ".env.example").write_text(EXAMPLE)
    (tmp_path / "deploy" / "keys").mkdir(parents=True)
    mine = "0" * 64 + " mine rpm=10"
    (tmp_path / "deploy" / "keys" / "gateway.keys").write_text(mine)
    (tmp_path / ".env").write_text(FILLED.replace("GATEWAY_API_KEY", "#GATEWAY_API_KEY"))
    assert main(tmp_path) == 0
    assert _keys(tmp_path) == [mine, _line(tmp_path)]
    (tmp_path / "deploy" / "keys" / "gateway.keys").write_text(mine)
    assert main(tmp_path) == 1
    assert _keys(tmp_path) == [mine]
    (tmp_path / "deploy" / "keys" / "gateway.keys").unlink()
    assert main(tmp_path) == 0
    assert _keys(tmp_path) == [_line(tmp_path)]


def test_completing_an_env_file_touches_no_file_beside_it_and_follows_a_link(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"]
    (tmp_path / ".env.example").write_text(EXAMPLE)
    (tmp_path / ".env.new").write_text("somebody's")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "env").write_text("MINE=1\n")
    (tmp_path / ".env").symlink_to("kept/env")
    assert main(tmp_path) == 0
    assert (tmp_path / ".env.new").read_text() == "somebody's"
    assert (tmp_path / ".env").is_symlink()
    assert (tmp_path / "kept" / "env").read_text().startswith("MINE=1\n")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["env"]


def test_each_role_with_a_password_has_it_in_the_example_and_the_compose_file() -> None:
    roles = set(re.findall(r">change-me-(\w+)", (ROOT / "deploy" / "redis-users.acl").read_text()))
    for role in roles:
        assert f"REDIS_{role.upper()}_PASSWORD=\n" in EXAMPLE
        assert SERVICES["redis"]["environment"][f"REDIS_{role.upper()}_PASSWORD"]


def test_the_files_ask_for_no_newer_docker_than_the_page_says() -> None:
    assert "start_interval" not in COMPOSE
    assert "--start-interval" not in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("password", ["", "short", "change-me-worker", "sixteen characters", "sixteen:chars:and#"])
def test_redis_refuses_to_start_with_a_weak_password(tmp_path: Path, password: str) -> None:
    script, rules = ROOT / "deploy" / "redis-start.sh", ROOT / "deploy" / "redis-users.acl"
    environ = {**os.environ, **dotenv(FILLED), "REDIS_WORKER_PASSWORD": password, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(script), str(rules), "--port", "0"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "REDIS_WORKER_PASSWORD" in done.stderr
    assert not password or password not in done.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("$A ${A} $$A", "1 1 $A"),
        ("${B-x} ${B:-y} ${E-x} ${E:-y}", "x y  y"),
        ("${A:+set} ${E:+set} ${E+set} ${B+set}", "set  set "),
        ("${A:?no} ${E?no}", "1 "),
    ],
)
def test_variables_are_put_in_as_compose_does(text: str, wanted: str) -> None:
    assert interpolate({"k": [text]}, {"A": "1", "E": ""}) == {"k": [wanted]}


class _Answer(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(b"said\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("status", [200, 503])
def test_the_workers_probe_says_what_readyz_says(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"status": status}))
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TOKENMILL_HTTP_PORT", str(server.server_port))
    try:
        assert worker_probe.probe(server.server_port) == (status == 200, "said")
        assert worker_probe.main() == (0 if status == 200 else 1)
    finally:
        server.shutdown()
        server.server_close()


def test_the_workers_probe_fails_without_an_answer_or_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_probe.probe(free_port())[0] is False
    for wrong in ("", "0", "x", "70000"):
        monkeypatch.setenv("TOKENMILL_HTTP_PORT", wrong)
        assert worker_probe.main() == 2


@pytest.mark.redis_server
def test_the_clerks_probe_fails_without_a_worker_of_its_host(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RQ_REDIS_URL", own_redis.url)
    assert producer_probe.main() == 1
    own_redis.kill()
    assert producer_probe.main() == 1
