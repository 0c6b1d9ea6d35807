"""A wait ends for a job that Redis has lost; for a job that Redis never had it continues, since the job may come."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable

import pytest
import redis

from producer import AsyncClient, Client, JobLost
from tests.support import RedisServer, eventually
from tests.tokenmill.cli.test_cli import command, environment
from tests.tokenmill.client.test_aio import run as run_async
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.cli.console import Exit
from tokenmill.client.sync import Job

WAITS: dict[str, Callable[[Job], object]] = {
    "result": lambda job: job.result(timeout=20),
    "stream": lambda job: list(job.stream(timeout=20)),
    "text": lambda job: list(job.text(timeout=20)),
}


def forget_all(queue: Queue) -> None:
    """Delete all keys of this queue, as FLUSHALL does."""
    for key in queue.redis.scan_iter(match=queue.keys.root + "*"):
        queue.redis.delete(key)


@pytest.mark.parametrize("wait", WAITS)
def test_a_submitted_job_that_redis_lost_is_reported(queue: Queue, client: Client, wait: str) -> None:
    job = client.submit("x", id="mine")
    forget_all(queue)
    with pytest.raises(JobLost, match=f"job mine is gone from queue {queue.keys.queue}") as caught:
        WAITS[wait](job)
    assert caught.value.job_id == "mine"


@pytest.mark.parametrize("wait", WAITS)
def test_a_job_that_was_seen_once_is_reported_when_redis_loses_it(queue: Queue, client: Client, wait: str) -> None:
    client.submit("x", id="mine")
    job = client.job("mine")
    with pytest.raises(TimeoutError):
        job.result(timeout=0.1)
    forget_all(queue)
    with pytest.raises(JobLost):
        WAITS[wait](job)


def test_a_job_that_is_lost_while_its_text_streams_is_reported(
    queue: Queue, client: Client, worker: MiniWorker
) -> None:
    queue.add("bare", b'{"prompt":"one HOLD"}')
    text = client.job("bare").text(timeout=20)
    assert next(text) == "one "
    forget_all(queue)
    with pytest.raises(JobLost):
        next(text)
    worker.release()
    eventually(lambda: worker.errors)  # it cannot end its job either
    worker.errors.clear()


def test_a_wait_for_a_job_that_redis_never_had_goes_on(queue: Queue, client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.job("never").result(timeout=1)
    with pytest.raises(TimeoutError):
        list(client.job("never").stream(timeout=1))


def test_a_job_is_reported_as_lost_in_none_of_its_states(queue: Queue, client: Client) -> None:
    job = client.submit("x", delay=0.5)
    bare = queue.add("bare")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            job.result(timeout=0.4)
        with pytest.raises(TimeoutError):
            client.job(bare.id).result(timeout=0.4)
        queue.scripts().promote()


def test_map_reports_a_lost_job_and_cancels_the_remaining_jobs(queue: Queue, client: Client) -> None:
    results = client.map([{"prompt": "x", "id": name} for name in ("a", "b")], timeout=20)

    def lose() -> None:
        eventually(lambda: queue.depth() == 2)
        queue.redis.delete(queue.keys.job("a"), queue.keys.out("a"))

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(JobLost, match="job a is gone"):
        next(results)
    thread.join()
    assert queue.redis.hget(queue.keys.job("b"), "state") == b"cancelled"


def test_the_asyncio_client_reports_a_lost_job_too(queue: Queue) -> None:
    async def scene(client: AsyncClient) -> None:
        job = await client.submit("x")
        forget_all(queue)
        with pytest.raises(JobLost):
            await job.result(timeout=20)
        with pytest.raises(JobLost):
            _ = [piece async for piece in job.text(timeout=20)]

    run_async(queue, scene)


@pytest.mark.redis_server
@pytest.mark.parametrize("verb", ["submit", "tail", "result"])
def test_a_command_reports_a_lost_job_when_redis_comes_back_empty(own_redis: RedisServer, verb: str) -> None:
    with own_redis.client() as admin:
        queue = Queue(own_redis.url, admin, Client().keys)
        with Client(own_redis.url) as client:
            if verb != "submit":
                client.submit("x", id="mine")
        arguments = ("submit", "x", "--id", "mine") if verb == "submit" else (verb, "mine")
        process = subprocess.Popen(command(queue, *arguments), env=environment(queue), stderr=subprocess.PIPE)
        eventually(lambda: admin.exists(queue.keys.job("mine")) and len(admin.client_list(_type="normal")) > 1, 30)
        # Blocked: it has looked for the job before.
        eventually(lambda: any(one["cmd"] == "xread" and "b" in one["flags"] for one in admin.client_list()), 30)
    own_redis.kill()
    for path in own_redis.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    own_redis.start()
    _, told = process.communicate(timeout=60)
    assert process.returncode == Exit.FAILED
    assert b"job mine is gone from queue default: Redis has lost its data" in told
    assert b"Traceback" not in told


def test_a_user_without_the_right_to_exists_waits(
    queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise redis.exceptions.NoPermissionError("this user has no permissions to access one of the keys")

    job = client.submit("x")
    forget_all(queue)
    monkeypatch.setattr(redis.client.Pipeline, "execute", refuse)
    with pytest.raises(TimeoutError):
        job.result(timeout=0.5)
