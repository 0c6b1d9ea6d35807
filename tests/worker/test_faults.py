"""What a worker does while Redis is slow, away or empty, and that an idle worker logs nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis
import structlog

from engine.outputs import StepOutput
from tests.support import eventually
from tests.worker.fakes import FakeEngine, text_of
from tests.worker.harness import Inside, Queue, inside
from tokenmill.protocol import connection
from tokenmill.protocol.faults import no_group
from tokenmill.protocol.scripts import Scripts
from worker.demo.embedded import embedded_redis
from worker.ops.exits import Exit
from worker.ops.links import Contact, passing
from worker.ops.threads import Fatal, Mailbox, Stop, spawn
from worker.queue.outbox import BACKLOG
from worker.queue.sweeper import Sweeper


def test_an_idle_worker_logs_no_warning_for_longer_than_its_socket_timeout(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BLOCK_MARGIN_S", 0.4)
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.5)
    with structlog.testing.capture_logs() as logs, inside(queue, block_ms="100") as worker:
        worker.worker._stops.rest.wait(1.5)
        job = queue.add({"prompt": "x", "max_tokens": 1})
        assert queue.check_ending(job)["status"] == "succeeded"
    assert [entry for entry in logs if entry["log_level"] not in ("info", "debug")] == []


def test_the_socket_timeout_of_a_blocking_read_is_longer_than_the_read() -> None:
    client = connection.blocking_client("redis://localhost", block_ms=1000)
    assert client.connection_pool.connection_kwargs["socket_timeout"] > 1.0


def test_while_starts_do_not_reach_redis_running_jobs_go_on(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()
    start = Scripts.start_all

    def shaky(self: Scripts, *args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            raise redis.ConnectionError("away")
        return start(self, *args, **kwargs)

    monkeypatch.setattr(Scripts, "start_all", shaky)
    with inside(queue, FakeEngine(step_seconds=0.005)) as worker:
        runs = queue.add({"prompt": "runs", "max_tokens": 100})
        eventually(lambda: worker.engine.computed)
        broken.set()
        waits = [queue.add({"prompt": f"waits {i}", "max_tokens": 2}) for i in range(3)]
        cancelled = queue.add({"prompt": "cancelled", "max_tokens": 2})
        assert queue.check_ending(runs)["choices"][0]["text"] == text_of(b"runs", 0, 100)
        queue.cancel(cancelled)
        assert queue.check_ending(cancelled)["status"] == "cancelled"
        assert not any(queue.client.exists(queue.keys.result(job)) for job in waits)
        broken.clear()
        assert {queue.check_ending(job)["status"] for job in waits} == {"succeeded"}
        worker.at_rest()


class Patient(FakeEngine):
    """Delays the second step until the first token is on its way to Redis, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.001)
        self.spoke = False
        self.sent = threading.Event()

    def step(self) -> StepOutput:
        if self.spoke:
            self.sent.wait(20)
        output = super().step()
        self.spoke = self.spoke or bool(output.deltas)
        return output


def test_a_slow_publisher_merges_tokens_and_loses_none(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, engine = Scripts.publish, Patient()

    def slow(self: Scripts, batch: Any) -> Any:
        if len(batch):
            engine.sent.set()
            time.sleep(0.05)  # a round trip to a far Redis
        return publish(self, batch)

    monkeypatch.setattr(Scripts, "publish", slow)
    with inside(queue, engine):
        job = queue.add({"prompt": "x", "max_tokens": 150})
        assert queue.check_ending(job)["usage"]["completion_tokens"] == 150
        counts = [int(f["tokens"]) for _, f in queue.events(job) if f["type"] == "token"]
        assert counts[0] == 1, "the first goes out at once"
        assert len(counts) < 100


def test_deleted_lanes_get_their_consumer_group_again(queue: Queue) -> None:
    with inside(queue) as worker:
        queue.client.delete(*queue.keys.lanes)
        job = queue.add({"prompt": "x", "max_tokens": 2})
        assert queue.check_ending(job)["status"] == "succeeded"
        worker.at_rest()


def test_a_job_whose_entry_is_deleted_is_dropped(queue: Queue) -> None:
    with inside(queue, FakeEngine(step_seconds=0.02), lease_seconds="0.6") as worker:
        job = queue.add({"prompt": "x", "max_tokens": 240})
        eventually(lambda: worker.engine.computed)
        for entry, _ in queue.client.xrange(queue.keys.lane("normal")):
            queue.client.xdel(queue.keys.lane("normal"), entry)
        eventually(lambda: len(worker.worker.held) == 0)
        worker.at_rest()
        assert not queue.client.exists(queue.keys.result(job))


def test_an_entry_is_found_again_when_the_reply_of_its_read_was_lost(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    read = Scripts.read

    def forgetful(self: Scripts, count: int) -> Any:
        found = read(self, count)
        if found and not lost.is_set():
            lost.set()
            raise redis.TimeoutError("no reply")
        return found

    monkeypatch.setattr(Scripts, "read", forgetful)
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 1}) for i in range(3)]
    with inside(queue, lease_seconds="0.6"):
        assert {queue.check_ending(job)["status"] for job in jobs} == {"succeeded"}
        assert lost.is_set()


def test_no_job_is_taken_over_before_a_lease_of_uninterrupted_contact(queue: Queue) -> None:
    scripts = Scripts(queue.client, queue.keys, "sweeper")
    scripts.ensure_groups()
    queue.add({"prompt": "x"})
    Scripts(queue.client, queue.keys, "dead").read(1)
    contact = Contact()
    with inside(queue) as worker:
        sweeper = Sweeper(scripts, worker.worker.held, contact, 0.2, 0.01, worker.worker._quarantine)
        threading.Event().wait(0.3)
        assert sweeper.sweep(5) == []  # no contact yet
        contact.ok()
        assert sweeper.sweep(5) == []  # too short
        eventually(lambda: contact.lasted() > 0.2)
        contact.failed("read", redis.ConnectionError())
        contact.ok()
        assert sweeper.sweep(5) == []  # broken in between
        assert eventually(lambda: sweeper.sweep(5), 2)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (redis.ConnectionError("gone"), True),
        (redis.TimeoutError("late"), True),
        (redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), True),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), True),
        (redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'. script: abc"), True),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), True),
        (redis.ResponseError("WRONGTYPE Operation against a key"), False),
    ],
)
def test_workers_distinguish_retryable_errors_of_redis_from_lasting_errors(
    error: redis.RedisError, passes: bool
) -> None:
    assert passing(error) is passes
    assert not no_group(error)


def test_the_death_of_a_thread_reaches_the_main_thread() -> None:
    def bug() -> None:
        raise KeyError("oops")

    def fatal() -> None:
        raise Fatal(4, "no")  # type: ignore[arg-type]

    for target, status in ((bug, 1), (fatal, 4)):
        mailbox = Mailbox()
        spawn("x", target, mailbox).join()
        assert mailbox.get(1) == Stop(status)  # type: ignore[arg-type]


def test_the_embedded_redis_ends_with_its_block() -> None:
    with embedded_redis() as url:
        client = connection.command_client(url, retries=0)
        assert client.ping()
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_the_start_and_the_end_of_an_outage_are_logged_once() -> None:
    contact = Contact()
    with structlog.testing.capture_logs() as logs:
        contact.ok()
        for _ in range(5):
            contact.failed("read", redis.ConnectionError("gone"))
        contact.ok()
        contact.ok()
    told = [entry["event"] for entry in logs if entry["log_level"] != "debug"]
    assert told == ["redis_unreachable", "redis_back"]


def test_an_outage_that_comes_and_goes_is_logged_at_most_twice_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    contact = Contact()
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            contact.ok()
            contact.failed("publish", redis.ResponseError("OOM"))
        monkeypatch.setattr("worker.ops.links.REPEAT_SECONDS", 0.0)
        contact.ok()
        contact.failed("publish", redis.ResponseError("OOM"))
        contact.ok()
    told = [entry["event"] for entry in logs if entry["log_level"] != "debug"]
    assert told == ["redis_unreachable", "redis_back", "redis_unreachable", "redis_back"]
    assert contact.errors["publish"] == 21


def test_a_tokenizer_that_panics_fails_its_job_and_not_the_worker(queue: Queue) -> None:
    class Panic(BaseException):
        pass

    with inside(queue) as worker:
        encode = worker.model.tokenizer.encode

        def panic(text: str) -> list[int]:
            if text == "panic":
                raise Panic("stack overflow")
            return encode(text)

        worker.model.tokenizer.encode = panic  # type: ignore[method-assign]
        job = queue.add({"prompt": "panic", "max_tokens": 1})
        error = queue.check_ending(job)["error"]
        assert (error["code"], error["retryable"]) == ("engine_error", False)
        assert queue.check_ending(queue.add({"prompt": "x", "max_tokens": 1}))["status"] == "succeeded"


def test_decoding_goes_on_while_redis_is_silent_and_jobs_wait_for_their_start(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a publisher nor a START that waits in its socket delays the engine, and memory stays bounded."""
    publish, start_all = Scripts.publish, Scripts.start_all
    speaks = threading.Event()
    speaks.set()

    def slow_publish(self: Scripts, batch: Any) -> Any:
        speaks.wait(30)
        return publish(self, batch)

    def slow_start(self: Scripts, starts: Any) -> Any:
        speaks.wait(30)
        return start_all(self, starts)

    monkeypatch.setattr(Scripts, "publish", slow_publish)
    monkeypatch.setattr(Scripts, "start_all", slow_start)
    tokens = 5 * BACKLOG
    engine = FakeEngine(max_num_seqs=2, capacity=4 * tokens)
    with inside(queue, engine) as worker:
        engine.step_seconds = 0.01
        runs = queue.add({"prompt": "runs", "max_tokens": tokens})
        eventually(lambda: engine.computed)
        speaks.clear()
        engine.step_seconds = 0.0
        waits = queue.add({"prompt": "waits", "max_tokens": 3})
        eventually(lambda: len(engine.computed) == tokens, 30)
        assert worker.worker.outbox.qsize() <= BACKLOG
        assert not queue.client.exists(queue.keys.out(waits))
        speaks.set()
        assert queue.check_ending(runs)["choices"][0]["text"] == text_of(b"runs", 0, tokens)
        assert queue.check_ending(waits)["status"] == "succeeded"
        worker.at_rest()


def test_a_start_whose_reply_is_late_costs_no_token_and_a_cancel_meanwhile_ends_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_all, late = Scripts.start_all, threading.Event()

    def slow(self: Scripts, starts: Any) -> Any:
        replies = start_all(self, starts)
        late.wait(30)
        return replies

    monkeypatch.setattr(Scripts, "start_all", slow)
    with inside(queue) as worker:
        cancelled, kept = (queue.add({"prompt": name, "max_tokens": 3}) for name in ("cancelled", "kept"))
        eventually(lambda: queue.client.exists(queue.keys.out(cancelled)))
        queue.cancel(cancelled)
        assert queue.check_ending(cancelled)["status"] == "cancelled"
        assert worker.engine.computed == []
        late.set()
        assert queue.check_ending(kept)["choices"][0]["text"] == text_of(b"kept", 0, 3)
        worker.at_rest()


def test_a_drain_hands_back_a_job_whose_start_is_under_way(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    start_all, asked, late = Scripts.start_all, threading.Event(), threading.Event()

    def slow(self: Scripts, starts: Any) -> Any:
        asked.set()
        late.wait(30)
        return start_all(self, starts)

    monkeypatch.setattr(Scripts, "start_all", slow)
    worker = Inside(queue).start()
    job = queue.add({"prompt": "x", "max_tokens": 3})
    asked.wait(10)
    worker.signal()
    eventually(lambda: worker.worker._gate is not None and worker.worker._gate.closed)
    late.set()
    assert worker.join() is Exit.OK
    assert worker.engine.computed == []
    with inside(queue):
        queue.check_ending(job)
    assert queue.client.hmget(queue.keys.job(job), "tries", "deaths") == [b"1", b"0"]
