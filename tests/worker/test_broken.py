"""A worker that cannot compute fails no job: its canary fails, it hands its jobs back, and it ends."""

from __future__ import annotations

import pytest
import structlog

from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Inside, Queue, inside
from worker.ops.exits import Exit
from worker.shutdown import Shutdown


def test_beside_a_healthy_worker_a_broken_one_costs_no_job_a_start(queue: Queue) -> None:
    engine = FakeEngine(step_seconds=0.01)
    broken = Inside(queue, engine, lease_seconds="1").start()
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 6}) for i in range(120)]
    eventually(lambda: engine.computed)
    engine.broken = True
    with inside(queue, FakeEngine(step_seconds=0.001), lease_seconds="1"):
        assert broken.join() is Exit.BROKEN
        assert {queue.check_ending(job)["status"] for job in jobs} == {"succeeded"}
    for job in jobs:
        assert queue.client.hmget(queue.keys.job(job), "tries", "deaths") == [b"1", b"0"]
    assert not queue.client.exists(queue.keys.dead, queue.keys.worker(broken.worker.name))


def test_a_worker_that_is_broken_from_the_start_reads_nothing(queue: Queue) -> None:
    job = queue.add({"prompt": "x", "max_tokens": 2})
    engine = FakeEngine()
    engine.broken = True
    worker = Inside(queue, engine)
    worker._thread.start()
    assert worker.join() is Exit.BROKEN
    assert not queue.client.exists(queue.keys.job(job), queue.keys.worker(worker.worker.name))
    assert queue.pending() == 0
    assert queue.client.xinfo_consumers(queue.keys.lane("normal"), "workers") == []


def test_a_broken_worker_is_not_ready(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(step_seconds=0.01)
    worker = Inside(queue, engine, http_port="0").start()
    health = worker.worker.health
    assert health is not None
    eventually(lambda: health.answer("/readyz")[0] == 200)

    def await_ends(shutdown: Shutdown) -> None:
        eventually(
            lambda: (
                (health.answer("/readyz"), queue.client.hget(queue.keys.worker(worker.worker.name), "status"))
                == ((503, "text/plain", b"the canary died\n"), b"broken")
            )
        )

    monkeypatch.setattr(Shutdown, "_await_ends", await_ends)
    queue.add({"prompt": "x", "max_tokens": 200})
    eventually(lambda: engine.computed)
    engine.broken = True
    assert worker.join() is Exit.BROKEN


def test_a_tokenizer_that_fails_for_every_job_breaks_the_worker_and_ends_no_job(queue: Queue) -> None:
    worker = Inside(queue, lease_seconds="1").start()

    def panic(text: str) -> list[int]:
        raise BaseException("as pyo3 raises what Rust panics with")

    worker.model.tokenizer.encode = panic  # type: ignore[method-assign]
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 2}) for i in range(5)]
    assert worker.join() is Exit.BROKEN
    with inside(queue, lease_seconds="1"):
        assert {queue.check_ending(job)["attempt"] for job in jobs} == {1}


@pytest.mark.parametrize("call", ["get", "all"], ids=["publisher", "keeper or canceller"])
def test_when_a_thread_dies_that_computes_nothing_no_job_is_to_blame(queue: Queue, call: str) -> None:
    job = queue.add({"prompt": "x", "max_tokens": 200})
    for _ in range(4):
        with structlog.testing.capture_logs():
            worker = Inside(queue, FakeEngine(step_seconds=0.02), lease_seconds="1").start()
            eventually(lambda: queue.client.hget(queue.keys.job(job), "state") == b"running")

            def bug(*args: object) -> None:
                raise KeyError("a bug")

            setattr(worker.worker.held, call, bug)
            assert worker.join() is Exit.ERROR
    assert queue.client.hmget(queue.keys.job(job), "tries", "deaths") == [b"0", b"0"]


def test_an_engine_that_breaks_in_a_drain_shows_in_the_exit_status(queue: Queue) -> None:
    engine = FakeEngine(step_seconds=0.01)
    worker = Inside(queue, engine, lease_seconds="1", drain_seconds="60").start()
    job = queue.add({"prompt": "x", "max_tokens": 250})
    eventually(lambda: engine.computed)
    worker.signal()
    eventually(lambda: queue.client.hexists(queue.keys.job(job), "excused"))
    engine.broken = True
    assert worker.join() is Exit.BROKEN
    assert queue.client.hmget(queue.keys.job(job), "tries", "deaths", "excused") == [b"0", b"0", None]


def test_a_job_whose_engine_dies_in_a_drain_is_to_blame(queue: Queue) -> None:
    """No supervisor ended this process, so the drain excuses nothing."""
    engine = FakeEngine(step_seconds=0.01)
    worker = Inside(queue, engine, lease_seconds="1", drain_seconds="60").start()
    job = queue.add({"prompt": "x", "max_tokens": 250})
    eventually(lambda: engine.computed)
    worker.signal()
    eventually(lambda: queue.client.hexists(queue.keys.job(job), "excused"))
    engine._advance = lambda live: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert worker.join() is Exit.ERROR
    with inside(queue, lease_seconds="1"):
        queue.check_ending(job)
    assert queue.client.hmget(queue.keys.job(job), "tries", "deaths") == [b"2", b"1"]
