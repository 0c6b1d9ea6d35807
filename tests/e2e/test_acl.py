"""The shipped access rules: each role does its work, and nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from producer.janitor import clean_up
from tests.producer.gateway.harness import GatewayProcess, client_of, get, post
from tests.producer.rqprocess import rq_on
from tests.support import RedisServer, eventually, free_port
from tests.tokenmill.batch.files import request, write
from tests.tokenmill.mini import Queue as MiniQueue
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Queue, inside
from tokenmill import batch
from tokenmill.client.sync import Client
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.replies import CancelReply

ROLES = ("producer", "client", "clerk", "worker", "gateway", "operator")
FILE = Path(__file__).parents[2] / "deploy" / "redis-users.acl"
KEYS = Keys("guarded")
pytestmark = pytest.mark.redis_server


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A URL for each role, on a real server with the shipped file."""

    folder, port = tmp_path_factory.mktemp("acl"), free_port()
    shutil.copy(FILE, folder / "users.acl")
    command = [shutil.which("redis-server") or "redis-server", "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(folder), "--save", "", "--aclfile", str(folder / "users.acl")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found = {role: f"redis://{role}:change-me-{role}@127.0.0.1:{port}/0" for role in ROLES}
    found["nobody"] = f"redis://127.0.0.1:{port}/0"

    def up() -> bool:
        with closing(command_client(found["operator"], retries=0)) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

    eventually(up)
    yield found
    process.kill()
    process.wait()


@pytest.fixture
def roles(urls: dict[str, str]) -> Iterator[dict[str, redis.Redis]]:
    clients = {role: command_client(urls[role], retries=0) for role in ROLES}
    yield clients
    for client in clients.values():
        client.close()


def refused(client: redis.Redis, *command: object) -> None:
    with pytest.raises(NoPermissionError):
        client.execute_command(*command)


def test_every_role_can_do_its_work(urls: dict[str, str], roles: dict[str, redis.Redis], tmp_path: Path) -> None:
    queue = Queue(roles["producer"], urls["worker"], KEYS)
    operator = Queue(roles["operator"], urls["operator"], KEYS)
    with inside(Queue(roles["operator"], urls["worker"], KEYS), FakeEngine(step_seconds=0.005), lease_seconds="1"):
        job = queue.add({"prompt": "x", "max_tokens": 3}, tenant="t", group="g")  # the producer's bare XADD
        result = operator.check_ending(job)
        assert result["status"] == "succeeded"
        assert queue.events(job)  # and its reads
        assert queue.result(job) == result
        long = queue.add({"prompt": "x", "max_tokens": 240})
        queue.cancel(long)
        assert queue.result(long)["status"] == "cancelled"
        with Client(urls["client"], "guarded") as client:
            mine = client.submit("x", max_tokens=3, tenant="t", group="g")
            assert "".join(mine.text(timeout=10)) == mine.result(timeout=10).text
            later = client.submit("x", max_tokens=3, delay=60)
            assert later.cancel() is CancelReply.DONE
            soon = client.submit("x", max_tokens=3, delay=0.1, tenant="t", group="g")
            assert soon.result(timeout=10).status == "succeeded"
            lines = write(tmp_path / "in.jsonl", [request("a", "x", model="fake"), request("b", "y", model="fake")])
            assert batch.run(lines, tmp_path / "out.jsonl", client=client) == batch.BatchReport(2, 2, 0)
            (ended,) = roles["operator"].scan_iter(match=KEYS.group_out("batch-*"))
            assert roles["operator"].xlen(ended) == 0  # what was written is forgotten, so it may do that as well
        broken = queue.add(b"{")
        assert queue.result(broken)["error"]["code"] == "invalid_json"
        roles["operator"].hset(KEYS.meta, "paused", "1")
        assert roles["operator"].hget(KEYS.meta, "paused") == b"1"
        roles["operator"].hdel(KEYS.meta, "paused")
        assert roles["operator"].hgetall(KEYS.group("g"))
        assert roles["operator"].xinfo_groups(KEYS.lane("normal"))
        assert list(roles["operator"].scan_iter(match=KEYS.worker("*")))


def test_a_clerk_can_do_its_chores_and_run_jobs(
    urls: dict[str, str], roles: dict[str, redis.Redis], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    source.write_text(json.dumps(line) + "\n")
    closed = f"https://localhost:{free_port()}"
    hosts = f"localhost,{closed}"
    with (
        rq_on(MiniQueue(urls["clerk"], roles["clerk"], KEYS), tmp_path) as office,
        inside(Queue(roles["operator"], urls["worker"], KEYS), FakeEngine(), lease_seconds="1", callback_hosts=hosts),
        Client(urls["client"], "guarded") as client,
    ):
        one = office.enqueue("generate", prompt="x", max_tokens=3)
        many = office.enqueue("run_batch", input=str(source), output=str(output))
        process = office.worker(
            *("--worker-class", "producer.clerk.ClerkWorker", "--with-scheduler"),
            TOKENMILL_CALLBACK_HOSTS=hosts,
            TOKENMILL_CALLBACK_SECRET="key",
        )
        client.submit("x", max_tokens=3, callback="https://localhost/").result(timeout=10)
        client.submit("x", id="later", max_tokens=3, callback=f"{closed}/").result(timeout=10)
        office.ends(one, "finished")
        office.ends(many, "finished")
        eventually(lambda: roles["operator"].xlen(KEYS.callbacks_dead) == 1, 20)  # it may not call loopback
        eventually(lambda: roles["operator"].zcard(KEYS.callbacks_delayed) == 1, 20)
        assert roles["operator"].ttl(KEYS.result("later")) > 86_400
        clean_up(roles["clerk"], KEYS, idle_s=0)
        assert process.stop() == 0
        assert "NOPERM" not in process.log.upper()


def test_a_gateway_can_serve_requests_and_have_the_clerk_run_batches(
    urls: dict[str, str], roles: dict[str, redis.Redis], tmp_path: Path
) -> None:
    key = "sk-of-a-test"
    (tmp_path / "keys").write_text(f"{hashlib.sha256(key.encode()).hexdigest()} t rpm=100 tpm=100000\n")
    given = {"api_keys": str(tmp_path / "keys"), "files": str(tmp_path / "files")}
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with (
        rq_on(MiniQueue(urls["clerk"], roles["clerk"], KEYS), tmp_path) as office,
        inside(Queue(roles["operator"], urls["worker"], KEYS), FakeEngine(step_seconds=0.005), lease_seconds="1"),
        closing(GatewayProcess(urls["gateway"], "guarded", tmp_path, batch_queue=office.jobs.name, **given)) as gateway,
        client_of(gateway.wait_until_it_answers(), key) as client,
    ):
        clerk = office.worker("--worker-class", "producer.clerk.ClerkWorker", TOKENMILL_FILES=given["files"])
        assert [model.id for model in client.models.list()] == ["fake"]
        asked: Any = {"model": "fake", "prompt": "x", "max_tokens": 3}
        text = client.completions.create(**asked, extra_headers={"Idempotency-Key": "k"}).choices[0].text
        assert client.completions.create(**asked, extra_headers={"Idempotency-Key": "k"}).choices[0].text == text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text
        with client.completions.with_streaming_response.create(**{**asked, "max_tokens": 240}, stream=True) as left:
            gone = left.headers["x-request-id"]
        eventually(lambda: roles["operator"].exists(KEYS.result(gone)))  # cancelled, since its client has left
        jobs, let_in = f"{gateway.url}/v1/jobs", {"authorization": f"Bearer {key}"}
        assert post(jobs, {"id": "over-http", "delay": 60, "body": {"prompt": "x"}}, **let_in).status == 202
        assert post(f"{jobs}/over-http/cancel", {}, **let_in).status == 200
        assert get(f"{jobs}/over-http?wait=10", **let_in).json["status"] == "cancelled"
        assert get(f"{jobs}/over-http/events", **let_in).status == 200
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        eventually(lambda: client.batches.retrieve(made.id).status == "completed", 60)
        body |= {"max_tokens": 240, "ignore_eos": True}
        file = client.files.create(file=("long.jsonl", json.dumps(line).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        eventually(lambda: client.batches.retrieve(made.id).status == "in_progress", 60)
        client.batches.cancel(made.id)
        eventually(lambda: client.batches.retrieve(made.id).status in ("cancelled", "completed"), 60)
        assert clerk.stop() == 0
        for log in (gateway.log, clerk.log):
            assert "NOPERM" not in log.upper()
            assert "NO PERMISSION" not in log.upper()


def test_a_client_without_a_role_is_refused(urls: dict[str, str]) -> None:
    with closing(command_client(urls["nobody"], retries=0)) as client, pytest.raises(AuthenticationError):
        client.ping()


DANGEROUS = [
    ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "SET", "maxmemory", "1"), ("SHUTDOWN", "NOSAVE"), ("ACL", "SETUSER", "x"),
    ("KEYS", "*"), ("REPLICAOF", "h", "1"), ("MODULE", "LIST"), ("SCRIPT", "FLUSH"),
]  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("command", DANGEROUS, ids=lambda c: " ".join(c[:2]))
def test_no_role_may_harm_the_server(roles: dict[str, redis.Redis], role: str, command: tuple[str, ...]) -> None:
    refused(roles[role], *command)


@pytest.mark.parametrize("role", ROLES)
def test_no_role_reaches_keys_of_others(roles: dict[str, redis.Redis], role: str) -> None:
    for command in (("GET", "other"), ("SET", "other", "x"), ("XADD", "tokenmill:jobs:normal", "*", "a", "b")):
        refused(roles[role], *command)


def test_a_producer_can_add_read_and_cancel_and_no_more(roles: dict[str, redis.Redis]) -> None:
    producer, lane = roles["producer"], KEYS.lane("normal")
    for command in (
        ("SET", KEYS.result("j"), "forged"),
        ("SET", lane, "gone"),
        ("DEL", KEYS.cancel("j")),
        ("GET", KEYS.cancel("j")),
        ("XADD", KEYS.out("j"), "*", "type", "final"),
        ("XADD", KEYS.dead, "*", "a", "b"),
        ("XREAD", "STREAMS", lane, "0"),
        ("XRANGE", lane, "-", "+"),
        ("XDEL", lane, "1-1"),
        ("XTRIM", lane, "MAXLEN", "0"),
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", lane, ">"),
        ("XGROUP", "DESTROY", lane, "workers"),
        ("HSET", KEYS.job("j"), "state", "queued"),
        ("HSET", KEYS.meta, "paused", "1"),
        ("HGETALL", KEYS.meta),
        ("SET", KEYS.quota("t"), "0"),
        ("EVAL", "return 1", "0"),
        ("EVALSHA", "0" * 40, "0"),
        ("SCAN", "0"),
        ("INFO",),
    ):
        refused(producer, *command)


def test_a_client_cannot_take_jobs_or_steer_the_queue(roles: dict[str, redis.Redis]) -> None:
    client, lane = roles["client"], KEYS.lane("normal")
    for command in (
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", lane, ">"),
        ("XAUTOCLAIM", lane, "workers", "me", "0", "0"),
        ("XCLAIM", lane, "workers", "me", "0", "1-1"),
        ("XGROUP", "CREATE", lane, "mine", "0"),
        ("XTRIM", lane, "MAXLEN", "0"),
        ("HSET", KEYS.meta, "paused", "1"),
        ("HGETALL", KEYS.meta),
        ("XADD", KEYS.dead, "*", "a", "b"),
        ("XRANGE", KEYS.dead, "-", "+"),
        ("XRANGE", KEYS.callbacks, "-", "+"),
        ("HGETALL", KEYS.worker("w")),
        ("HSET", KEYS.worker("w"), "status", "ready"),
        ("EVAL", "return 1", "0"),
        ("SCAN", "0"),
    ):
        refused(client, *command)


def test_a_gateway_cannot_take_jobs_steer_the_queue_or_touch_jobs_of_rq(roles: dict[str, redis.Redis]) -> None:
    gateway, lane = roles["gateway"], KEYS.lane("normal")
    for command in (
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", lane, ">"),
        ("XAUTOCLAIM", lane, "workers", "me", "0", "0"),
        ("XGROUP", "DELCONSUMER", lane, "workers", "w"),
        ("XTRIM", lane, "MAXLEN", "0"),
        ("HSET", KEYS.meta, "paused", "1"),
        ("HGETALL", KEYS.meta),
        ("XRANGE", KEYS.dead, "-", "+"),
        ("XRANGE", KEYS.callbacks, "-", "+"),
        ("HSET", KEYS.worker("w"), "status", "ready"),
        ("DEL", KEYS.worker("w")),
        ("HGETALL", "rq:job:j"),
        ("DEL", "rq:job:j"),
        ("LPOP", "rq:queue:clerk"),
        ("LRANGE", "rq:queue:clerk", "0", "-1"),
        ("SMEMBERS", "rq:workers"),
        ("PUBLISH", "rq:pubsub:w", "{}"),
        ("EVAL", "return 1", "0"),
        ("SCAN", "0"),
        ("INFO", "server"),  # RQ asks for the version of Redis, and goes on without
    ):
        refused(gateway, *command)


def test_a_clerk_cannot_take_jobs_or_steer_the_queue(roles: dict[str, redis.Redis]) -> None:
    lane = KEYS.lane("normal")
    for command in (
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", lane, ">"),
        ("XAUTOCLAIM", lane, "workers", "me", "0", "0"),
        ("XTRIM", lane, "MAXLEN", "0"),
        ("XGROUP", "DESTROY", lane, "workers"),
        ("XTRIM", KEYS.callbacks, "MAXLEN", "0"),
        ("DEL", KEYS.callbacks),
        ("HSET", KEYS.meta, "paused", "1"),
        ("HSET", KEYS.worker("w"), "status", "ready"),
        ("XRANGE", KEYS.dead, "-", "+"),
        ("SUBSCRIBE", "x"),
    ):
        refused(roles["clerk"], *command)


def test_a_worker_cannot_see_or_change_the_server(roles: dict[str, redis.Redis]) -> None:
    for command in (
        ("SCAN", "0"), ("INFO",), ("CLIENT", "LIST"), ("XTRIM", KEYS.lane("low"), "MAXLEN", "0"),
        ("XGROUP", "DESTROY", KEYS.lane("low"), "workers"), ("EVAL", "return 1", "0"), ("SUBSCRIBE", "x"),
    ):  # fmt: skip
        refused(roles["worker"], *command)


def test_a_restart_with_these_rules_keeps_what_scripts_and_transactions_wrote(tmp_path: Path) -> None:
    rules = tmp_path / "users.acl"
    shutil.copy(FILE, rules)
    server = RedisServer(tmp_path, free_port(), options=("--aclfile", str(rules)))
    url = f"redis://client:change-me-client@127.0.0.1:{server.port}/0"
    server.launch()
    with Client(url, "guarded") as client:
        eventually(lambda: _answers(client))
        job = client.submit("x", max_tokens=3)
        later = client.submit("x", max_tokens=3, delay=600)
        client.redis.pipeline(transaction=True).set(KEYS.cancel("j"), "user").set(KEYS.cancel("k"), "user").execute()
    server.stop()
    server.launch()
    with Client(url, "guarded") as client:
        eventually(lambda: _answers(client))
        assert client.redis.hget(KEYS.job(job.id), "state") == b"queued"
        assert client.redis.exists(KEYS.delayed_job(later.id), KEYS.cancel("j"), KEYS.cancel("k")) == 3
    server.kill()


def _answers(client: Client) -> bool:
    try:
        return bool(client.redis.ping())
    except redis.ConnectionError:
        return False
