"""`workers` and `lookup`: the live workers of a queue, and what Redis knows of a job."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
import redis

from tests.support import RedisServer
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill import AsyncClient, Client, JobStatus, Lookup, WorkerInfo
from tokenmill.client.core import Scan
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.workers import FAILED_S, SCAN_S, SCAN_SHARE


def live(queue: Queue, name: str, **fields: str) -> None:
    """Register a worker as a service does: as a consumer of the lanes, with a hash."""
    queue.scripts(name).ensure_consumer()
    queue.redis.hset(queue.keys.worker(name), mapping={"status": "ready"} | fields)  # type: ignore[arg-type]


def commands_of(server: redis.Redis, name: str) -> int:
    """How often a real server has run a command."""
    found = server.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})
    return int(found["calls"])


async def aworkers(queue: Queue) -> tuple[WorkerInfo, ...]:
    async with AsyncClient(queue.url, queue.keys.queue) as client:
        return await client.workers()


def test_an_unused_queue_has_no_workers(queue: Queue, client: Client) -> None:
    assert client.workers() == ()
    assert asyncio.run(aworkers(queue)) == ()


def test_live_workers_are_listed_by_name_with_their_models(queue: Queue, client: Client) -> None:
    live(queue, "b:2:y", model="tiny,other")
    live(queue, "a:1:x")
    queue.scripts("dead:1:x").ensure_consumer()
    found = client.workers()
    assert found == asyncio.run(aworkers(queue))
    assert [(worker.name, worker.models) for worker in found] == [("a:1:x", ()), ("b:2:y", ("tiny", "other"))]
    queue.redis.delete(queue.keys.worker("a:1:x"))
    assert [worker.name for worker in client.workers()] == ["b:2:y"]
    live(queue, "c:3:z")
    assert [worker.name for worker in client.workers()] == ["b:2:y", "c:3:z"]


def test_a_worker_that_has_read_no_entry_is_listed(queue: Queue, client: Client) -> None:
    live(queue, "a:1:x")
    queue.redis.hset(queue.keys.meta, "paused", "1")
    live(queue, "b:2:y")
    assert [worker.name for worker in client.workers()] == ["a:1:x", "b:2:y"]


def test_a_worker_that_is_no_consumer_is_found_by_a_scan_and_then_remembered(queue: Queue, client: Client) -> None:
    queue.redis.hset(queue.keys.worker("old:1:x"), mapping={"status": "ready"})
    assert [worker.name for worker in client.workers()] == ["old:1:x"]
    assert [worker.name for worker in client.workers()] == ["old:1:x"]
    assert [worker.name for worker in asyncio.run(aworkers(queue))] == ["old:1:x"]


def test_foreign_values_and_odd_consumer_names_harm_nothing(queue: Queue, client: Client) -> None:
    live(queue, "a:1:x")
    for name in (b"\xff\xfe", b"", "ключ".encode(), b"a b\n"):
        queue.redis.xgroup_createconsumer(queue.keys.lane("low"), "workers", name)
    queue.scripts("string").ensure_consumer()
    queue.redis.set(queue.keys.worker("string"), "not a hash")
    queue.redis.hset(queue.keys.worker("").encode() + b"\xff\xfe", mapping={b"model": b"\xff"})
    assert [worker.name for worker in client.workers()] == ["a:1:x", "\ufffd\ufffd"]


@pytest.mark.redis_server
def test_a_role_without_the_right_to_list_workers_gets_that_error(own_redis: RedisServer) -> None:
    with own_redis.client() as admin:
        rights = ["on", ">secret", "-@all", "+ping", "+evalsha", "+script|load", "~*"]
        admin.execute_command("ACL", "SETUSER", "someone", *rights)
    url = own_redis.url.replace("//", "//someone:secret@")
    with Client(url) as client, pytest.raises(redis.ResponseError, match=r"permission|can't run this command"):
        client.workers()


def test_another_queue_has_its_own_workers(queue: Queue, client: Client) -> None:
    live(queue, "a:1:x")
    other = Queue(queue.url, queue.redis, Keys(queue.keys.queue + "2"))
    live(other, "b:1:x")
    assert [worker.name for worker in client.workers()] == ["a:1:x"]


def test_workers_are_read_without_a_look_at_other_keys(queue: Queue, client: Client) -> None:
    if not queue.real:
        return  # fakeredis counts no commands
    live(queue, "a:1:x")
    before = commands_of(queue.redis, "scan"), commands_of(queue.redis, "evalsha")
    for _ in range(10):
        assert client.workers()
    after = commands_of(queue.redis, "scan"), commands_of(queue.redis, "evalsha")
    assert after[0] == before[0]
    assert after[1] - before[1] <= 13


def test_without_a_live_worker_the_keyspace_is_scanned_once_in_a_while(
    queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Scan] = []

    def scan(step: Scan) -> list[bytes]:
        scans.append(step)
        return []

    monkeypatch.setattr(client, "_scan", scan)
    for _ in range(5):
        assert client.workers() == ()
    assert len(scans) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SCAN_S + 1)
    client.workers()
    assert len(scans) == 2


@pytest.mark.parametrize(("error", "pause"), [(None, 3 / SCAN_SHARE), (TimeoutError(), FAILED_S)])
def test_the_pause_after_a_long_scan_is_long(
    queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception | None, pause: float
) -> None:
    now, scans = time.monotonic(), 0

    def scan(_: Scan) -> list[bytes]:
        nonlocal now, scans
        scans, now = scans + 1, now + 3
        if error is not None:
            raise error
        return []

    monkeypatch.setattr(client, "_scan", scan)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for wait, expected in ((0, 1), (SCAN_S + 1, 1), (pause, 2)):
        now += wait
        with suppress(TimeoutError):
            client.workers()
        assert scans == expected


def test_a_lookup_returns_the_state_the_tenant_and_the_result(queue: Queue, client: Client, worker: MiniWorker) -> None:
    assert client.lookup("unknown") == Lookup(JobStatus.UNKNOWN, None, None)
    client.submit("x", id="later", delay=60, tenant="t")
    assert client.lookup("later") == Lookup(JobStatus.DELAYED, "t", None)
    job = client.submit("hello", tenant="t")
    job.result(timeout=20)
    found = client.lookup(job.id)
    assert (found.status, found.tenant) == (JobStatus.SUCCEEDED, "t")
    assert found.result == job.result()
    assert client.lookup(job.id, with_result=False) == Lookup(JobStatus.SUCCEEDED, "t", None)
    held = client.submit("HOLD x", tenant="u")
    assert client.lookup(held.id).tenant == "u"
    worker.release()
    open_to_all = client.submit("hello")
    open_to_all.result(timeout=20)
    assert client.lookup(open_to_all.id).tenant is None


def test_the_state_of_a_job_whose_hash_is_gone_is_that_of_its_result(
    queue: Queue, client: Client, worker: MiniWorker
) -> None:
    job = client.submit("hello")
    result = job.result(timeout=20)
    queue.redis.delete(queue.keys.job(job.id))
    assert client.status(job.id) is JobStatus.SUCCEEDED
    assert client.lookup(job.id, with_result=False) == Lookup(JobStatus.SUCCEEDED, None, result)


def test_a_cancelled_delayed_job_keeps_its_tenant(client: Client) -> None:
    job = client.submit("x", delay=60, tenant="t")
    job.cancel()
    found = client.lookup(job.id)
    assert (found.status, found.tenant) == (JobStatus.CANCELLED, "t")


def test_the_lookup_of_the_asyncio_client_is_the_same(queue: Queue, client: Client) -> None:
    async def look() -> Lookup:
        async with AsyncClient(queue.url, queue.keys.queue) as aio:
            return await aio.lookup("a")

    client.submit("x", id="a", tenant="t")
    assert asyncio.run(look()) == client.lookup("a") == Lookup(JobStatus.QUEUED, "t", None)
