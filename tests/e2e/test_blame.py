"""A job that kills its workers is given up, and the jobs beside it finish. Real processes under a supervisor."""

from __future__ import annotations

import pytest

from tests.e2e.process import Start
from tests.support import eventually
from tests.worker.harness import Queue
from worker.ops.exits import Exit


@pytest.mark.redis_server
def test_of_64_jobs_in_one_batch_only_the_one_that_kills_its_workers_is_given_up(own: Queue, start: Start) -> None:
    poison = own.add({"prompt": "poison", "max_tokens": 20}, id="poison")
    neighbours = [own.add({"prompt": f"innocent {i}", "max_tokens": 16}) for i in range(63)]
    options = {
        "FAKE_KILL": "poison",
        "FAKE_STEP": "0.005",
        "block_ms": "20",
        "max_num_seqs": "128",
        "max_waiting": "128",
    }
    workers = [start(own, **options)]

    def over() -> bool:
        if workers[-1].popen.poll() is not None:
            assert workers[-1].popen.returncode == -9
            workers.append(start(own, **options))  # as a supervisor would
        return own.depth() == 0

    eventually(over, 60)
    result = own.check_ending(poison)
    assert (result["status"], result["error"]["code"], result["error"]["cause"]) == ("failed", "gave_up", "worker_lost")
    assert (result["attempt"], len(workers)) == (3, 4)
    assert [fields[b"id"] for _, fields in own.client.xrange(own.keys.dead)] == [b"poison"]
    ends = [own.check_ending(job) for job in neighbours]
    assert {end["status"] for end in ends} == {"succeeded"}
    # All of them fell twice beside it; none was started with it a third time.
    assert max(end["attempt"] for end in ends) == 3
    assert (own.depth(), own.pending()) == (0, 0)
    assert workers[-1].stop() == Exit.OK


@pytest.mark.redis_server
def test_one_crash_makes_no_job_run_alone(own: Queue, start: Start) -> None:
    jobs = [own.add({"prompt": f"{i}", "max_tokens": 60}) for i in range(16)]
    first = start(own, FAKE_STEP="0.05", max_num_seqs="64")
    eventually(lambda: own.client.hget(own.keys.job(jobs[-1]), "state") == b"running", 20)
    first.popen.kill()
    second = start(own, FAKE_STEP="0.01", max_num_seqs="64")
    assert {own.check_ending(job)["attempt"] for job in jobs} == {2}
    assert "suspect_held" not in second.log
    assert {own.client.hget(own.keys.job(job), "deaths") for job in jobs} == {b"1"}


@pytest.mark.redis_server
def test_a_body_that_kills_every_worker_that_reads_it_is_given_up_unread(own: Queue, start: Start) -> None:
    """The job never starts, so it has no deaths to count: a mark says which entry the dead workers were reading."""
    options = {"FAKE_KILL_READER": "poison", "FAKE_STEP": "0.005", "block_ms": "20"}
    before = [own.add({"prompt": f"before {i}", "max_tokens": 30}) for i in range(8)]
    poison = own.add({"prompt": "poison"}, id="poison", group="g")
    after = [own.add({"prompt": f"after {i}", "max_tokens": 30}) for i in range(8)]
    workers = [start(own, **options)]

    def over() -> bool:
        if workers[-1].popen.poll() is not None:
            assert workers[-1].popen.returncode == -9
            workers.append(start(own, **options))
        return own.depth() == 0

    eventually(over, 60)
    result = own.check_ending(poison)
    assert (result["status"], result["error"]["code"], result["error"]["cause"]) == ("failed", "gave_up", "worker_lost")
    assert (result["attempt"], len(workers)) == (0, 4)
    assert [fields[b"id"] for _, fields in own.client.xrange(own.keys.dead)] == [b"poison"]
    ends = [own.check_ending(job) for job in before + after]
    assert {end["status"] for end in ends} == {"succeeded"}
    assert not own.client.exists(own.keys.reading)
    assert (own.depth(), own.pending()) == (0, 0)
    assert workers[-1].stop() == Exit.OK


@pytest.mark.redis_server
def test_a_kill_by_the_supervisor_during_a_drain_counts_against_no_job(own: Queue, start: Start) -> None:
    """An orchestrator that allows less time than `--drain-seconds`: SIGTERM, then SIGKILL, at every deploy."""
    jobs = [own.add({"prompt": f"{i}", "max_tokens": 100}) for i in range(8)]
    slow = {"drain_seconds": "600", "FAKE_STEP": "0.1", "max_num_seqs": "8"}
    for _ in range(3):
        worker = start(own, **slow)
        eventually(lambda: {own.client.hget(own.keys.job(job), "worker") for job in jobs} == {name(own)}, 30)
        eventually(lambda: {own.client.hget(own.keys.job(job), "state") for job in jobs} == {b"running"}, 30)
        worker.popen.terminate()
        eventually(lambda: all(own.client.hexists(own.keys.job(job), "excused") for job in jobs))
        worker.popen.kill()
        worker.wait()
    last = start(own, FAKE_STEP="0.01")
    ends = [own.check_ending(job) for job in jobs]
    assert {end["status"] for end in ends} == {"succeeded"}
    assert {tuple(own.client.hmget(own.keys.job(job), "tries", "deaths")) for job in jobs} == {(b"1", b"0")}
    assert "suspect_held" not in last.log


def name(queue: Queue) -> bytes:
    """Return the name of the only live worker; empty if not exactly one is alive."""
    keys = list(queue.client.scan_iter(queue.keys.worker("*")))
    return keys[0].removeprefix(queue.keys.worker("").encode()) if len(keys) == 1 else b""


@pytest.mark.redis_server
def test_a_job_that_kills_its_worker_in_a_drain_is_found_by_the_next(own: Queue, start: Start) -> None:
    poison = own.add({"prompt": "poison", "max_tokens": 40}, id="poison")
    options = {"FAKE_KILL": "poison", "FAKE_STEP": "0.1", "block_ms": "20", "drain_seconds": "600"}
    workers = [start(own, **options)]
    eventually(lambda: own.client.xlen(own.keys.out(poison)) > 1, 20)  # before the first token it would be handed back
    workers[0].popen.terminate()

    def over() -> bool:
        if workers[-1].popen.poll() is not None:
            assert workers[-1].popen.returncode == -9
            workers.append(start(own, **options))
        return own.depth() == 0

    eventually(over, 60)
    result = own.check_ending(poison)
    assert (result["error"]["code"], result["attempt"]) == ("gave_up", 4)
    assert len(workers) == 5  # the first of four deaths was in a drain
