"""The synchronous client against a worker without an engine, on both servers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from producer import (
    CancelReply,
    Client,
    ErrorCode,
    FinalEvent,
    JobError,
    JobExists,
    QueueFull,
    Result,
    StartEvent,
    Status,
    TextRestarted,
    TokenEvent,
)
from tests.steps import Steps
from tests.support import RedisServer, eventually
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.client.core import entry_of
from tokenmill.protocol.job import Identity, JobEntry
from tokenmill.protocol.keys import GROUP
from tokenmill.protocol.replies import Ref, TokenBatch, TokenWrite
from tokenmill.protocol.result import Choice


def test_a_job_streams_its_text_and_ends_with_its_result(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one two three", max_tokens=5)
    events = list(job.stream(timeout=10))
    assert isinstance(events[0], StartEvent)
    assert [e.text for e in events if isinstance(e, TokenEvent)] == ["one ", "two ", "three "]
    assert isinstance(events[-1], FinalEvent)
    assert events[-1].result == job.result(timeout=1)
    assert "".join(job.text(timeout=1)) == "one two three " == job.result().text
    assert job.result().ok


def test_a_stream_resumes_after_any_event_without_gap_or_repeat(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one two three")
    whole = list(job.stream(timeout=10))
    for at, event in enumerate(whole[:-1]):
        assert list(job.stream(from_id=event.id, timeout=5)) == whole[at + 1 :]


@pytest.mark.parametrize("from_id", ["x", "", "1-2-3", "-1", "$", "1-", "²", str(1 << 64)])
def test_a_stream_refuses_a_position_that_is_not_the_id_of_an_event(client: Client, from_id: str) -> None:
    with pytest.raises(ValueError, match="from_id"):
        client.job("any").stream(from_id=from_id)


def test_events_come_while_the_job_runs(client: Client, worker: MiniWorker) -> None:
    pieces = client.submit("one HOLD two").text(timeout=10)
    assert next(pieces) == "one "
    worker.release()
    assert list(pieces) == ["HOLD ", "two "]


def test_a_running_job_is_cancelled_and_keeps_its_text(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one HOLD two")
    pieces = job.text(timeout=10)
    next(pieces)
    assert job.cancel("enough") is CancelReply.ASKED
    result = job.result(timeout=10)
    assert (result.status, result.text, result.cancel_reason) == (Status.CANCELLED, "one ", "enough")
    assert job.cancel() is CancelReply.LATE


def test_a_queued_job_is_cancelled_without_any_worker(client: Client) -> None:
    job = client.submit("one")
    assert job.cancel() is CancelReply.DONE
    assert job.result(timeout=1).status is Status.CANCELLED
    assert list(job.text(timeout=1)) == []


def test_a_cancel_may_come_before_its_job(client: Client, worker: MiniWorker) -> None:
    assert client.job("later").cancel("never mind") is CancelReply.ASKED
    assert client.submit("one", id="later").result(timeout=10).cancel_reason == "never mind"


def test_a_failed_job_has_a_result_with_its_error(client: Client, worker: MiniWorker) -> None:
    result = client.submit("one FAIL").result(timeout=10)
    assert (result.status, result.text) == (Status.FAILED, "one ")
    assert result.error is not None
    assert (result.error.code, result.error.retryable) == ("engine_error", True)


def test_without_streaming_text_and_result_still_come(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one two", stream=False)
    assert list(job.text(timeout=10)) == ["one two "]
    last = list(job.stream(timeout=1))[-1]
    assert isinstance(last, FinalEvent)
    assert last.result is not None
    assert last.result.text == "one two "


def test_after_its_stream_expired_a_job_is_read_from_its_result(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one two")
    result = job.result(timeout=10)
    client.redis.delete(client.keys.out(job.id))
    (event,) = job.stream(timeout=1)
    assert isinstance(event, FinalEvent)
    assert event.result == result
    assert list(job.text(timeout=1)) == ["one two "]


@pytest.mark.parametrize("call", ["stream", "result", "text"])
def test_a_wait_ends_with_its_time_out(client: Client, call: str) -> None:
    job, begin = client.job("unknown"), time.monotonic()
    with pytest.raises(TimeoutError, match="unknown"):
        list(job.stream(timeout=0.5)) if call == "stream" else (
            job.result(timeout=0.5) if call == "result" else list(job.text(timeout=0.5))
        )
    assert 0.4 < time.monotonic() - begin < 3


def test_a_job_that_a_worker_would_refuse_is_not_sent(client: Client) -> None:
    for arguments in (
        {},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"prompt": "x", "temperature": float("nan")},
        {"prompt": "x", "max_tokens": True},
        {"prompt": "x", "tempreature": 1},
        {"prompt": "x", "id": "a:b"},
        {"prompt": "x", "group": "{g}"},
        {"prompt": "x", "tenant": ""},
        {"prompt": "x", "ttl": 0},
        {"prompt": "x", "ttl": float("inf")},
        {"prompt": "x", "ttl": float("nan")},
        {"prompt": "x", "ttl": "5"},
        {"prompt": "x", "delay": float("inf")},
        {"prompt": "x", "delay": float("nan")},
        {"prompt": "x", "delay": 1e300},
        {"prompt": "x", "callback": "ftp://x"},
        {"prompt": "x", "callback": "https://[x"},
        {"prompt": "x", "callback": "https://user@hooks.example.org/"},
        {"prompt": "x" * 2_000_000},
        {"prompt": "\ud800"},
        {"prompt": object()},
    ):
        with pytest.raises((JobError, TypeError)) as refused:
            client.submit(**arguments)  # type: ignore[arg-type]
        if isinstance(refused.value, JobError):
            assert refused.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE, ErrorCode.NO_ID)
    with pytest.raises(JobError, match="unknown key 'keys'"):
        client.submit("x", keys=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="priority"):
        client.submit("x", priority="urgent")
    with pytest.raises(ValueError, match="id"):
        client.job("a:b")
    with pytest.raises(ValueError, match="timeout: must be a number"):
        client.submit("x", timeout=float("nan"))
    assert client.redis.keys(client.keys.root + "*") == []


def test_an_infinite_time_out_waits_for_the_result(client: Client, worker: MiniWorker) -> None:
    forever = float("inf")
    job = client.submit("one two", wait=True, timeout=forever)
    assert "".join(job.text(timeout=forever)) == "one two "
    assert job.result(timeout=forever).ok
    assert [result.ok for result in client.map(["a", "b"], timeout=forever)] == [True, True]


def test_an_entry_that_was_built_before_is_submitted_as_it_is(client: Client, worker: MiniWorker) -> None:
    entry = entry_of({"prompt": "one two", "max_tokens": 4}, id="built", tenant="t")
    job = client.submit_entry(entry, "high", timeout=5)
    assert (job.id, job.result(timeout=10).text) == ("built", "one two ")
    with pytest.raises(JobExists):
        client.submit_entry(entry)
    assert client.submit_entry(entry_of({"prompt": "x"}), delay=60).status() == "delayed"
    with pytest.raises(JobError, match="unknown key 'promt'"):
        entry_of({"promt": "x"})
    with pytest.raises(JobError, match="too_large"):
        entry_of({"prompt": "x" * 100}, max_bytes=100)


def test_an_id_is_used_once(client: Client) -> None:
    client.submit("x", id="mine")
    with pytest.raises(JobExists):
        client.submit("x", id="mine")
    with pytest.raises(JobExists):
        client.submit("x", id="mine", delay=5)


def test_submit_to_a_full_queue_raises_or_waits(client: Client, queue: Queue) -> None:
    client.redis.hset(client.keys.meta, "max_depth", 1)
    client.submit("one", id="first")
    with pytest.raises(QueueFull) as full:
        client.submit("two")
    assert full.value.depth == 1
    threading.Timer(0.1, client.job("first").cancel).start()
    client.submit("two", wait=True)


def test_a_delayed_job_comes_when_it_is_due(client: Client, worker: MiniWorker) -> None:
    job = client.submit("one", delay=0.3, priority="high", group="g")
    assert client.redis.exists(client.keys.delayed_job(job.id))
    assert job.result(timeout=10).text == "one "
    assert client.redis.hget(client.keys.job(job.id), "lane") == b"high"


def test_a_delayed_job_can_be_cancelled(client: Client) -> None:
    job = client.submit("one", delay=60)
    assert job.cancel() is CancelReply.DONE
    assert job.result(timeout=1).status is Status.CANCELLED


def test_map_gives_results_in_order_with_a_bounded_number_in_flight(client: Client, worker: MiniWorker) -> None:
    asked = 0

    def prompts() -> Iterator[str]:
        nonlocal asked
        for n in range(40):
            asked += 1
            yield f"word{n}"

    got = []
    for result in client.map(prompts(), window=4, max_tokens=3, timeout=20):
        got.append(result.text)
        assert asked - len(got) <= 4 * 4 + 1
    assert got == [f"word{n} " for n in range(40)]
    assert worker.most <= 4


def test_map_gives_results_as_completed_and_takes_every_kind_of_prompt(client: Client, worker: MiniWorker) -> None:
    prompts = ["one", [1, 2], {"prompt": "two", "priority": "low"}]
    results = client.map(prompts, ordered=False, timeout=20)
    assert sorted(r.text for r in results) == ["[1, 2] ", "one ", "two "]
    client.redis.hset(client.keys.meta, "paused", 1)
    with pytest.raises(TimeoutError):
        list(client.map([[{"role": "user", "content": "hi"}]], timeout=0.1))


def test_leaving_map_early_cancels_the_unfinished_jobs(client: Client, queue: Queue) -> None:
    worker = MiniWorker(queue)
    worker.start()
    results = client.map(itertools.chain(["one"], itertools.repeat("HOLD")), window=3, timeout=20)
    assert next(results).text == "one "
    results.close()
    eventually(lambda: queue.depth() == 0)
    worker.stop()


def test_map_times_out_when_nothing_finishes(client: Client) -> None:
    with pytest.raises(TimeoutError):
        list(client.map(["a", "b"], timeout=0.3))
    assert client.redis.xlen(client.keys.lane("normal")) == 0


def test_a_strict_map_of_a_malformed_prompt_raises_and_leaves_no_job_behind(client: Client, queue: Queue) -> None:
    with pytest.raises(JobError):
        list(client.map(["a", {"prompt": "b", "n": 0}], timeout=5, strict=True))
    assert queue.depth() == 0


def restart(queue: Queue, first: list[str], second: list[str]) -> Steps:
    """A job `a` whose first worker dies after `first`; the second one says `second` and ends it."""
    identity, one, two = Identity("a"), queue.scripts("w1"), queue.scripts("w2")
    ref = queue.deliver(one)
    say(queue, one, ref, first)
    queue.redis.xclaim(queue.keys.lane("normal"), GROUP, "w2", 0, [ref.entry])
    fence = say(queue, two, ref, second[:-1])
    result = Result("a", Status.SUCCEEDED, choices=(Choice(0, "".join(second), "stop"),))
    last = [TokenWrite(len(second), 0, second[-1], 1)]
    two.finalise(ref, identity, result, fence=fence, published=len(second) - 1, events=last)
    return two


def say(queue: Queue, scripts: Steps, ref: Ref, words: list[str]) -> int:
    fence = scripts.start(ref, Identity(ref.id), prompt_tokens=1).fence
    batch = TokenBatch(queue.keys)
    for n, word in enumerate(words, 1):
        batch.add(ref.id, fence, n, 0, word, 1)
    assert scripts.publish(batch) == []
    return fence


def test_after_a_restart_with_equal_text_no_piece_is_repeated(client: Client, queue: Queue) -> None:
    restart(queue, ["a", "b", "c"], ["ab", "cd", "e"])
    starts = [e for e in client.job("a").stream(timeout=5) if isinstance(e, StartEvent)]
    assert [e.fence for e in starts] == [1, 2]
    assert list(client.job("a").text(timeout=5)) == ["a", "b", "c", "d", "e"]


def test_after_a_restart_with_different_text_a_reader_gets_an_error(client: Client, queue: Queue) -> None:
    restart(queue, ["a", "b"], ["x", "y"])
    pieces = client.job("a").text(timeout=5)
    assert [next(pieces), next(pieces)] == ["a", "b"]
    with pytest.raises(TextRestarted):
        next(pieces)


def test_readers_outlive_a_restart_of_redis(own_redis: RedisServer) -> None:
    with own_redis.client() as server, Client(own_redis.url, block_ms=200) as client:
        queue = Queue(own_redis.url, server, client.keys)
        job = client.submit("one HOLD two")
        found: list[Result] = []
        reader = threading.Thread(target=lambda: found.append(job.result(timeout=30)))
        reader.start()
        eventually(lambda: server.info("clients")["blocked_clients"] == 1)
        server.config_set("appendfsync", "always")
        server.set("written", 1)
        own_redis.kill()
        own_redis.start()
        worker = MiniWorker(queue)
        worker.start()
        worker.release()
        reader.join(20)
        worker.stop()
        assert [r.text for r in found] == ["one HOLD two "]


def test_many_jobs_are_submitted_and_collected_in_a_few_round_trips(
    queue: Queue, client: Client, worker: MiniWorker
) -> None:
    entries = [JobEntry(f"j{n}", b'{"prompt":"say it"}', stream=False, group="g") for n in range(5)]
    assert client.submit_all(entries) == [None] * 5
    again = client.submit_all([*entries[:1], JobEntry("j5", b'{"prompt":"x"}', stream=False, group="g")])
    assert isinstance(again[0], JobExists)
    assert again[1] is None
    ended: list[tuple[str, str]] = []

    def all_ended() -> bool:
        ended.extend(client.finished("g", ended[-1][0] if ended else "0", 50))
        return len(ended) == 6

    eventually(all_ended)
    ids = [job_id for _, job_id in ended]
    assert sorted(ids) == [f"j{n}" for n in range(6)]
    assert client.finished("g", ended[-1][0]) == []
    assert [result.status for result in client.results([*ids]) if result] == ["succeeded"] * 6
    assert client.states([*ids, "unknown"]) == ["succeeded"] * 6 + [None]
    client.forget(ids, "g", [entry for entry, _ in ended])
    assert client.results(ids) == [None] * 6
    assert client.states(ids) == [None] * 6
    assert client.finished("g") == []
    assert not list(queue.redis.scan_iter(match=queue.keys.out("*")))


def test_submit_many_reports_the_jobs_that_the_queue_has_no_room_for(queue: Queue, client: Client) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 2)
    told = client.submit_all([JobEntry(f"j{n}", b"{}") for n in range(3)])
    assert told[:2] == [None, None]
    assert isinstance(told[2], QueueFull)
