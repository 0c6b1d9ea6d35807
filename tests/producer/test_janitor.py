"""The janitor removes idle consumers and leftovers of deleted jobs, and nothing else."""

from __future__ import annotations

from typing import Any

from producer.callbacks import CLERKS, ensure_clerks
from producer.janitor import clean_up
from tests.tokenmill.mini import Queue
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import GROUP


def names(queue: Queue) -> set[bytes]:
    return {one["name"] for one in queue.redis.xinfo_consumers(queue.keys.lane("normal"), GROUP)}


def test_an_idle_consumer_is_removed_unless_it_holds_entries_or_its_worker_lives(queue: Queue) -> None:
    busy, gone, alive = (queue.scripts(name) for name in ("busy", "gone", "alive"))
    queue.deliver(busy)
    for other in (gone, alive):
        other.read(1)
        for lane in queue.keys.lanes:
            queue.redis.xgroup_createconsumer(lane, GROUP, other.consumer)
    queue.redis.hset(queue.keys.worker("alive"), "status", "ready")
    assert clean_up(queue.redis, queue.keys)["consumers"] == 0  # all of them were here a moment ago
    assert clean_up(queue.redis, queue.keys, idle_s=0)["consumers"] >= 3
    assert names(queue) == {b"busy", b"alive"}
    pending: Any = queue.redis.xpending(queue.keys.lane("normal"), GROUP)
    assert pending["pending"] == 1


def test_an_idle_clerk_is_removed_unless_it_holds_entries(queue: Queue) -> None:
    ensure_clerks(queue.redis, queue.keys)
    queue.redis.xadd(queue.keys.callbacks, {"id": "a", "url": "u"})
    streams: dict[Any, Any] = {queue.keys.callbacks: ">"}
    for name in ("busy", "gone"):
        queue.redis.xgroup_createconsumer(queue.keys.callbacks, CLERKS, name)
        queue.redis.xreadgroup(CLERKS, name, streams)
    assert clean_up(queue.redis, queue.keys, idle_s=0)["consumers"] == 1
    (left,) = queue.redis.xinfo_consumers(queue.keys.callbacks, CLERKS)
    assert (left["name"], left["pending"]) == (b"busy", 1)


def test_an_abandoned_group_expires_and_one_with_jobs_does_not(queue: Queue) -> None:
    group, out = queue.keys.group("g"), queue.keys.group_out("g")
    queue.redis.hset(group, "expected", "5")
    queue.redis.xadd(out, {"id": "x", "status": "succeeded"})
    ref = queue.deliver(queue.scripts())
    assert clean_up(queue.redis, queue.keys)["groups"] == 0  # something runs, and may be the group's
    queue.redis.xdel(queue.keys.lane("normal"), ref.entry)
    queue.redis.zadd(queue.keys.delayed, {"later": 1})
    assert clean_up(queue.redis, queue.keys)["groups"] == 0
    queue.redis.delete(queue.keys.delayed)
    assert clean_up(queue.redis, queue.keys)["groups"] == 2
    assert queue.redis.ttl(group) > 0
    assert queue.redis.ttl(out) > 0
    assert clean_up(queue.redis, queue.keys)["groups"] == 0
    scripts = queue.scripts()
    scripts.enqueue(JobEntry("late", b'{"prompt":"x"}', group="g"))
    assert queue.redis.ttl(group) == -1


def test_a_queue_that_never_existed_needs_no_cleaning(queue: Queue) -> None:
    assert clean_up(queue.redis, queue.keys, idle_s=0) == {"consumers": 0, "groups": 0, "jobs": 0}
