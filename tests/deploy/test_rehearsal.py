"""The compose stack, rehearsed: images built by the Dockerfile's steps, services started as the compose file says."""

from __future__ import annotations

import json
import runpy
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from openai import AuthenticationError, OpenAI
from rq.serializers import JSONSerializer

from tests.deploy.compose import Stack, dotenv, stack
from tests.deploy.dockerfile import Builder
from tests.deploy.sandbox import BWRAP
from tests.support import REDIS_SERVER, eventually
from tokenmill.client.sync import Client

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.model, pytest.mark.redis_server, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds the images of the Dockerfile, with packages of this machine instead of downloads."""
    if BWRAP is None:
        pytest.skip("no bubblewrap on this machine: install it, the rehearsal runs in its boxes")
    return Builder(ROOT, tmp_path_factory.mktemp("images"), {"TORCH_INDEX": ""}, linked=True)


@pytest.fixture(scope="module")
def compose(images: Builder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack as a newcomer has it: `.env` made by deploy/env.py, the default profile; all of it healthy."""
    if REDIS_SERVER is None:
        pytest.skip("no redis-server on this machine")
    folder = tmp_path_factory.mktemp("stack")
    made = folder / "binds"  # what deploy/env.py writes
    made.mkdir()
    shutil.copy(ROOT / ".env.example", made)
    assert runpy.run_path(str(ROOT / "deploy" / "env.py"))["main"](made) == 0
    environ = dotenv((made / ".env").read_text()) | {"KV_CACHE_MEMORY": "64MiB", "RQ_WORKERS": "1"}
    with stack(ROOT, folder, environ, images) as one:
        one.up()
        for name in one.containers:
            one.wait_healthy(name)
        yield one


def url(compose: Stack, role: str) -> str:
    """Redis as producers on the same machine reach it: through the published port."""
    password = compose.environ[f"REDIS_{role.upper()}_PASSWORD"]
    return f"redis://{role}:{password}@127.0.0.1:{compose.ports['redis', '6379']}/0"


def test_the_steps_of_the_dockerfile_install_a_worker_with_its_kernels(images: Builder) -> None:
    image = images.build("worker")
    (wheel,) = (images.built["wheel"].root / "wheels").glob("tokenmill-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("kernels/_native") for name in inside)
    assert "tokenmill/protocol/lua/finalise.lua" in inside
    assert not any(name.startswith(("tests/", "bench/")) for name in inside)
    done = images.box(image).run(
        ["python", "-c", "from kernels import native; print(native.__file__, native.library())"], 60
    )
    assert done.stdout.startswith("/opt/tokenmill/"), done.stdout
    assert "CDLL" in done.stdout, "the kernels load"


def test_a_producer_image_has_no_torch(images: Builder) -> None:
    ran = "\n".join(images.build("producer-build").ran)
    assert "torch" not in ran
    listed = (images.build("producer-build").root / "src" / "requirements.txt").read_text()
    assert "torch" not in listed
    assert "rq" in listed


def test_the_services_without_a_profile_come_up_and_pass_their_health_checks(compose: Stack) -> None:
    assert set(compose.containers) == {"redis", "worker", "gateway", "clerk", "rq-worker"}
    assert all(container.health for containers in compose.containers.values() for container in containers)


def test_redis_is_durable_and_refuses_clients_without_a_password(compose: Stack) -> None:
    with closing(redis.Redis(port=compose.ports["redis", "6379"])) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    with closing(redis.Redis.from_url(url(compose, "operator"))) as operator:
        told = operator.info()
    assert told["aof_enabled"] == 1
    assert told["maxmemory_policy"] == "noeviction"
    assert told["maxmemory"] == 2**30
    assert list((compose.folder / "volumes" / "redis-data").rglob("*.aof"))


def test_a_demo_producer_gets_its_text_and_ends(compose: Stack) -> None:
    status, said = compose.run("demo-producer")
    assert status == 0, said
    assert len(said.split()) > 10


def http(compose: Stack, **options: Any) -> OpenAI:
    """A client of the gateway with the key that deploy/env.py made."""
    given = {"api_key": compose.environ["GATEWAY_API_KEY"], "timeout": 60, **options}
    return OpenAI(base_url=f"http://127.0.0.1:{compose.ports['gateway', '8000']}/v1", **given)


def test_the_gateway_answers_with_the_first_key_only(compose: Stack) -> None:
    with http(compose) as client:
        (model,) = client.models.list()
        asked: Any = {"model": model.id, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
        assert client.chat.completions.create(**asked).choices[0].message.content
    with http(compose, api_key="sk-another") as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_a_batch_over_http_is_run_by_the_clerk(compose: Stack) -> None:
    body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with http(compose) as client:
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: client.batches.retrieve(made.id).status == "completed", timeout=120, interval=0.5)
        output = client.batches.retrieve(made.id).output_file_id
        assert output is not None
        assert json.loads(client.files.content(output).text)["custom_id"] == "a"


def test_rq_jobs_of_a_service_are_run_and_the_clerk_keeps_its_chores(compose: Stack) -> None:
    with closing(redis.Redis.from_url(url(compose, "clerk"))) as connection:
        queue = rq.Queue("tokenmill", connection=connection, serializer=JSONSerializer)
        job = queue.enqueue("producer.jobs.generate", kwargs={"prompt": "One, two,", "max_tokens": 4})
        eventually(lambda: job.get_status() in ("finished", "failed"), timeout=60)
        assert job.return_value()["status"] == "succeeded"
        eventually(lambda: connection.exists("rq:job:clerk-default-deliver_callbacks"), timeout=30)


def test_two_workers_share_the_queue_and_stopping_the_stack_loses_no_job(compose: Stack) -> None:
    compose.scale("worker", 2)
    compose.wait_healthy("worker")
    with Client(url(compose, "client")) as client:
        ids = [client.submit(f"{n} and", max_tokens=24, ignore_eos=True).id for n in range(32)]
        eventually(lambda: any(client.redis.exists(client.keys.result(one)) for one in ids), timeout=60)
        first = compose.stop("worker", "rq-worker", "clerk", "gateway")
        assert first == {"rq-worker": [0], "clerk": [0], "gateway": [0], "worker": [0, 0]}
        undone = sum(not client.redis.exists(client.keys.result(one)) for one in ids)
        assert sum(client.redis.xlen(lane) for lane in client.keys.lanes) == undone
    assert compose.stop() == {"redis": [0]}

    compose.up("worker")  # on the volumes that the first life left
    with Client(url(compose, "client")) as client:
        results = [client.job(one).result(timeout=90) for one in ids]
    assert {result.status for result in results} == {"succeeded"}
    assert len({result.worker for result in results}) >= 2
    compose.wait_healthy("worker")
    assert list(compose.stop().items()) == [("worker", [0]), ("redis", [0])]
