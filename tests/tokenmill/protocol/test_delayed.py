"""Delayed jobs obey the queue's caps, join their lanes in any number, and have a state of their own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support import eventually
from tests.tokenmill.mini import Queue
from tokenmill.client.aio import AsyncClient
from tokenmill.client.sync import Client
from tokenmill.protocol.calls import JobExists, QueueFull, QuotaExceeded, enqueue_call, enqueue_reply
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.lua import Runner

BODY = b'{"prompt":"x"}'


def ids(queue: Queue) -> list[str]:
    return [f[b"id"].decode() for lane in queue.keys.lanes for _, f in queue.redis.xrange(lane)]


def make_due(queue: Queue) -> None:
    for place, job_id in enumerate(queue.redis.zrange(queue.keys.delayed, 0, -1), start=1):
        queue.redis.zadd(queue.keys.delayed, {job_id: place})


def test_max_depth_counts_delayed_jobs_only_against_delayed_jobs(client: Client, queue: Queue) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 2)
    for n in range(2):
        client.submit("x", id=f"later{n}", delay=60)
    with pytest.raises(QueueFull) as full:
        client.submit("x", delay=60)
    assert full.value.depth == 2
    client.submit("x", id="now")
    with pytest.raises(QueueFull):
        client.submit("x", delay=60)
    assert queue.redis.zcard(queue.keys.delayed) == 2


def test_max_per_tenant_counts_delayed_jobs_against_a_delayed_job(client: Client, queue: Queue) -> None:
    queue.redis.hset(queue.keys.meta, "max_per_tenant", 2)
    first = client.submit("x", tenant="t", delay=60)
    client.submit("x", tenant="t", delay=60)
    with pytest.raises(QuotaExceeded) as refused:
        client.submit("x", tenant="t", delay=60)
    assert refused.value.used == 2
    client.submit("x", tenant="u", delay=60)
    assert queue.redis.get(queue.keys.quota("t")) is None, "the quota counts queued and running jobs"
    first.cancel()
    client.submit("x", tenant="t", delay=60)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_due_job_joins_its_lane_only_below_the_caps(client: Client, queue: Queue, by_hand: bool) -> None:
    scripts, redis, keys = queue.scripts(), queue.redis, queue.keys
    for n in range(4):
        if by_hand:  # in one MULTI, as from any language
            redis.hset(keys.delayed_job(f"{n}"), mapping={"id": f"{n}", "body": BODY, "tenant": "t"})
            redis.zadd(keys.delayed, {f"{n}": 1})
        else:
            client.submit("x", id=f"{n}", tenant="t", delay=60)
    make_due(queue)
    redis.hset(keys.meta, "max_depth", 2)
    assert scripts.promote() == 2
    assert ids(queue) == ["0", "1"]
    redis.hset(keys.meta, mapping={"max_depth": 9, "max_per_tenant": 2})
    assert scripts.promote() == 0
    client.job("0").cancel()
    make_due(queue)
    assert scripts.promote() == 1
    assert ids(queue) == ["1", "2"]
    assert (redis.get(keys.quota("t")), redis.zrange(keys.delayed, 0, -1)) == (b"2", [b"3"])


def test_a_tenant_at_its_cap_does_not_delay_other_tenants(client: Client, queue: Queue) -> None:
    scripts = queue.scripts()
    queue.redis.hset(queue.keys.meta, "max_per_tenant", 1)
    client.submit("x", tenant="t")
    queue.redis.hset(queue.keys.meta, "max_per_tenant", 99)
    for n in range(10):
        client.submit("x", id=f"t{n}", tenant="t", delay=60)
    client.submit("x", id="other", delay=90)
    queue.redis.hset(queue.keys.meta, "max_per_tenant", 1)
    make_due(queue)
    assert scripts.promote(chunk=4) == 1
    assert "other" in ids(queue)
    (_, due) = queue.redis.zrange(queue.keys.delayed, 0, 0, withscores=True)[0]
    assert due > queue.redis.time()[0] * 1000, "they are looked at again, but not at once"


def test_one_promote_moves_all_due_jobs_in_the_order_of_their_due_times(queue: Queue) -> None:
    scripts, count = queue.scripts(), 300 if queue.real else 40
    for n in range(count):
        queue.redis.hset(queue.keys.delayed_job(f"{n}"), mapping={"id": f"{n}", "body": BODY})
        queue.redis.zadd(queue.keys.delayed, {f"{n}": n + 1})
    assert scripts.promote(chunk=16, seconds=60) == count
    assert ids(queue) == [f"{n}" for n in range(count)]
    assert scripts.promote() == 0


def test_a_repeated_delayed_enqueue_whose_reply_was_lost_adds_one_job(queue: Queue) -> None:
    entry, runner = JobEntry("a", BODY, tenant="t"), Runner(queue.redis)
    call = enqueue_call(queue.keys, entry, "low", 60)
    for _ in range(2):
        assert enqueue_reply(runner.run(*call), entry) == ""
    assert queue.redis.zcard(queue.keys.delayed) == 1
    with pytest.raises(JobExists, match="delayed"):
        queue.scripts().enqueue(entry, delay=5)
    make_due(queue)
    queue.scripts().promote()
    with pytest.raises(JobExists, match="queued"):
        queue.scripts().enqueue(entry, delay=5)


def test_a_delayed_submit_waits_until_the_queue_is_below_its_cap(client: Client, queue: Queue) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 1)
    client.submit("x", id="first", delay=60)
    threading.Timer(0.1, client.job("first").cancel).start()
    client.submit("x", id="second", delay=60, wait=True)
    assert queue.redis.zrange(queue.keys.delayed, 0, -1) == [b"second"]


def test_the_asyncio_client_obeys_the_caps_too(queue: Queue) -> None:
    async def run() -> None:
        async with AsyncClient(queue.url, queue.keys.queue) as client:
            job = await client.submit("x", delay=60, tenant="t", group="g")
            with pytest.raises(QueueFull):
                await client.submit("x", delay=60)
            await job.cancel()

    queue.redis.hset(queue.keys.meta, "max_depth", 1)
    asyncio.run(run())
    assert queue.hash(queue.keys.group("g")) == {"total": "1", "cancelled": "1"}


def test_the_state_of_a_delayed_job_is_delayed(client: Client, queue: Queue) -> None:
    job = client.submit("x", delay=60)
    queue.redis.hset(queue.keys.delayed_job("hand"), mapping={"id": "hand", "body": BODY})
    assert client.states([job.id, "hand", "unknown"]) == ["delayed", "delayed", None]
    assert queue.redis.ttl(queue.keys.job(job.id)) > 0, "the hash of one that is deleted by hand goes by itself"
    make_due(queue)
    queue.scripts().promote()
    assert client.states([job.id]) == ["queued"]
    assert queue.redis.ttl(queue.keys.job(job.id)) == -1
    assert eventually(lambda: ids(queue)) == [job.id]
