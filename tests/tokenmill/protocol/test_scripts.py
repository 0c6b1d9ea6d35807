"""The scripts, on fakeredis and on a real server."""

from __future__ import annotations

import itertools
import random

import pytest
from redis.exceptions import OutOfMemoryError

from tests.steps import Steps
from tests.support import RedisServer
from tests.tokenmill.mini import Queue
from tokenmill.protocol.calls import JobExists, QueueFull, QuotaExceeded, enqueue_call, enqueue_reply
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.job import Identity, JobEntry, parse_entry
from tokenmill.protocol.keys import GROUP, Keys
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.replies import (
    CancelReply,
    DeadLetter,
    Ending,
    Ref,
    Started,
    StartStatus,
    TokenBatch,
    TokenWrite,
    Why,
)
from tokenmill.protocol.result import Choice, Result, Status

BODY = b'{"prompt":"x"}'
IDENTITY = Identity("a")


def done(text: str = "", status: Status = Status.SUCCEEDED, job_id: str = "a") -> Result:
    return Result(job_id, status, choices=(Choice(0, text, "stop"),))


def bare(status: Status = Status.FAILED, job_id: str = "a") -> Result:
    return Result(job_id, status)


def start(scripts: Steps, ref: Ref, identity: Identity = IDENTITY, **more: int) -> Started:
    return scripts.start(ref, identity, prompt_tokens=3, **more)


def batch(queue: Queue, *events: tuple[str, int, int, str]) -> TokenBatch:
    made = TokenBatch(queue.keys)
    for job_id, fence, n, text in events:
        made.add(job_id, fence, n, 0, text, 1)
    return made


def pending(queue: Queue, lane: str = "normal") -> int:
    return int(queue.redis.xpending(queue.keys.lane(lane), GROUP)["pending"])


class TestEnqueue:
    def test_an_accepted_job_is_in_its_lane_and_has_its_job_hash(self, queue: Queue) -> None:
        scripts = queue.scripts()
        entry = scripts.enqueue(JobEntry("a", BODY, ttl_ms=5, group="g", tenant="t", stream=False), "high")
        fields = dict(queue.redis.xrange(queue.keys.lane("high"))[0][1])
        assert fields == {
            b"id": b"a", b"body": BODY, b"ttl_ms": b"5", b"stream": b"0", b"group": b"g", b"tenant": b"t",
        }  # fmt: skip
        stored = queue.hash(queue.keys.job("a"))
        assert (stored["state"], stored["lane"], stored["entry"]) == ("queued", "high", entry)
        assert queue.redis.ttl(queue.keys.job("a")) == -1
        assert queue.hash(queue.keys.group("g")) == {"total": "1"}
        assert queue.redis.get(queue.keys.quota("t")) == b"1"

    def test_a_live_or_finished_id_is_refused_with_its_state(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("a", BODY))
        with pytest.raises(JobExists, match="queued"):
            scripts.enqueue(JobEntry("a", BODY), "low")
        scripts.cancel("a")
        with pytest.raises(JobExists, match="cancelled"):
            scripts.enqueue(JobEntry("a", BODY))
        assert queue.depth() == 0

    def test_a_repeated_call_whose_reply_was_lost_adds_nothing(self, queue: Queue) -> None:
        entry, runner = JobEntry("a", BODY, tenant="t", group="g"), Runner(queue.redis)
        call = enqueue_call(queue.keys, entry, "normal")
        first = enqueue_reply(runner.run(*call), entry)
        assert enqueue_reply(runner.run(*call), entry) == first
        assert queue.depth() == 1
        assert queue.redis.get(queue.keys.quota("t")) == b"1"
        queue.scripts().cancel("a")
        assert enqueue_reply(runner.run(*call), entry) == first

    def test_an_entry_deleted_by_hand_does_not_block_its_id(self, queue: Queue) -> None:
        scripts = queue.scripts()
        entry = scripts.enqueue(JobEntry("a", BODY))
        queue.redis.xdel(queue.keys.lane("normal"), entry)
        scripts.enqueue(JobEntry("a", BODY))
        assert queue.depth() == 1

    def test_depth_and_quota_caps_of_meta_refuse_and_tell_how_many_there_are(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.hset(queue.keys.meta, mapping={"max_depth": 3, "max_per_tenant": 1})
        scripts.enqueue(JobEntry("a", BODY, tenant="t"))
        with pytest.raises(QuotaExceeded) as quota:
            scripts.enqueue(JobEntry("b", BODY, tenant="t"))
        assert (quota.value.tenant, quota.value.used) == ("t", 1)
        scripts.enqueue(JobEntry("b", BODY), "low")
        scripts.enqueue(JobEntry("c", BODY), "high")
        with pytest.raises(QueueFull) as full:
            scripts.enqueue(JobEntry("d", BODY))
        assert full.value.depth == 3

    def test_a_paused_queue_takes_jobs_but_hands_out_none(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.hset(queue.keys.meta, "paused", 1)
        scripts.enqueue(JobEntry("a", BODY))
        assert scripts.read(1) is None
        queue.redis.hdel(queue.keys.meta, "paused")
        assert len(scripts.read(1) or ()) == 1


class TestRead:
    def test_a_read_returns_at_most_count_entries_over_all_lanes_high_first(self, queue: Queue) -> None:
        scripts = queue.scripts()
        for lane in ("low", "normal", "high"):
            for n in range(2):
                queue.add(f"{lane}{n}", lane=lane)
        got = [d.fields[b"id"].decode() for d in scripts.read(3) or ()]
        assert got == ["high0", "high1", "normal0"]
        assert len(scripts.read(10) or ()) == 3
        assert scripts.read(10) == []

    def test_entries_from_before_the_group_was_created_are_delivered(self, queue: Queue) -> None:
        queue.add("early")
        assert len(queue.scripts().read(5) or ()) == 1


class TestStart:
    def test_the_first_start_opens_the_stream_and_the_job_hash(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        started = start(scripts, ref, Identity("a", group="g", tenant="t"))
        assert (started.status, started.fence, started.attempt, started.deaths) == (StartStatus.OK, 1, 1, 0)
        assert 0 <= started.now_ms - ref.added_ms < 60_000
        assert queue.events() == [StartEvent("1-0", 1, "w1", 1, 3)]
        stored = queue.hash(queue.keys.job("a"))
        expected = {
            "state": "running", "lane": "normal", "entry": ref.entry, "worker": "w1", "fence": "1", "attempt": "1",
            "deaths": "0", "group": "g", "tenant": "t",
        }  # fmt: skip
        assert stored.items() >= expected.items()
        assert queue.redis.ttl(queue.keys.job("a")) == -1
        assert 86_000 < queue.redis.ttl(queue.keys.out("a")) <= 86_400

    def test_only_the_worker_that_holds_an_entry_can_start_the_job(self, queue: Queue) -> None:
        mine, other = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(mine)
        assert start(other, ref).status is StartStatus.LOST
        assert start(mine, Ref("low", ref.entry, "a")).status is StartStatus.LOST
        assert not queue.redis.exists(queue.keys.job("a"), queue.keys.out("a"))

    def test_an_entry_that_was_deleted_is_lost(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        queue.redis.xdel(queue.keys.lane("normal"), ref.entry)
        assert start(scripts, ref).status is StartStatus.LOST
        assert scripts.renew([ref]) == [ref]

    def test_without_a_consumer_group_every_entry_is_lost_without_error(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        queue.redis.delete(queue.keys.lane("normal"))
        assert start(scripts, ref).status is StartStatus.LOST
        assert scripts.answer(ref, IDENTITY, bare()) is Ending.LOST
        assert scripts.renew([ref]) == [ref]
        assert not scripts.yield_(ref, idle_ms=1)

    def test_the_fence_rises_with_every_start_and_survives_trimming(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        assert start(scripts, ref).fence == 1
        queue.redis.xtrim(queue.keys.out("a"), maxlen=0)
        assert start(scripts, ref).fence == 2
        queue.redis.delete(queue.keys.job("a"))
        assert start(scripts, ref).fence == 3, "the stream's last ID remembers"
        queue.redis.delete(queue.keys.out("a"))
        assert start(scripts, ref).fence == 4, "so does the job's hash"

    def test_a_repeated_start_whose_reply_was_lost_starts_nothing(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        first = scripts.start(ref, IDENTITY, prompt_tokens=1, max_attempts=1, nonce="n1")
        again = scripts.start(ref, IDENTITY, prompt_tokens=1, max_attempts=1, nonce="n1")
        assert (again.status, again.fence, again.attempt) == (StartStatus.OK, first.fence, 1)
        assert len(queue.events()) == 1

    def test_starts_in_one_round_trip_are_independent(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.script_flush()
        refs = [queue.deliver(scripts, job_id) for job_id in ("a", "b", "c")]
        queue.redis.set(queue.keys.cancel("b"), "no", ex=60)
        take_over(queue, refs[2], "w2")
        started = scripts.start_all([(ref, Identity(ref.id), {"prompt_tokens": 1}) for ref in refs])
        assert [s.status for s in started] == [StartStatus.OK, StartStatus.CANCELLED, StartStatus.LOST]

    def test_a_takeover_of_a_running_job_counts_as_a_death_and_a_yield_does_not(self, queue: Queue) -> None:
        one, two = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(one)
        start(one, ref)
        take_over(queue, ref, "w2")
        taken = start(two, ref)
        assert (taken.attempt, taken.deaths, taken.fence) == (2, 1, 2)
        assert two.yield_(ref, idle_ms=0)
        assert queue.hash(queue.keys.job("a"))["state"] == "queued"
        take_over(queue, ref, "w1")
        assert (start(one, ref).attempt, queue.hash(queue.keys.job("a"))["deaths"]) == (3, "1")
        assert one.yield_(ref, idle_ms=0, graceful=False)
        take_over(queue, ref, "w2")
        assert start(two, ref).deaths == 2

    def test_a_second_entry_of_a_live_id_is_a_duplicate_and_is_deleted(self, queue: Queue) -> None:
        scripts = queue.scripts()
        first = queue.deliver(scripts)
        start(scripts, first)
        for lane in ("normal", "low"):
            second = queue.deliver(scripts, lane=lane)
            assert start(scripts, second).status is StartStatus.DUP
            assert queue.redis.xlen(queue.keys.lane(lane)) == (1 if lane == "normal" else 0)
        assert start(scripts, first).status is StartStatus.OK

    def test_equal_entry_ids_in_two_lanes_are_two_jobs(self, queue: Queue) -> None:
        scripts = queue.scripts()
        for lane in ("high", "low"):
            queue.redis.xadd(queue.keys.lane(lane), {"id": "a", "body": BODY}, id="7-7")
        assert len(scripts.read(2) or ()) == 2
        assert start(scripts, Ref("high", "7-7", "a")).status is StartStatus.OK
        assert start(scripts, Ref("low", "7-7", "a")).status is StartStatus.DUP
        assert start(scripts, Ref("high", "7-7", "a")).status is StartStatus.OK

    def test_an_entry_of_an_id_with_a_result_is_a_duplicate(self, queue: Queue) -> None:
        scripts = queue.scripts()
        finish_one(queue, scripts)
        again = queue.deliver(scripts)
        assert start(scripts, again).status is StartStatus.DUP
        assert (queue.depth(), pending(queue)) == (0, 0)

    def test_a_cancelled_job_is_not_started_and_gets_no_event(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.set(queue.keys.cancel("a"), "too late", ex=60)
        ref = queue.deliver(scripts)
        started = start(scripts, ref)
        assert (started.status, started.reason) == (StartStatus.CANCELLED, "too late")
        assert queue.events() == []
        assert scripts.answer(ref, IDENTITY, bare(Status.CANCELLED)) is Ending.OK
        assert [type(e) for e in queue.events()] == [StartEvent, FinalEvent]
        assert not queue.redis.exists(queue.keys.cancel("a"))

    def test_expiry_is_decided_by_redis_clock(self, queue: Queue) -> None:
        scripts = queue.scripts()
        now = queue.redis.time()[0] * 1000
        queue.redis.xadd(queue.keys.lane("normal"), {"id": "a", "body": BODY}, id=f"{now - 10_000}-0")
        scripts.read(1)
        ref = Ref("normal", f"{now - 10_000}-0", "a")
        assert start(scripts, ref, ttl_ms=5000).status is StartStatus.EXPIRED
        assert start(scripts, ref, ttl_ms=3_600_000).status is StartStatus.OK

    def test_max_attempts_limits_the_starts(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        assert [start(scripts, ref, max_attempts=2).status for _ in range(3)] == [
            StartStatus.OK, StartStatus.OK, StartStatus.SPENT,
        ]  # fmt: skip
        assert queue.hash(queue.keys.job("a"))["attempt"] == "2"

    def test_a_new_life_of_an_id_counts_from_zero_but_keeps_the_fence(self, queue: Queue) -> None:
        scripts = queue.scripts()
        finish_one(queue, scripts)
        queue.redis.delete(queue.keys.result("a"))
        ref = queue.deliver(scripts)
        started = start(scripts, ref)
        assert (started.status, started.attempt, started.deaths) == (StartStatus.OK, 1, 0)
        assert started.fence > 1
        assert queue.redis.ttl(queue.keys.job("a")) == -1


def take_over(queue: Queue, ref: Ref, consumer: str) -> None:
    claimed = queue.redis.xclaim(queue.keys.lane(ref.lane), GROUP, consumer, 0, [ref.entry])
    assert len(claimed) == 1


def finish_one(queue: Queue, scripts: Steps, job_id: str = "a") -> Ref:
    ref = queue.deliver(scripts, job_id)
    identity = Identity(job_id)
    fence = start(scripts, ref, identity).fence
    events = [TokenWrite(1, 0, "hi", 1)]
    assert (
        scripts.finalise(ref, identity, done("hi", job_id=job_id), fence=fence, published=0, events=events) is Ending.OK
    )
    return ref


class TestPublish:
    def test_publish_appends_events_of_many_streams_in_one_command(self, queue: Queue) -> None:
        scripts = queue.scripts()
        for job_id in ("a", "b"):
            start(scripts, queue.deliver(scripts, job_id), Identity(job_id))
        made = TokenBatch(queue.keys)
        made.add("a", 1, 1, 0, "x", 1)
        made.add("b", 1, 1, 1, "é\n\x00", 2, "[5,6]", '[{"logprob":-1.5}]')
        made.add("a", 1, 2, 0, "", 1, "[7]")
        assert len(made) == 3
        assert scripts.publish(made) == []
        assert queue.events("a")[1:] == [
            TokenEvent("1-1", 1, 1, 0, "x", 1),
            TokenEvent("1-2", 1, 2, 0, "", 1, [7]),
        ]
        assert queue.events("b")[1] == TokenEvent("1-1", 1, 1, 1, "é\n\x00", 2, [5, 6], [{"logprob": -1.5}])
        assert queue.redis.xrange(queue.keys.out("a"))[1][1] == {
            b"type": b"token", b"index": b"0", b"text": b"x", b"tokens": b"1",
        }  # fmt: skip

    def test_an_event_that_was_published_already_is_reported_as_a_repeat(self, queue: Queue) -> None:
        scripts = queue.scripts()
        start(scripts, queue.deliver(scripts))
        made = batch(queue, ("a", 1, 1, "x"), ("a", 1, 2, "y"))
        assert scripts.publish(made) == []
        more = batch(queue, ("a", 1, 1, "x"), ("a", 1, 2, "y"), ("a", 1, 3, "z"))
        assert [(r.n, r.why) for r in scripts.publish(more)] == [(1, Why.REPEAT), (2, Why.REPEAT)]
        assert [e.id for e in queue.events()] == ["1-0", "1-1", "1-2", "1-3"]

    def test_events_with_an_old_fence_are_refused_and_those_of_other_jobs_are_not(self, queue: Queue) -> None:
        one, two = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(one)
        start(one, ref)
        start(one, queue.deliver(one, "b"), Identity("b"))
        take_over(queue, ref, "w2")
        start(two, ref)
        refused = one.publish(batch(queue, ("a", 1, 1, "x"), ("b", 1, 1, "x"), ("a", 1, 2, "y")))
        assert [(r.job_id, r.n, r.why) for r in refused] == [("a", 1, Why.LOST), ("a", 2, Why.LOST)]
        assert [e.id for e in queue.events("a")] == ["1-0", "2-0"]
        assert len(queue.events("b")) == 2

    def test_no_event_follows_the_final_event(self, queue: Queue) -> None:
        scripts = queue.scripts()
        finish_one(queue, scripts)
        before = queue.events()
        assert [r.why for r in scripts.publish(batch(queue, ("a", 1, 2, "x")))] == [Why.LOST]
        assert queue.events() == before

    def test_publish_does_not_create_a_deleted_stream_again(self, queue: Queue) -> None:
        scripts = queue.scripts()
        start(scripts, queue.deliver(scripts))
        queue.redis.delete(queue.keys.out("a"))
        refused = scripts.publish(batch(queue, ("a", 1, 1, "x"), ("a", 1, 2, "y")))
        assert [(r.n, r.why) for r in refused] == [(1, Why.GONE), (2, Why.GONE)]
        assert not queue.redis.exists(queue.keys.out("a"))

    def test_a_stream_key_of_a_wrong_type_affects_only_its_own_job(self, queue: Queue) -> None:
        scripts = queue.scripts()
        start(scripts, queue.deliver(scripts))
        queue.redis.set(queue.keys.out("b"), "not a stream")
        refused = scripts.publish(batch(queue, ("b", 1, 1, "x"), ("a", 1, 1, "x")))
        assert [(r.job_id, r.why) for r in refused] == [("b", Why.ERROR)]
        assert "WRONGTYPE" in refused[0].last_id

    def test_publish_takes_a_thousand_events_at_once(self, queue: Queue) -> None:
        scripts = queue.scripts()
        start(scripts, queue.deliver(scripts))
        assert scripts.publish(batch(queue, *(("a", 1, n, "x") for n in range(1, 1001)))) == []
        assert queue.redis.xlen(queue.keys.out("a")) == 1001


class TestFinalise:
    def test_finalise_writes_the_whole_ending(self, queue: Queue) -> None:
        scripts = queue.scripts(result_ttl_s=1000, stream_ttl_s=100)
        scripts.enqueue(JobEntry("a", BODY, group="g", tenant="t"))
        (delivery,) = scripts.read(1) or ()
        ref, identity = Ref(delivery.lane, delivery.entry, "a"), Identity("a", group="g", tenant="t")
        start(scripts, ref, identity)
        scripts.publish(batch(queue, ("a", 1, 1, "he")))
        queue.redis.set(queue.keys.cancel("a"), "late")
        result = done("hello")
        ending = scripts.finalise(
            ref,
            identity,
            result,
            fence=1,
            published=1,
            events=[TokenWrite(2, 0, "llo", 2, "[1,2]")],
            callback="https://x/",
        )
        assert ending is Ending.OK
        assert queue.redis.get(queue.keys.result("a")) == result.to_json()
        events = queue.events()
        assert "".join(e.text for e in events if isinstance(e, TokenEvent)) == "hello"
        assert isinstance(events[-1], FinalEvent)
        assert events[-1].result == result
        assert (queue.depth(), pending(queue)) == (0, 0)
        assert not queue.redis.exists(queue.keys.cancel("a"))
        assert queue.redis.get(queue.keys.quota("t")) == b"0"
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "succeeded": "1"}
        assert [f for _, f in queue.redis.xrange(queue.keys.group_out("g"))] == [{b"id": b"a", b"status": b"succeeded"}]
        assert [f for _, f in queue.redis.xrange(queue.keys.callbacks)] == [{b"id": b"a", b"url": b"https://x/"}]
        assert queue.hash(queue.keys.job("a"))["state"] == "succeeded"
        for key in (queue.keys.result("a"), queue.keys.job("a"), queue.keys.group("g"), queue.keys.group_out("g")):
            assert 990 < queue.redis.ttl(key) <= 1000
        assert 90 < queue.redis.ttl(queue.keys.out("a")) <= 100

    def test_a_repeated_end_whose_reply_was_lost_is_a_duplicate_that_changes_nothing(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts, group="g")
        identity = Identity("a", group="g")
        start(scripts, ref, identity)
        assert scripts.finalise(ref, identity, done(), fence=1, published=0) is Ending.OK
        before = queue.redis.xrange(queue.keys.out("a"))
        assert scripts.finalise(ref, identity, done(), fence=1, published=0) is Ending.DUP
        assert scripts.answer(ref, identity, bare()) is Ending.DUP
        assert queue.redis.xrange(queue.keys.out("a")) == before
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "succeeded": "1"}

    def test_a_worker_that_lost_a_job_cannot_end_the_job(self, queue: Queue) -> None:
        one, two = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(one)
        start(one, ref)
        take_over(queue, ref, "w2")
        assert one.finalise(ref, IDENTITY, done(), fence=1, published=0) is Ending.LOST
        assert start(two, ref).fence == 2
        take_over(queue, ref, "w1")
        assert one.finalise(ref, IDENTITY, done(), fence=1, published=0) is Ending.LOST, (
            "an old fence, though it holds it"
        )
        take_over(queue, ref, "w2")
        assert two.finalise(ref, IDENTITY, done(), fence=2, published=0) is Ending.OK
        assert one.finalise(ref, IDENTITY, done(), fence=1, published=0) is Ending.DUP

    def test_finalise_detects_lost_events_before_it_writes(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        start(scripts, ref)
        scripts.publish(batch(queue, ("a", 1, 1, "x")))
        assert scripts.finalise(ref, IDENTITY, done("xy"), fence=1, published=2) is Ending.GONE
        queue.redis.delete(queue.keys.out("a"))
        assert scripts.finalise(ref, IDENTITY, done("xy"), fence=1, published=1) is Ending.GONE
        assert not queue.redis.exists(queue.keys.result("a"))
        again = start(scripts, ref).fence
        events = [TokenWrite(1, 0, "xy", 2)]
        assert scripts.finalise(ref, IDENTITY, done("xy"), fence=again, published=0, events=events) is Ending.OK

    def test_finalise_does_not_repeat_events_that_are_in_the_stream(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        start(scripts, ref)
        scripts.publish(batch(queue, ("a", 1, 1, "x"), ("a", 1, 2, "y")))
        events = [TokenWrite(n, 0, text, 1) for n, text in ((2, "y"), (3, "z"))]
        assert scripts.finalise(ref, IDENTITY, done("xyz"), fence=1, published=1, events=events) is Ending.OK
        assert [e.id for e in queue.events()[:-1]] == ["1-0", "1-1", "1-2", "1-3"]

    def test_the_final_event_of_a_job_without_streaming_has_no_result(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts, stream="0")
        identity = Identity("a", stream=False)
        start(scripts, ref, identity)
        assert scripts.finalise(ref, identity, done("long"), fence=1, published=0) is Ending.OK
        raw = [fields for _, fields in queue.redis.xrange(queue.keys.out("a"))]
        assert raw[-1] == {b"type": b"final", b"status": b"succeeded"}
        assert len(raw) == 2

    def test_the_quota_of_a_tenant_without_jobs_expires(self, queue: Queue) -> None:
        scripts, quota = queue.scripts(), queue.keys.quota("t")
        for job_id in ("a", "b"):
            scripts.enqueue(JobEntry(job_id, BODY, tenant="t"))
        lives = []
        for job_id in ("a", "b"):
            scripts.cancel(job_id)
            lives.append(queue.redis.ttl(quota))
        assert lives[0] == -1
        assert lives[1] > 0
        scripts.enqueue(JobEntry("c", BODY, tenant="t"))
        assert (queue.redis.get(quota), queue.redis.ttl(quota)) == (b"1", -1)

    def test_quota_falls_only_for_jobs_that_were_counted_and_never_below_zero(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("counted", BODY, tenant="t"))
        (delivery,) = scripts.read(1) or ()
        identity = Identity("bare", tenant="t")
        ref = queue.deliver(scripts, "bare", tenant="t")
        start(scripts, ref, identity)
        scripts.finalise(ref, identity, done(job_id="bare"), fence=1, published=0)
        assert queue.redis.get(queue.keys.quota("t")) == b"1"
        queue.redis.set(queue.keys.quota("t"), 0)
        identity = Identity("counted", tenant="t")
        scripts.answer(Ref(delivery.lane, delivery.entry, "counted"), identity, bare(job_id="counted"))
        assert queue.redis.get(queue.keys.quota("t")) == b"0"

    def test_groups_count_every_status_and_entries_added_without_enqueue(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.hset(queue.keys.group("g"), "expected", 4)
        for status in Status:
            identity = Identity(status.value, group="g")
            ref = queue.deliver(scripts, status.value, group="g")
            assert scripts.answer(ref, identity, bare(status, status.value)) is Ending.OK
        counts = {status.value: "1" for status in Status}
        assert queue.hash(queue.keys.group("g")) == {"expected": "4", "total": "4", **counts}

    def test_finalise_works_while_redis_is_out_of_memory(self, own_redis: RedisServer) -> None:
        with own_redis.client() as client:
            queue = Queue(own_redis.url, client, Keys())
            scripts = queue.scripts()
            ref = queue.deliver(scripts)
            start(scripts, ref)
            client.config_set("maxmemory", 1)
            with pytest.raises(OutOfMemoryError):
                scripts.publish(batch(queue, ("a", 1, 1, "x")))
            with pytest.raises(OutOfMemoryError):
                scripts.enqueue(JobEntry("b", BODY))
            assert scripts.renew([ref]) == []
            events = [TokenWrite(1, 0, "hello", 1)]
            assert scripts.finalise(ref, IDENTITY, done("hello"), fence=1, published=0, events=events) is Ending.OK
            assert queue.depth() == 0

    def test_scripts_are_loaded_again_after_a_script_flush(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        start(scripts, ref)
        queue.redis.script_flush()
        assert scripts.finalise(ref, IDENTITY, done(), fence=1, published=0) is Ending.OK

    def test_a_crash_of_redis_keeps_owners_fences_and_published_events(self, own_redis: RedisServer) -> None:
        with own_redis.client() as client:
            queue = Queue(own_redis.url, client, Keys())
            client.config_set("appendfsync", "always")
            scripts = queue.scripts()
            ref = queue.deliver(scripts)
            start(scripts, ref)
            scripts.publish(batch(queue, ("a", 1, 1, "x")))
            client.xtrim(queue.keys.out("a"), maxlen=0)
            own_redis.kill()
            own_redis.start()
            assert scripts.renew([ref]) == []
            assert [r.why for r in scripts.publish(batch(queue, ("a", 1, 1, "x")))] == [Why.REPEAT]
            assert start(scripts, ref).fence == 2
            assert scripts.finalise(ref, IDENTITY, done(), fence=2, published=0) is Ending.OK


def test_bytes_and_texts_of_any_size_pass_through_the_scripts_unchanged(queue: Queue) -> None:
    """Bodies need not be UTF-8; texts may hold what JSON escapes, and numbers are kept to the last digit."""
    scripts = queue.scripts()
    size = 4 << 20 if queue.real else 1 << 16
    body, text = (b'\x00\xff\xfe\r\n"\\' * size)[:size], '\x00\x1f"\\/\u2028\u00e9\U0001f600' * 1000
    for priority, delay in (("low", None), ("high", 0.001)):
        entry = JobEntry(f"job-{priority}", body, ttl_ms=10**12 + 1, group="g", callback="https://x/?a=%00'\"")
        scripts.enqueue(entry, priority, delay)
        queue.redis.zadd(queue.keys.delayed, {entry.id: 1}, xx=True)
        scripts.promote()
        (delivery,) = scripts.read(2) or ()
        assert delivery.fields == {
            k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in entry.fields().items()
        }
        ref = Ref(delivery.lane, delivery.entry, entry.id)
        queue.redis.hset(queue.keys.job(entry.id), "fence", 2**51)
        fence = start(scripts, ref, entry.identity, ttl_ms=entry.ttl_ms or 0).fence
        assert fence == 2**51 + 1
        result, logprobs = done(text, job_id=entry.id), '[{"token":"\\u0000","logprob":-1.2345678901234567e-7}]'
        events = [TokenWrite(n, 0, part, 1, "[]", logprobs) for n, part in enumerate((text, ""), start=1)]
        dead = DeadLetter(ErrorCode.GAVE_UP, "'\"\ud800", 3, body)
        assert scripts.finalise(ref, entry.identity, result, fence=fence, events=events, dead=dead) is Ending.OK
        stored = [fields for _, fields in queue.redis.xrange(queue.keys.out(entry.id))]
        assert [fields[b"text"].decode() for fields in stored[1:3]] == [text, ""]
        assert [fields[b"logprobs"].decode() for fields in stored[1:3]] == [logprobs] * 2
        assert queue.redis.get(queue.keys.result(entry.id)) == result.to_json()
        assert queue.redis.xrange(queue.keys.dead)[-1][1][b"body"] == body[: 64 << 10]


class TestForeignValues:
    """An ending is complete although keys that other programs may write hold unexpected values."""

    def spoil(self, queue: Queue, kind: str) -> None:
        keys, redis = queue.keys, queue.redis
        if kind == "words":
            redis.hset(keys.group("g"), mapping={"total": "x", "succeeded": "y"})
            redis.set(keys.quota("t"), "many")
        else:
            for key in (keys.group("g"), keys.group_out("g"), keys.quota("t"), keys.callbacks):
                redis.sadd(key, "a set")

    @pytest.mark.parametrize("kind", ["words", "types"])
    @pytest.mark.parametrize("bare", [True, False])
    def test_an_ending_is_complete_whatever_the_job_hash_and_counters_hold(
        self, queue: Queue, kind: str, bare: bool
    ) -> None:
        self.spoil(queue, kind)
        scripts = queue.scripts()
        identity = Identity("a", group="g", tenant="t")
        if bare:
            ref = queue.deliver(scripts, group="g", tenant="t")
        else:
            scripts.enqueue(JobEntry("a", BODY, group="g", tenant="t"))
            (delivery,) = scripts.read(1) or ()
            ref = Ref(delivery.lane, delivery.entry, "a")
        fence = start(scripts, ref, identity).fence
        result = done(job_id="a")
        ending = scripts.finalise(ref, identity, result, fence=fence, published=0, events=[], callback="https://h/x")
        assert ending is Ending.OK
        assert queue.depth() == 0
        assert pending(queue) == 0
        assert isinstance(queue.events()[-1], FinalEvent)
        assert queue.redis.ttl(queue.keys.job("a")) > 0

    @pytest.mark.parametrize("spoilt", ["job", "out", "last id"])
    @pytest.mark.parametrize("starts", [True, False])
    def test_foreign_values_under_a_jobs_keys_stop_no_start_and_no_ending(
        self, queue: Queue, spoilt: str, starts: bool
    ) -> None:
        scripts = queue.scripts()
        if spoilt == "last id":
            queue.redis.xadd(queue.keys.out("a"), {"x": "y"}, id=f"{2**64 - 1}-1")
        else:
            queue.redis.set(queue.keys.job("a") if spoilt == "job" else queue.keys.out("a"), "x")
        if starts:
            finish_one(queue, scripts)
        else:
            assert scripts.answer(queue.deliver(scripts), IDENTITY, bare()) is Ending.OK
        assert [type(e) for e in queue.events()][:: len(queue.events()) - 1] == [StartEvent, FinalEvent]
        assert queue.depth() == 0

    def test_a_cancel_key_that_is_not_a_string_cancels_nothing(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.lpush(queue.keys.cancel("a"), "x")
        assert start(scripts, queue.deliver(scripts)).status is StartStatus.OK


class TestAnswer:
    def test_an_end_without_text_opens_a_new_fence_and_has_no_choices(self, queue: Queue) -> None:
        one, two = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(one)
        start(one, ref)
        one.publish(batch(queue, ("a", 1, 1, "void")))
        take_over(queue, ref, "w2")
        dead = DeadLetter(ErrorCode.GAVE_UP, "three deaths", 3, b"b" * 70_000)
        assert two.answer(ref, IDENTITY, bare(), prompt_tokens=9, dead=dead) is Ending.OK
        assert [e.id for e in queue.events()[:3]] == ["1-0", "1-1", "2-0"]
        assert queue.events()[2] == StartEvent("2-0", 2, "w2", 1, 9)
        ((_, letter),) = queue.redis.xrange(queue.keys.dead)
        assert len(letter.pop(b"body")) == 65_536
        assert letter == {
            b"id": b"a", b"lane": b"normal", b"entry": ref.entry.encode(), b"code": b"gave_up",
            b"reason": b"three deaths", b"attempts": b"3", b"truncated": b"1",
        }  # fmt: skip
        with pytest.raises(ValueError, match="no choices"):
            two.answer(ref, IDENTITY, done())

    def test_a_malformed_second_entry_does_not_end_the_live_job(self, queue: Queue) -> None:
        scripts = queue.scripts()
        good = queue.deliver(scripts)
        start(scripts, good)
        twin = queue.deliver(scripts, body=b"{")
        assert scripts.answer(twin, IDENTITY, bare()) is Ending.DUP
        assert queue.depth() == 1
        assert scripts.finalise(good, IDENTITY, done(), fence=1, published=0) is Ending.OK

    def test_an_entry_without_an_id_is_a_dead_letter(self, queue: Queue) -> None:
        scripts, other = queue.scripts(), queue.scripts("w2")
        ref = queue.deliver(scripts, "no:id")
        assert not other.reject(ref, b"")
        assert scripts.reject(ref, BODY, job_id=b"no:id")
        ((_, letter),) = queue.redis.xrange(queue.keys.dead)
        assert (letter[b"code"], letter[b"id"], letter[b"body"], letter[b"truncated"]) == (
            b"no_id", b"no:id", BODY, b"0",
        )  # fmt: skip
        assert (queue.depth(), pending(queue)) == (0, 0)


class TestLease:
    def test_renew_returns_the_lost_entries_of_all_lanes_and_chunks(self, queue: Queue) -> None:
        scripts = queue.scripts()
        pipe = queue.redis.pipeline()
        for n in range(300):
            pipe.xadd(queue.keys.lane("low" if n % 3 else "high"), {"id": str(n), "body": BODY})
        pipe.execute()
        refs = [Ref(d.lane, d.entry, d.fields[b"id"].decode()) for d in scripts.read(300) or ()]
        gone = [refs[0], refs[150], refs[299]]
        take_over(queue, gone[0], "w2")
        queue.redis.xdel(queue.keys.lane(gone[1].lane), gone[1].entry)
        queue.redis.xack(queue.keys.lane(gone[2].lane), GROUP, gone[2].entry)
        assert set(scripts.renew(refs)) == set(gone)

    def test_renewal_resets_the_idle_time_counts_no_delivery_and_keeps_the_stream(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        start(scripts, ref)
        queue.redis.expire(queue.keys.out("a"), 50)
        queue.redis.xclaim(queue.keys.lane("normal"), GROUP, "w1", 0, [ref.entry], idle=60_000, justid=True)
        assert scripts.renew([ref]) == []
        (entry,) = queue.redis.xpending_range(queue.keys.lane("normal"), GROUP, "-", "+", 1)
        assert entry["time_since_delivered"] < 30_000
        assert entry["times_delivered"] == 1
        assert queue.redis.ttl(queue.keys.out("a")) > 80_000

    def test_renewing_a_second_entry_does_not_extend_the_stream_of_an_ended_job(self, queue: Queue) -> None:
        scripts = queue.scripts()
        finish_one(queue, scripts)
        life = queue.redis.ttl(queue.keys.out("a"))
        assert scripts.renew([queue.deliver(scripts)]) == []
        assert 0 < queue.redis.ttl(queue.keys.out("a")) <= life

    def test_a_yielded_entry_can_be_claimed_at_once_and_is_lost_to_its_former_owner(self, queue: Queue) -> None:
        one, two = queue.scripts("w1"), queue.scripts("w2")
        ref = queue.deliver(one)
        assert one.yield_(ref, idle_ms=30_000)
        claimed = queue.redis.xautoclaim(queue.keys.lane("normal"), GROUP, "w2", 30_000)
        assert [entry for entry, _ in claimed[1]] == [ref.entry.encode()]
        assert not one.yield_(ref, idle_ms=30_000)
        assert start(two, ref).status is StartStatus.OK

    def test_a_consumer_with_pending_entries_is_kept(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        assert not scripts.remove_consumer("w1")
        assert pending(queue) == 1
        scripts.answer(ref, IDENTITY, bare())
        assert scripts.remove_consumer("w1")
        assert scripts.remove_consumer("never seen")
        assert queue.redis.xinfo_consumers(queue.keys.lane("normal"), GROUP) == []


class TestCancel:
    def test_cancel_ends_a_queued_job_at_once(self, queue: Queue) -> None:
        scripts = queue.scripts()
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        scripts.enqueue(JobEntry("a", BODY, group="g", tenant="t", callback="https://x/", traceparent=trace))
        assert scripts.cancel("a", "bored") is CancelReply.DONE
        first, last = queue.events()
        assert isinstance(first, StartEvent)
        assert isinstance(last, FinalEvent)
        assert last.result is not None
        assert (last.result.status, last.result.choices, last.result.cancel_reason) == (Status.CANCELLED, (), "bored")
        assert (last.result.attempt, last.result.traceparent) == (0, trace)
        assert queue.depth() == 0
        assert queue.redis.get(queue.keys.quota("t")) == b"0"
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "cancelled": "1"}
        assert queue.redis.xlen(queue.keys.callbacks) == 1
        assert scripts.read(5) == []

    def test_a_worker_loses_its_waiting_job_when_the_job_is_cancelled(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("a", BODY))
        (delivery,) = scripts.read(1) or ()
        assert scripts.cancel("a") is CancelReply.DONE
        ref = Ref(delivery.lane, delivery.entry, "a")
        assert scripts.renew([ref]) == [ref]
        assert start(scripts, ref).status is StartStatus.LOST
        assert pending(queue) == 0

    def test_cancel_of_a_running_job_sets_its_cancel_key(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("a", BODY))
        (delivery,) = scripts.read(1) or ()
        start(scripts, Ref(delivery.lane, delivery.entry, "a"))
        assert scripts.cancel("a", "enough", ttl_s=50) is CancelReply.ASKED
        assert queue.redis.get(queue.keys.cancel("a")) == b"enough"
        assert 40 < queue.redis.ttl(queue.keys.cancel("a")) <= 50

    def test_cancel_keeps_the_key_of_an_unknown_job_and_changes_no_finished_job(self, queue: Queue) -> None:
        scripts = queue.scripts()
        assert scripts.cancel("never") is CancelReply.ASKED
        finish_one(queue, scripts)
        before = queue.redis.get(queue.keys.result("a"))
        assert scripts.cancel("a") is CancelReply.LATE
        assert queue.redis.get(queue.keys.result("a")) == before
        assert not queue.redis.exists(queue.keys.cancel("a"))

    def test_a_yielded_job_ends_at_once_and_its_text_is_void(self, queue: Queue) -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts)
        start(scripts, ref)
        scripts.publish(batch(queue, ("a", 1, 1, "x")))
        scripts.yield_(ref, idle_ms=0)
        assert scripts.cancel("a") is CancelReply.DONE
        assert [e.id for e in queue.events()[:3]] == ["1-0", "1-1", "2-0"]


class TestDelayed:
    def later(self, queue: Queue, job_id: str = "a", due: int = 0, **fields: str) -> None:
        stored = {"id": job_id, "body": BODY, **fields}
        queue.redis.hset(queue.keys.delayed_job(job_id), mapping=stored)  # type: ignore[arg-type]
        queue.redis.zadd(queue.keys.delayed, {job_id: due})

    def test_a_due_job_joins_its_lane_and_gets_its_job_hash(self, queue: Queue) -> None:
        scripts = queue.scripts()
        self.later(queue, lane="high", group="g", tenant="t", ttl_ms="5000")
        self.later(queue, "b", due=queue.redis.time()[0] * 1000 + 60_000)
        assert scripts.promote() == 1
        (delivery,) = scripts.read(5) or ()
        assert (delivery.lane, set(delivery.fields)) == ("high", {b"id", b"body", b"group", b"tenant", b"ttl_ms"})
        assert queue.hash(queue.keys.job("a"))["state"] == "queued"
        assert queue.redis.get(queue.keys.quota("t")) == b"1"
        assert queue.redis.zrange(queue.keys.delayed, 0, -1) == [b"b"]
        assert not queue.redis.exists(queue.keys.delayed_job("a"))

    def test_cancel_ends_a_delayed_job_at_once(self, queue: Queue) -> None:
        scripts = queue.scripts()
        self.later(queue, due=2**42, group="g", stream="0")
        assert scripts.cancel("a") is CancelReply.DONE
        assert isinstance(queue.events()[-1], FinalEvent)
        assert queue.hash(queue.keys.group("g")) == {"total": "1", "cancelled": "1"}
        assert not queue.redis.exists(queue.keys.delayed, queue.keys.delayed_job("a"))

    def test_a_due_job_whose_id_is_taken_is_dropped_by_the_duplicate_rule(self, queue: Queue) -> None:
        scripts = queue.scripts()
        scripts.enqueue(JobEntry("a", BODY))
        self.later(queue)
        assert scripts.promote() == 0
        assert queue.depth() == 1
        assert not queue.redis.exists(queue.keys.delayed)

    def test_a_delayed_id_is_refused_by_enqueue(self, queue: Queue) -> None:
        self.later(queue, due=2**42)
        with pytest.raises(JobExists, match="delayed"):
            queue.scripts().enqueue(JobEntry("a", BODY))

    def test_a_delayed_job_that_cannot_be_moved_becomes_a_dead_letter_and_blocks_no_other(self, queue: Queue) -> None:
        scripts = queue.scripts()
        queue.redis.zadd(queue.keys.delayed, {"empty": 1, "no:id": 2, b"\xff": 3, "text": 4})
        queue.redis.set(queue.keys.delayed_job("text"), "no hash")
        self.later(queue, "good", due=5)
        assert scripts.promote() == 1
        assert not queue.redis.exists(queue.keys.delayed)
        letters = [fields[b"id"] for _, fields in queue.redis.xrange(queue.keys.dead)]
        assert sorted(letters) == [b"empty", b"no:id", b"text", b"\xff"]

    def test_a_malformed_delayed_job_joins_its_lane_so_that_a_worker_answers_it(self, queue: Queue) -> None:
        scripts = queue.scripts()
        self.later(queue, "lane", due=1, lane="nowhere")
        self.later(queue, "many", due=2, **{f"x{i}": "" for i in range(300)})
        self.later(queue, "odd", due=3, group="a b", tenant="t/u")
        queue.redis.hset(queue.keys.delayed_job("own"), mapping={"id": "another", "body": BODY})  # type: ignore[arg-type]
        queue.redis.zadd(queue.keys.delayed, {"own": 4})
        assert scripts.promote() == 4
        refused = {}
        for delivery in scripts.read(5) or ():
            try:
                parse_entry(delivery.fields)
            except JobError as error:
                refused[delivery.fields[b"id"]] = error.code
        assert refused == dict.fromkeys((b"lane", b"many", b"odd"), ErrorCode.INVALID_REQUEST)
        assert not queue.redis.exists(queue.keys.group("a b"), queue.keys.root + "quota:t/u")
        assert queue.hash(queue.keys.job("own"))["state"] == "queued"


def test_cancel_and_finalise_in_any_order_leave_one_final_event_and_no_token_after_it(queue: Queue) -> None:
    """Random interleavings of the steps of a worker, of a second worker that takes the job over, and of a client."""
    one, two = queue.scripts("w1"), queue.scripts("w2")
    for seed in range(1000 if queue.real else 150):
        interleave(queue, one, two, seed)


def interleave(queue: Queue, one: Steps, two: Steps, seed: int) -> None:
    rng, job_id = random.Random(seed), f"j{seed}"
    identity = Identity(job_id, tenant="t", group="g")
    one.enqueue(JobEntry(job_id, BODY, tenant="t", group="g"))
    (delivery,) = one.read(1) or ()
    ref = Ref(delivery.lane, delivery.entry, job_id)
    fences: dict[str, tuple[int, int]] = {}

    def run(scripts: Steps) -> None:
        started = start(scripts, ref, identity)
        if started.status is StartStatus.OK:
            fences[scripts.consumer] = (started.fence, 0)
        elif started.status is StartStatus.CANCELLED:
            scripts.answer(ref, identity, bare(Status.CANCELLED, job_id))

    def say(scripts: Steps) -> None:
        fence, n = fences.get(scripts.consumer, (0, 0))
        if fence and not scripts.publish(batch(queue, (job_id, fence, n + 1, "x"))):
            fences[scripts.consumer] = (fence, n + 1)

    def end(scripts: Steps) -> None:
        fence, n = fences.get(scripts.consumer, (0, 0))
        if fence:
            scripts.finalise(ref, identity, done("x" * n, job_id=job_id), fence=fence, published=n)

    def steal() -> None:
        queue.redis.xclaim(queue.keys.lane("normal"), GROUP, "w2", 0, [ref.entry])

    steps = [lambda s=s, f=f: f(s) for s in (one, two) for f in (run, say, say, end)]
    steps += [steal, lambda: one.cancel(job_id), lambda: one.yield_(ref, idle_ms=0)]
    rng.shuffle(steps)
    for step in steps:
        step()
    steal()  # worker w2 takes the job over and ends it
    run(two)
    end(two)
    events = queue.events(job_id)
    finals = [at for at, event in enumerate(events) if isinstance(event, FinalEvent)]
    assert finals == [len(events) - 1], f"seed {seed}"
    result = Result.from_json(queue.redis.get(queue.keys.result(job_id)) or b"")
    last = max(e.fence for e in events if isinstance(e, StartEvent))
    text = "".join(e.text for e in events if isinstance(e, TokenEvent) and e.fence == last)
    assert text == result.text, f"seed {seed}"
    starts = [e.fence for e in events if not isinstance(e, FinalEvent)]
    assert all(a <= b for a, b in itertools.pairwise(starts)), f"seed {seed}"
    assert queue.depth() == 0, f"seed {seed}"
    assert pending(queue) == 0, f"seed {seed}"
    assert queue.redis.get(queue.keys.quota("t")) == b"0", f"seed {seed}"
    assert int(queue.hash(queue.keys.group("g"))["total"]) == seed + 1
