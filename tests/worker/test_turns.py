"""The order of jobs: a higher lane is read while jobs of a lower lane wait; within a lane the order survives outages.

The engine is the real one over a stub model.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

from engine.engine import Engine
from engine.outputs import StepOutput
from tests.engine.stub import make_engine
from tests.support import eventually
from tests.worker.harness import Inside, Queue, inside
from tokenmill.client.sync import Client
from tokenmill.protocol.job import Identity
from tokenmill.protocol.replies import Ref
from tokenmill.protocol.scripts import Scripts
from worker.cli import settings_from
from worker.jobs.job import Entry, Job, Phase
from worker.queue.intake import Intake

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}


def slow_engine(max_num_seqs: int, step_seconds: float) -> Engine:
    engine, _ = make_engine(max_num_seqs=max_num_seqs, num_blocks=256)
    step = engine.step

    def slowly() -> StepOutput:
        time.sleep(step_seconds)
        return step()

    engine.step = slowly  # type: ignore[method-assign]
    return engine


def add(queue: Queue, count: int, lane: str = "normal", max_tokens: int = 4, **fields: str) -> list[str]:
    return [
        queue.add({**BODY, "max_tokens": max_tokens}, lane, id=f"{lane}{number}", **fields) for number in range(count)
    ]


def ended(queue: Queue, group: str = "g") -> list[str]:
    entries: Any = queue.client.xrange(queue.keys.group_out(group))
    return [fields[b"id"].decode() for _, fields in entries]


def holds(worker: Inside, *ids: str) -> bool:
    return set(ids) <= {job.id for job in worker.worker.held.all()}


@pytest.mark.parametrize("room", ["1", "4"])
@pytest.mark.parametrize(("lower", "higher"), [("low", "high"), ("low", "normal"), ("normal", "high")])
def test_jobs_read_ahead_keep_no_job_of_a_higher_lane_unread(queue: Queue, room: str, lower: str, higher: str) -> None:
    with inside(queue, slow_engine(1, 0.1), max_waiting=room, drain_seconds="0") as worker:  # type: ignore[arg-type]
        add(queue, 12, lower, max_tokens=60, group="g")
        eventually(lambda: worker.worker.held.waiting == int(room) and len(worker.worker.held) > int(room))
        above = add(queue, 2, higher, group="g")
        eventually(lambda: len(ended(queue)) >= 2)
        assert sorted(ended(queue)) == above, "before the one that ran already"
        queue.client.delete(*queue.keys.lanes)


@pytest.mark.parametrize("delay_ms", [0, 300])
def test_jobs_read_ahead_keep_no_job_of_a_higher_lane_waiting_that_was_handed_back(queue: Queue, delay_ms: int) -> None:
    other = Scripts(queue.client, queue.keys, "other")
    above = _read_by(other, queue)
    with inside(queue, slow_engine(1, 0.1), max_waiting="4", drain_seconds="0") as worker:  # type: ignore[arg-type]
        add(queue, 12, "low", max_tokens=60, group="g")
        eventually(lambda: worker.worker.held.waiting == 4 and len(worker.worker.held) > 4)
        other.yield_(above, idle_ms=30_000 - delay_ms, due_in_ms=delay_ms)
        eventually(lambda: ended(queue) == [above.id])
        queue.client.delete(*queue.keys.lanes)


def test_jobs_read_ahead_keep_no_job_of_a_higher_lane_waiting_whose_worker_died(queue: Queue) -> None:
    options = {"max_waiting": "4", "drain_seconds": "0", "lease_seconds": "1", "sweep_seconds": "0.3"}
    above = _read_by(Scripts(queue.client, queue.keys, "other"), queue)
    with inside(queue, slow_engine(1, 0.1), **options) as worker:  # type: ignore[arg-type]
        add(queue, 12, "low", max_tokens=60, group="g")
        eventually(lambda: worker.worker.held.waiting == 4 and len(worker.worker.held) > 4)
        eventually(lambda: ended(queue) == [above.id], 4)
        queue.client.delete(*queue.keys.lanes)


def _read_by(other: Scripts, queue: Queue) -> Ref:
    """Put one job into the lane `high` and read it as another worker."""
    other.ensure_groups()
    (job_id,) = add(queue, 1, "high", group="g")
    (delivery,) = other.read(1) or ()
    return Ref(delivery.lane, delivery.entry, job_id)


def test_a_job_handed_back_for_a_higher_lane_goes_to_an_idle_worker_or_comes_back(queue: Queue) -> None:
    engine = slow_engine(1, 0.005)
    with inside(queue, engine, max_waiting="2") as worker:  # type: ignore[arg-type]
        low = add(queue, 6, "low", max_tokens=30, group="g")
        eventually(lambda: worker.worker.held.waiting == 2)
        high = add(queue, 3, "high", max_tokens=30, group="g")
        ends = [queue.check_ending(job) for job in low + high]
        assert {(end["status"], end["attempt"]) for end in ends} == {("succeeded", 1)}
        order = [job for job in ended(queue) if job in low]
        assert order == low, "those that were handed back keep their order"
        worker.at_rest()
    assert not queue.client.exists(queue.keys.returned)


def test_a_job_that_waited_longer_than_aging_seconds_is_not_handed_back_for_the_lane_above() -> None:
    intake = Intake.__new__(Intake)
    intake._settings = settings_from({"model": "fake"})
    job = Job(Entry("low", "1-0", Identity("low")))
    assert intake._gives_way(job, 0)
    assert not intake._gives_way(job, 2)
    job.taken_at -= 31
    assert intake._gives_way(job, 0)
    assert not intake._gives_way(job, 1)


def test_after_an_outage_jobs_start_in_the_order_in_which_they_were_added(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The STARTs of four jobs do not reach Redis; those of six other jobs would, a moment later."""
    start_all, asked = Scripts.start_all, threading.Event()

    def start(self: Scripts, starts: Any) -> Any:
        if not asked.is_set():
            eventually(lambda: holds(worker, *jobs))
            asked.set()
            raise redis.ConnectionError("away")
        return start_all(self, starts)

    monkeypatch.setattr(Scripts, "start_all", start)
    jobs = [f"normal{number}" for number in range(10)]
    with inside(queue, slow_engine(4, 0.0)) as worker:  # type: ignore[arg-type]
        queue.client.hset(queue.keys.meta, "paused", "1")
        assert add(queue, 10, group="g") == jobs
        queue.client.hdel(queue.keys.meta, "paused")
        eventually(lambda: len(ended(queue)) == 10)
        worker.at_rest()
    assert ended(queue) == jobs


def test_an_entry_taken_over_starts_before_younger_entries_that_wait(queue: Queue) -> None:
    """Another worker handed the entry back, and this worker holds younger jobs already."""
    queue.client.hset(queue.keys.meta, "lease_ms", 30_000)
    other = Scripts(queue.client, queue.keys, "other")
    other.ensure_groups()
    old = queue.add({**BODY, "max_tokens": 4}, id="old", group="g")
    (delivery,) = other.read(1) or ()
    with inside(queue, slow_engine(1, 0.01)) as worker:  # type: ignore[arg-type]
        young = add(queue, 4, max_tokens=50, group="g")
        eventually(lambda: any(job.phase is Phase.STARTED for job in worker.worker.held.all()))
        eventually(lambda: holds(worker, *young))
        first = next(job.id for job in worker.worker.held.all() if job.phase is Phase.STARTED)
        other.yield_(Ref(delivery.lane, delivery.entry, old), idle_ms=30_000, due_in_ms=0)
        eventually(lambda: len(ended(queue)) == 5)
    assert ended(queue) == [first, old, *(job for job in young if job != first)]


def test_when_a_lane_is_deleted_the_worker_ends_its_jobs_and_their_readers_see_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconcile = Scripts.reconcile
    monkeypatch.setattr(Scripts, "reconcile", lambda self: reconcile(self, look_ms=100))
    queue.client.hset(queue.keys.meta, "paused", "1")
    with inside(queue, lease_seconds="0.3"), Client(queue.url, queue.keys.queue, block_ms=200) as client:
        job = client.submit("x", tenant="t")
        queue.client.delete(queue.keys.lane("normal"))
        assert "deleted" in (job.result(timeout=20).cancel_reason or "")
        assert queue.client.get(queue.keys.quota("t")) == b"0"


def test_a_worker_publishes_how_long_results_live_and_a_cancel_keeps_to_it(queue: Queue) -> None:
    with (
        inside(queue, result_ttl_seconds="1000", stream_ttl_seconds="100"),
        Client(queue.url, queue.keys.queue) as client,
    ):
        job = client.submit("x", delay=60)
        job.cancel()
        assert 990 < queue.client.ttl(queue.keys.result(job.id)) <= 1000
        assert 90 < queue.client.ttl(queue.keys.out(job.id)) <= 100
    with inside(queue, result_ttl_seconds="2000"):  # the one that started last says so
        assert queue.client.hget(queue.keys.meta, "result_ttl_seconds") == b"2000"
