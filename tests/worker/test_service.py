"""A whole worker with a fake engine: what a producer sees of every ending."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import orjson
import pytest
import structlog

from tests.steps import Steps
from tests.support import eventually
from tests.worker.fakes import POISON, FakeEngine, text_of
from tests.worker.harness import Inside, Queue, inside
from tokenmill.client.sync import Client
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.scripts import CancelReply
from worker.ops.exits import Exit


def test_a_job_streams_its_text_and_ends_with_the_same_text(queue: Queue) -> None:
    with inside(queue) as worker:
        job = queue.add({"prompt": "Hello", "max_tokens": 5})
        result = queue.check_ending(job)
        assert result["status"] == "succeeded"
        assert result["choices"] == [
            {"index": 0, "text": text_of(b"Hello", 0, 5), "finish_reason": "length", "stop": None}
        ]
        assert result["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 0}
        assert (result["model"], result["attempt"], result["worker"]) == ("fake", 1, worker.worker.name)
        timings = result["timings"]
        assert 0 <= timings["queued_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
        assert (queue.depth(), queue.pending()) == (0, 0)
        worker.at_rest()


def test_several_choices_share_one_count_of_events(queue: Queue) -> None:
    with inside(queue):
        job = queue.add({"prompt": "abc", "max_tokens": 4, "n": 3, "return_token_ids": True})
        result = queue.check_ending(job)
        assert [c["text"] for c in result["choices"]] == [text_of(b"abc", i, 4) for i in range(3)]
        ids: dict[int, list[int]] = {}
        for _, fields in queue.events(job):
            if fields["type"] == "token":
                ids.setdefault(int(fields["index"]), []).extend(orjson.loads(fields["token_ids"]))
        assert [ids[c["index"]] for c in result["choices"]] == [c["token_ids"] for c in result["choices"]]


def test_without_streaming_there_is_only_a_start_event_and_a_final_event(queue: Queue) -> None:
    with inside(queue):
        job = queue.add({"prompt": "abc", "max_tokens": 4}, stream="0")
        assert queue.result(job)["choices"][0]["text"] == text_of(b"abc", 0, 4)
        events = [fields for _, fields in queue.events(job)]
        assert [fields["type"] for fields in events] == ["start", "final"]
        assert "result" not in events[-1]


def test_jobs_added_before_the_first_worker_ever_started_are_read(queue: Queue) -> None:
    jobs = [queue.add({"prompt": f"job {i}", "max_tokens": 2}) for i in range(30)]
    with inside(queue, max_waiting="4"):
        assert {queue.check_ending(job)["status"] for job in jobs} == {"succeeded"}


def test_high_goes_before_normal_before_low(queue: Queue) -> None:
    jobs = {lane: queue.add({"prompt": lane, "max_tokens": 2}, lane=lane) for lane in ("low", "normal", "high")}
    with inside(queue, FakeEngine(max_num_seqs=1)):
        first = {lane: queue.check_ending(job)["timings"]["first_token_ms"] for lane, job in jobs.items()}
        ended = {lane: int(queue.events(job)[-1][0].partition("-")[0]) for lane, job in jobs.items()}
    assert ended["high"] <= ended["normal"] <= ended["low"], first


def test_a_worker_reads_no_more_jobs_than_may_wait(queue: Queue) -> None:
    engine = FakeEngine(max_num_seqs=1, step_seconds=0.05)
    with inside(queue, engine, max_waiting="2", drain_seconds="0"):
        for i in range(12):
            queue.add({"prompt": f"job {i}", "max_tokens": 200}, lane=("high", "normal", "low")[i % 3])
        eventually(lambda: engine.computed)
        for _ in range(20):
            # One runs, two wait, and a blocking read over three lanes may have brought one from each.
            assert queue.pending() <= 1 + 2 + 2


FUZZ: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "not json": (b"{", {}, "invalid_json"),
    "empty": (b"", {}, "invalid_json"),
    "null": (b"null", {}, "invalid_request"),
    "list": (b"[]", {}, "invalid_request"),
    "invalid utf-8": (b'{"prompt":"\xff"}', {}, "invalid_json"),
    "lone surrogate": (b'{"prompt":"\\ud800"}', {}, "invalid_json"),
    "nan": (b'{"prompt":"x","top_p":NaN}', {}, "invalid_request"),
    "infinity": (b'{"prompt":"x","temperature":1e999}', {}, "invalid_request"),
    "huge integer": (b'{"prompt":"x","max_tokens":' + b"9" * 10_000 + b"}", {}, "invalid_request"),
    "deep nesting": (b'{"prompt":"x","metadata":' + b"[" * 5000 + b"]" * 5000 + b"}", {}, "invalid_json"),
    "deep object": (b'{"prompt":"x","tools":' + b'[{"a":' * 90 + b"1" + b"}]" * 90 + b"}", {}, "invalid_request"),
    "wrong type": (b'{"prompt":3}', {}, "invalid_request"),
    "bool for int": (b'{"prompt":"x","n":true}', {}, "invalid_request"),
    "unknown key": (b'{"prompt":"x","best_of":2}', {}, "invalid_request"),
    "two megabytes": (b'{"prompt":"' + b"x" * (2 << 20) + b'"}', {}, "too_large"),
    "too many choices": (b'{"prompt":"x","n":1000000}', {}, "invalid_request"),
    "unknown field": (b'{"prompt":"x"}', {"attempt": "1"}, "invalid_request"),
    "version": (b'{"prompt":"x"}', {"v": "2"}, "unsupported_version"),
    "ttl": (b'{"prompt":"x"}', {"ttl_ms": "-1"}, "invalid_request"),
    "stream": (b'{"prompt":"x"}', {"stream": "yes"}, "invalid_request"),
    "callback": (b'{"prompt":"x"}', {"callback": "https://example.com"}, "invalid_request"),
    "model": (b'{"prompt":"x","model":"gpt-5"}', {}, "model_mismatch"),
    "can never fit": (b'{"prompt":"' + b"x" * 400 + b'"}', {}, "prompt_too_long"),
    "ids out of range": (b'{"prompt":[999999]}', {}, "invalid_request"),
    "expired": (b'{"prompt":"x"}', {"ttl_ms": "1"}, "deadline_exceeded"),
}


def test_each_broken_body_gets_its_error_and_the_worker_goes_on(queue: Queue) -> None:
    jobs = {name: queue.add(body, **fields) for name, (body, fields, _) in FUZZ.items()}
    queue.client.xadd(queue.keys.lane("normal"), {"body": b'{"prompt":"nobody asks"}'})
    queue.client.xadd(queue.keys.lane("normal"), {"id": "a:b", "body": b"x" * 100_000})
    queue.client.xadd(queue.keys.lane("normal"), {"id": "fieldless"})
    good = queue.add({"prompt": "good", "max_tokens": 2})
    with inside(queue) as worker:
        assert queue.check_ending(good)["status"] == "succeeded"
        for name, (_, _, code) in FUZZ.items():
            result = queue.check_ending(jobs[name])
            assert (name, result["error"]["code"], result["error"]["retryable"]) == (name, code, False)
            assert result["status"] == ("expired" if code == "deadline_exceeded" else "failed")
            assert result["choices"] == []
        assert queue.check_ending("fieldless")["error"]["code"] == "invalid_request"
        eventually(lambda: queue.depth() == 0)
        dead: Any = queue.client.xrange(queue.keys.dead)
        assert [(f[b"id"], f[b"code"], f[b"truncated"]) for _, f in dead] == [
            (b"", b"no_id", b"0"),
            (b"a:b", b"no_id", b"1"),
        ]
        assert queue.pending() == 0
        worker.at_rest()


def test_parameters_that_were_reduced_are_reported_in_the_result(queue: Queue) -> None:
    with inside(queue):
        job = queue.add({"prompt": "abc", "max_tokens": 10_000}, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
        result = queue.check_ending(job)
        assert result["clamped"] == {"max_tokens": 253}
        assert result["traceparent"] == f"00-{'1' * 32}-{'2' * 16}-01"


def test_an_id_gets_one_result_however_often_it_is_sent(queue: Queue) -> None:
    jobs = [queue.add({"prompt": "same", "max_tokens": 3}, id="twice") for _ in range(3)]
    with inside(queue) as worker:
        result = queue.check_ending(jobs[0])
        eventually(lambda: queue.depth() == 0)
        queue.add({"prompt": "other", "max_tokens": 9}, id="twice")
        queue.add(b"{", id="twice")
        eventually(lambda: queue.depth() == 0)
        assert queue.check_ending("twice") == result
        assert len(set(worker.engine.computed)) == 1
        worker.at_rest()


def test_ttl_ms_ends_a_running_job_whose_text_is_kept(queue: Queue) -> None:
    with inside(queue, FakeEngine(step_seconds=0.02)):
        job = queue.add({"prompt": "x", "max_tokens": 200}, ttl_ms="600")
        result = queue.check_ending(job)
        assert (result["status"], result["error"]["code"]) == ("expired", "deadline_exceeded")
        assert result["choices"][0]["finish_reason"] == "expired"
        assert result["choices"][0]["text"]
        assert 500 <= result["timings"]["total_ms"] < 3000


def test_no_job_of_a_paused_queue_is_read(queue: Queue) -> None:
    with inside(queue) as worker:
        queue.client.hset(queue.keys.meta, "paused", "1")
        job = queue.add({"prompt": "x", "max_tokens": 1})
        worker.worker._stops.rest.wait(0.5)
        assert queue.client.get(queue.keys.result(job)) is None
        queue.client.hset(queue.keys.meta, "paused", "0")
        assert queue.check_ending(job)["status"] == "succeeded"


def test_clients_find_a_worker_that_has_read_nothing_even_after_redis_lost_everything(queue: Queue) -> None:
    def listed() -> list[str]:
        return [found.name for found in client.workers()]

    queue.client.hset(queue.keys.meta, "paused", "1")
    with Client(queue.url, queue.keys.queue) as client, inside(queue) as worker, inside(queue) as other:
        names = sorted([worker.worker.name, other.worker.name])
        eventually(lambda: listed() == names)
        for key in queue.client.keys(f"{queue.keys.root}*"):
            queue.client.delete(key)
        eventually(lambda: listed() == names)
    assert listed() == []


def test_a_worker_with_burst_ends_when_the_queue_is_empty(queue: Queue) -> None:
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 3}) for i in range(5)]
    worker = Inside(queue, burst="1").start()
    assert worker.join() is Exit.OK
    assert all(queue.check_ending(job)["status"] == "succeeded" for job in jobs)
    assert (queue.depth(), queue.pending()) == (0, 0)
    assert not queue.client.exists(queue.keys.worker(worker.worker.name))


def test_a_worker_with_another_lease_refuses_the_queue(queue: Queue) -> None:
    with inside(queue):
        other = Inside(queue, lease_seconds="7")
        other._thread.start()
        assert other.join() is Exit.REFUSED


def test_an_engine_that_raises_ends_the_worker_with_an_error_and_its_jobs_are_handed_back(queue: Queue) -> None:
    engine = FakeEngine()
    engine.check_idle = lambda: (_ for _ in ()).throw(RuntimeError("books differ"))  # type: ignore[assignment]
    worker = Inside(queue, engine).start()
    queue.add({"prompt": "x", "max_tokens": 1})
    assert worker.join() is Exit.ERROR


def test_a_retryable_error_is_retried_and_then_given_up(queue: Queue) -> None:
    with inside(queue, lease_seconds="0.6", max_attempts="2") as worker:
        job = queue.add({"prompt": [POISON], "max_tokens": 3})
        neighbour = queue.add({"prompt": "fine", "max_tokens": 3})
        result = queue.check_ending(job)
        assert (result["status"], result["attempt"]) == ("failed", 2)
        error = result["error"]
        assert (error["code"], error["cause"], error["retryable"]) == ("gave_up", "engine_error", False)
        assert queue.check_ending(neighbour)["attempt"] == 1
        dead: Any = queue.client.xrange(queue.keys.dead)
        assert [(f[b"id"], f[b"code"], f[b"attempts"]) for _, f in dead] == [(job.encode(), b"gave_up", b"2")]
        worker.at_rest()


def test_sigterm_hands_back_waiting_jobs_and_finishes_running_ones(queue: Queue) -> None:
    engine = FakeEngine(max_num_seqs=1, step_seconds=0.01)
    first = Inside(queue, engine, lease_seconds="1").start()
    runs = queue.add({"prompt": "runs", "max_tokens": 50})
    eventually(lambda: engine.computed)
    waits = [queue.add({"prompt": f"waits {i}", "max_tokens": 2}) for i in range(3)]
    eventually(lambda: first.worker.held.waiting == 3)
    assert first.stop() is Exit.OK
    assert queue.check_ending(runs)["status"] == "succeeded"
    assert not any(queue.client.exists(queue.keys.result(job)) for job in waits)
    with inside(queue, lease_seconds="1") as second:
        for job in waits:
            result = queue.check_ending(job)
            assert (result["attempt"], result["worker"]) == (1, second.worker.name)


def test_a_second_signal_hands_back_running_jobs(queue: Queue) -> None:
    engine = FakeEngine(step_seconds=0.05)
    first = Inside(queue, engine, lease_seconds="1", drain_seconds="60").start()
    job = queue.add({"prompt": "long", "max_tokens": 40})
    eventually(lambda: len(queue.events(job)) > 2)
    first.signal()
    first.signal()
    assert first.join(5) is Exit.OK
    assert not queue.client.exists(queue.keys.result(job))
    with inside(queue, lease_seconds="1"):
        result = queue.check_ending(job)
        assert (result["status"], result["attempt"]) == ("succeeded", 2)
        assert len({i.partition("-")[0] for i, f in queue.events(job) if f["type"] == "start"}) == 2


def test_sigterm_while_loading_claims_nothing(queue: Queue) -> None:
    job = queue.add({"prompt": "x"})
    worker = Inside(queue)
    gate = threading.Event()
    load = worker.worker._loader

    def slow(settings: Any) -> Any:
        gate.wait(10)
        return load(settings)

    worker.worker._loader = slow
    worker._thread.start()
    worker.signal()
    assert worker.join(8) is Exit.OK
    gate.set()
    assert queue.client.xlen(queue.keys.lane("normal")) == 1
    assert not queue.client.exists(queue.keys.out(job))


def test_a_cancel_ends_a_job_in_each_state_with_one_final_and_no_later_token(queue: Queue) -> None:
    engine = FakeEngine(max_num_seqs=1, step_seconds=0.01)
    with inside(queue, engine, max_waiting="1") as worker:
        body = {"prompt": "x", "max_tokens": 250}
        runs = queue.add(body)
        eventually(lambda: engine.computed)
        waits = queue.add(body)
        eventually(lambda: worker.worker.held.waiting == 1)
        unread = queue.add(body, lane="low")
        for job in (unread, waits, runs):
            queue.cancel(job, "enough")
        results = {job: queue.check_ending(job) for job in (runs, waits, unread)}
        assert {(r["status"], r["cancel_reason"]) for r in results.values()} == {("cancelled", "enough")}
        assert results[runs]["choices"][0]["text"]
        assert results[waits]["choices"] == results[unread]["choices"] == []
        finished = queue.add({"prompt": "x", "max_tokens": 1})
        before = queue.check_ending(finished)
        queue.cancel(finished)
        worker.worker._stops.rest.wait(0.2)
        assert queue.result(finished) == before
        worker.at_rest()


def test_a_cancel_ends_no_other_job(queue: Queue) -> None:
    with inside(queue, FakeEngine(step_seconds=0.01)):
        jobs = [queue.add({"prompt": f"{i}", "max_tokens": 40}) for i in range(3)]
        eventually(lambda: all(len(queue.events(job)) > 2 for job in jobs))
        queue.cancel(jobs[0])
        assert [queue.check_ending(job)["status"] for job in jobs] == ["cancelled", "succeeded", "succeeded"]


def test_a_cancel_is_seen_within_a_poll_and_a_step(queue: Queue) -> None:
    engine = FakeEngine(step_seconds=0.02)
    with inside(queue, engine, cancel_poll_ms="20"):
        job = queue.add({"prompt": "x", "max_tokens": 250})
        eventually(lambda: len(queue.events(job)) > 2)
        steps = engine.steps
        queue.cancel(job)
        eventually(lambda: not engine.has_work)
        # One poll lasts a step here, then comes the step that ends it; the rest is this machine's slack.
        assert engine.steps - steps <= 6


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_with_log_prompts(queue: Queue, asked: bool) -> None:
    with structlog.testing.capture_logs() as logs, inside(queue, log_prompts=asked):
        for body in ({"prompt": "sesame", "max_tokens": 1}, {"prompt": "sesame", "no_such_key": 1}, b'{"sesame'):
            queue.check_ending(queue.add(body))
    assert ("sesame" in str(logs)) is asked


@pytest.mark.parametrize("ending", ["broken", "cancelled before", "cancelled in its lane", "expired"])
def test_the_result_of_a_job_that_never_started_has_the_same_fields(queue: Queue, ending: str) -> None:
    job, marks = secrets.token_hex(8), {"group": "g", "tenant": "t"}
    if ending == "cancelled before":
        queue.cancel(job)
    if ending == "cancelled in its lane":
        scripts = Steps(queue.client, queue.keys)
        scripts.enqueue(JobEntry(job, b"{}", group="g", tenant="t"))
        assert scripts.cancel(job) is CancelReply.DONE
    else:
        ttl = {"ttl_ms": "1"} if ending == "expired" else {}
        body = b"{" if ending == "broken" else {"prompt": "x"}
        queue.add(body, id=job, **marks, **ttl)
    with inside(queue):
        result = queue.check_ending(job)
    known = {k.decode(): v.decode() for k, v in queue.client.hgetall(queue.keys.job(job)).items()}
    assert set(known) >= {"state", "lane", "entry", "worker", "fence", "attempt", "deaths", "group", "tenant"}
    assert (known["state"], known["attempt"], known["fence"]) == (result["status"], "0", "1")
    assert (known["group"], known["tenant"], known["worker"]) == ("g", "t", result["worker"] or "")
    assert queue.client.ttl(queue.keys.job(job)) > 0
