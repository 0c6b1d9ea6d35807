"""After entries or lanes were deleted by hand, counters become correct again and readers of the jobs get a result."""

from __future__ import annotations

import pytest

from producer.janitor import clean_up
from tests.steps import Steps
from tests.tokenmill.mini import Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.calls import QuotaExceeded
from tokenmill.protocol.events import FinalEvent
from tokenmill.protocol.job import Identity, JobEntry
from tokenmill.protocol.keys import GROUP
from tokenmill.protocol.replies import Ref, StartStatus
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.scripts import DELETED

BODY = b'{"prompt":"x"}'


def delete(queue: Queue, entry: str, lane: str = "normal") -> None:
    """Delete entries as an operator does, by hand."""
    queue.redis.xdel(queue.keys.lane(lane), entry)


def look(queue: Queue, scripts: Steps) -> int:
    """Reconcile twice without interval and grace: the first look finds an entry missing, the second ends its job."""
    ended = scripts.reconcile(1000, look_ms=-1000)
    return ended + scripts.reconcile(1000, look_ms=-1000)


def run(scripts: Steps, ref: Ref, identity: Identity) -> None:
    started = scripts.start(ref, identity, prompt_tokens=1)
    assert started.status is StartStatus.OK
    scripts.finalise(ref, identity, Result(ref.id, Status.SUCCEEDED), fence=started.fence, published=0)


class TestQuota:
    def test_the_same_id_again_counts_once(self, queue: Queue) -> None:
        scripts, quota = queue.scripts(), queue.keys.quota("t")
        for _ in range(3):
            delete(queue, scripts.enqueue(JobEntry("a", BODY, tenant="t", group="g")))
        scripts.enqueue(JobEntry("a", BODY, tenant="t", group="g"))
        assert queue.redis.get(quota) == b"1"
        assert queue.hash(queue.keys.group("g")) == {"total": "1"}
        (found,) = scripts.read(1) or ()
        run(scripts, Ref("normal", found.entry, "a"), Identity("a", tenant="t", group="g"))
        assert (queue.redis.get(quota), queue.redis.exists(queue.keys.booked("t"))) == (b"0", 0)
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "succeeded": "1"}

    def test_the_same_id_for_another_tenant_and_group_is_counted_there_alone(self, queue: Queue) -> None:
        scripts = queue.scripts()
        delete(queue, scripts.enqueue(JobEntry("a", BODY, tenant="t", group="g")))
        scripts.enqueue(JobEntry("a", BODY, tenant="u", group="h"))
        assert queue.redis.mget(queue.keys.quota("t"), queue.keys.quota("u")) == [b"0", b"1"]
        assert queue.hash(queue.keys.group("g")) == {"total": "0"}
        assert queue.hash(queue.keys.group("h")) == {"total": "1"}

    def test_the_same_id_as_a_bare_entry_counts_once(self, queue: Queue) -> None:
        scripts, identity = queue.scripts(), Identity("a", tenant="t", group="g")
        delete(queue, scripts.enqueue(JobEntry("a", BODY, tenant="t", group="g")))
        run(scripts, queue.deliver(scripts, "a", tenant="t", group="g"), identity)
        assert queue.redis.get(queue.keys.quota("t")) == b"0"
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "succeeded": "1"}

    @pytest.mark.parametrize("starts", [True, False], ids=["started", "answered without a start"])
    @pytest.mark.parametrize("other", [{}, {"tenant": "u", "group": "h"}, {"tenant": "t", "group": "h"}])
    def test_the_same_id_as_a_bare_entry_of_another_tenant_or_group_leaves_no_count(
        self, queue: Queue, other: dict[str, str], starts: bool
    ) -> None:
        scripts, identity = queue.scripts(), Identity("a", **other)
        delete(queue, scripts.enqueue(JobEntry("a", BODY, tenant="t", group="g")))
        ref = queue.deliver(scripts, "a", **other)
        if starts:
            run(scripts, ref, identity)
        else:
            scripts.answer(ref, identity, Result("a", Status.FAILED))
        assert queue.redis.get(queue.keys.quota("t")) == b"0"
        assert not queue.redis.exists(queue.keys.booked("t"), queue.keys.booked("u"))
        assert queue.hash(queue.keys.group("g")) == {"total": "0"}
        if other:
            assert queue.hash(queue.keys.group("h")) == {"total": "1", "succeeded" if starts else "failed": "1"}

    @pytest.mark.parametrize("whole_lane", [False, True])
    def test_deleted_jobs_do_not_count_against_a_tenants_cap(self, queue: Queue, whole_lane: bool) -> None:
        scripts = queue.scripts()
        queue.redis.hset(queue.keys.meta, "max_per_tenant", 3)
        entries = [scripts.enqueue(JobEntry(f"{n}", BODY, tenant="t")) for n in range(3)]
        with pytest.raises(QuotaExceeded) as refused:
            scripts.enqueue(JobEntry("new", BODY, tenant="t"))
        assert refused.value.used == 3
        if whole_lane:
            queue.redis.delete(queue.keys.lane("normal"))
        else:
            delete(queue, entries[1])
        scripts.enqueue(JobEntry("new", BODY, tenant="t"))
        assert queue.redis.get(queue.keys.quota("t")) == (b"1" if whole_lane else b"3")

    def test_any_number_of_deleted_jobs_is_found_in_time(self, queue: Queue) -> None:
        scripts = queue.scripts()
        entries = [scripts.enqueue(JobEntry(f"{n}", BODY, tenant="t")) for n in range(40)]
        queue.redis.hset(queue.keys.meta, "max_per_tenant", 40)
        delete(queue, entries[-1])
        for _ in range(2):  # a call looks at sixteen members
            with pytest.raises(QuotaExceeded):
                scripts.enqueue(JobEntry("new", BODY, tenant="t"))
        scripts.enqueue(JobEntry("new", BODY, tenant="t"))

    def test_an_overwritten_quota_counter_is_rebuilt(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("a", BODY, tenant="t"))
        queue.redis.set(queue.keys.quota("t"), 17)
        queue.redis.set(queue.keys.booked("u"), "no sorted set")
        scripts.enqueue(JobEntry("b", BODY, tenant="t"))
        scripts.enqueue(JobEntry("c", BODY, tenant="u"))
        assert queue.redis.mget(queue.keys.quota("t"), queue.keys.quota("u")) == [b"2", b"1"]


class TestReconcile:
    def test_a_job_whose_entry_is_gone_ends_as_cancelled_and_says_why(self, queue: Queue, client: Client) -> None:
        scripts, keys = queue.scripts(), queue.keys
        entry = JobEntry("a", BODY, tenant="t", group="g", callback="https://x/")
        delete(queue, scripts.enqueue(entry))
        scripts.enqueue(JobEntry("stays", BODY, tenant="t"))
        assert look(queue, scripts) == 1
        result = client.job("a").result(timeout=1)
        assert (result.status, result.cancel_reason, result.choices) == (Status.CANCELLED, DELETED, ())
        assert isinstance(queue.events()[-1], FinalEvent)
        assert queue.redis.get(keys.quota("t")) == b"1"
        assert queue.hash(keys.group("g")) == {"total": "1", "cancelled": "1"}
        assert [f[b"id"] for _, f in queue.redis.xrange(keys.callbacks)] == [b"a"]
        assert 0 < queue.redis.ttl(keys.job("a")) <= 86_400
        assert queue.redis.zrange(keys.open, 0, -1) == [b"stays"]
        assert look(queue, scripts) == 0
        assert queue.hash(keys.job("stays"))["state"] == "queued"

    def test_a_deleted_lane_ends_its_queued_and_running_jobs(self, queue: Queue) -> None:
        scripts, identity = queue.scripts(), Identity("ran", tenant="t")
        queue.redis.hset(queue.keys.meta, "max_running_per_tenant", 5)
        ref = queue.deliver(scripts, "ran", tenant="t")
        scripts.start(ref, identity, prompt_tokens=1)
        waiting = [f"w{n}" for n in range(50)]
        for job_id in waiting:
            scripts.enqueue(JobEntry(job_id, BODY))
        queue.redis.delete(queue.keys.lane("normal"))
        assert clean_up(queue.redis, queue.keys)["jobs"] == 0, "not before a second look"
        assert look(queue, scripts) == 51
        assert queue.redis.exists(*(queue.keys.result(job_id) for job_id in ["ran", *waiting])) == 51
        assert not queue.redis.exists(queue.keys.open, queue.keys.running("t"))

    def test_a_job_is_not_cancelled_while_an_unread_entry_may_be_its_moved_copy(self, queue: Queue) -> None:
        """An operator adds the job to another lane with a bare XADD, then deletes the first entry."""
        scripts, keys = queue.scripts(), queue.keys
        first = scripts.enqueue(JobEntry("a", BODY))
        moved = queue.add("a", lane="high")
        delete(queue, first)
        for _ in range(3):
            assert look(queue, scripts) == 0
        (found,) = scripts.read(1) or ()
        assert found.entry == moved.entry
        run(scripts, Ref("high", found.entry, "a"), Identity("a"))
        assert look(queue, scripts) == 0
        assert Result.from_json(queue.redis.get(keys.result("a")) or b"").status is Status.SUCCEEDED

    def test_reconcile_ignores_a_job_that_was_enqueued_again_or_delayed(self, queue: Queue) -> None:
        scripts = queue.scripts()
        for job_id in ("again", "aside"):
            delete(queue, scripts.enqueue(JobEntry(job_id, BODY)))
        scripts.reconcile(look_ms=-1000)
        scripts.enqueue(JobEntry("again", BODY))
        scripts.enqueue(JobEntry("aside", BODY), delay=60)
        assert look(queue, scripts) == 0
        assert queue.redis.zrange(queue.keys.open, 0, -1) == [b"again"]

    def test_jobs_are_checked_in_turn_at_intervals(self, queue: Queue) -> None:
        scripts = queue.scripts()
        for n in range(10):
            scripts.enqueue(JobEntry(f"{n}", BODY))
        delete(queue, next(e.decode() for e, f in queue.redis.xrange(queue.keys.lane("normal")) if f[b"id"] == b"9"))
        assert scripts.reconcile() == 0, "all were added a moment ago"
        assert queue.redis.zcount(queue.keys.open, "-inf", "(0") == 0
        for _ in range(5):
            scripts.reconcile(4, look_ms=-1)
        assert queue.redis.zcount(queue.keys.open, "-inf", "+inf") == 9

    def test_a_member_of_open_that_is_not_a_job_id_is_removed(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.zadd(queue.keys.open, {b"\xff": 1, "unknown": 2, "old": -1})
        assert look(queue, scripts) == 0
        assert not queue.redis.exists(queue.keys.open)

    def test_an_ended_job_is_not_in_open(self, queue: Queue) -> None:
        scripts = queue.scripts()
        run(scripts, queue.deliver(scripts, "bare", tenant="t"), Identity("bare", tenant="t"))
        scripts.enqueue(JobEntry("a", BODY, tenant="t"))
        scripts.cancel("a")
        assert not queue.redis.exists(queue.keys.open, queue.keys.booked("t"))
        assert queue.redis.xpending(queue.keys.lane("normal"), GROUP)["pending"] == 0


class TestLives:
    @pytest.mark.parametrize(
        ("published", "expected"),
        [
            (("1000", "100"), (1000, 100)),
            (("50", "900"), (50, 50)),
            (("9" * 20, "100"), (86_400, 100)),  # not an expiry that Redis accepts
        ],
    )
    def test_result_and_stream_of_a_cancelled_job_live_as_long_as_the_workers_published(
        self, queue: Queue, client: Client, published: tuple[str, str], expected: tuple[int, int]
    ) -> None:
        fields = {"result_ttl_seconds": published[0], "stream_ttl_seconds": published[1]}
        queue.redis.hset(queue.keys.meta, mapping=fields)  # type: ignore[arg-type]
        for job in (client.submit("x", id="a", group="g"), client.submit("x", id="b", delay=60)):
            job.cancel()
            for key in (queue.keys.result(job.id), queue.keys.job(job.id)):
                assert expected[0] - 10 < queue.redis.ttl(key) <= expected[0]
            assert expected[1] - 10 < queue.redis.ttl(queue.keys.out(job.id)) <= expected[1]
        assert expected[0] - 10 < queue.redis.ttl(queue.keys.group("g")) <= expected[0]
