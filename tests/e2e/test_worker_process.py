"""Worker processes that are killed, stopped, paused and cut off; the engine is faked, everything else is real."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import Start
from tests.support import RedisServer, eventually, free_port, running_redis
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.ops.exits import Exit


def tokens(queue: Queue, job: str) -> int:
    return sum(fields["type"] == "token" for _, fields in queue.events(job))


def running(queue: Queue, **body: Any) -> str:
    """A job with some of its text out."""
    job = queue.add({"prompt": "run", "max_tokens": 60, **body})
    eventually(lambda: tokens(queue, job) >= 2, 20)
    return job


def test_a_killed_workers_job_is_finished_by_the_next(queue: Queue, start: Start) -> None:
    first = start(queue, FAKE_STEP="0.02")
    job = running(queue)
    first.popen.kill()
    start(queue)
    result = queue.check_ending(job)
    assert (result["status"], result["attempt"]) == ("succeeded", 2)
    starts = [(i, f["attempt"]) for i, f in queue.events(job) if f["type"] == "start"]
    assert starts == [("1-0", "1"), ("2-0", "2")]
    assert (queue.depth(), queue.pending()) == (0, 0)


def test_a_worker_paused_past_its_lease_writes_nothing_over_its_successor(queue: Queue, start: Start) -> None:
    first = start(queue, FAKE_STEP="0.05")
    job = running(queue)
    first.popen.send_signal(signal.SIGSTOP)
    second = start(queue)
    result = queue.check_ending(job)
    events = queue.events(job)
    first.popen.send_signal(signal.SIGCONT)
    # The one that slept serves on: it takes the next job as soon as the other is gone.
    assert second.stop() == Exit.OK
    other = queue.add({"prompt": "next", "max_tokens": 3})
    assert queue.check_ending(other)["worker"] != result["worker"]
    assert queue.events(job) == events
    assert first.stop() == Exit.OK
    assert (queue.depth(), queue.pending()) == (0, 0)


def test_sigterm_drains_and_the_process_exits_zero(queue: Queue, start: Start) -> None:
    worker = start(queue, FAKE_STEP="0.01")
    job = running(queue, prompt="nobody's business")
    assert worker.stop() == Exit.OK
    assert queue.check_ending(job)["attempt"] == 1
    assert not queue.client.keys(queue.keys.worker("*"))
    ends = [line for line in map(json.loads, worker.log.splitlines()) if line["event"] == "job_ended"]
    assert [(line["id"], line["status"], line["completion_tokens"]) for line in ends] == [(job, "succeeded", 60)]
    assert "nobody's business" not in worker.log


def test_jobs_that_do_not_finish_within_the_drain_are_handed_back_at_once(queue: Queue, start: Start) -> None:
    worker = start(queue, FAKE_STEP="0.05", drain_seconds="0")
    job = running(queue)
    assert worker.stop() == Exit.OK
    assert "jobs_handed_back" in worker.log
    start(queue)
    assert queue.check_ending(job)["attempt"] == 2


def test_burst_exits_zero_with_an_empty_queue(queue: Queue, start: Start) -> None:
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 3}) for i in range(20)]
    assert start(queue, burst="1").wait() == Exit.OK
    assert {queue.check_ending(job)["status"] for job in jobs} == {"succeeded"}
    assert queue.depth() == 0


def test_two_workers_share_a_queue_and_each_job_runs_once(queue: Queue, start: Start) -> None:
    for _ in range(2):
        start(queue, FAKE_STEP="0.005", max_waiting="2", max_num_seqs="4")
    eventually(lambda: len(queue.client.keys(queue.keys.worker("*"))) == 2, 20)
    jobs = [queue.add({"prompt": f"{i}", "max_tokens": 5}) for i in range(40)]
    results = [queue.check_ending(job) for job in jobs]
    assert {r["attempt"] for r in results} == {1}
    assert len({r["worker"] for r in results}) == 2


def test_a_hanging_engine_ends_the_worker_and_its_job_goes_on_elsewhere(queue: Queue, start: Start) -> None:
    worker = start(queue, FAKE_HANG="5", stall_seconds="0.5")
    job = queue.add({"prompt": "hang", "max_tokens": 20})
    assert worker.wait() == Exit.STALLED
    start(queue)
    assert queue.check_ending(job)["status"] == "succeeded"


@pytest.mark.redis_server
def test_a_restart_of_redis_costs_no_job(own: Queue, own_redis: RedisServer, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.05", lease_seconds="5")
    job = running(own, max_tokens=100)
    waits = own.add({"prompt": "later", "max_tokens": 2}, lane="low")
    eventually(lambda: own.client.get(own.keys.result(waits)))
    own.client.bgrewriteaof()
    eventually(lambda: not own.client.info("persistence")["aof_rewrite_in_progress"])
    own_redis.process.terminate()  # type: ignore[union-attr]
    own_redis.process.wait()  # type: ignore[union-attr]
    own_redis.start()
    assert own.check_ending(job)["status"] == "succeeded"
    other = own.add({"prompt": "after", "max_tokens": 2})
    assert own.check_ending(other)["status"] == "succeeded"
    assert worker.stop() == Exit.OK


@pytest.mark.redis_server
def test_a_flushed_redis_costs_its_jobs_but_not_the_worker(own: Queue, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.02")
    job = running(own, max_tokens=200)
    own.client.flushall()
    eventually(lambda: "job_lost" in worker.log)
    other = own.add({"prompt": "after", "max_tokens": 2})
    assert own.check_ending(other)["status"] == "succeeded"
    assert not own.client.exists(own.keys.result(job))
    eventually(lambda: own.client.hexists(own.keys.meta, "lease_ms"))
    assert worker.stop() == Exit.OK


@pytest.mark.redis_server
def test_a_full_redis_still_gets_the_results_of_running_jobs(own: Queue, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.02")
    job = running(own, max_tokens=200)
    own.client.config_set("maxmemory", "1mb")  # less than it uses already
    result = own.check_ending(job)
    assert (result["status"], result["attempt"]) == ("succeeded", 1)
    own.client.config_set("maxmemory", "0")
    assert own.check_ending(own.add({"prompt": "next", "max_tokens": 2}))["status"] == "succeeded"
    assert worker.stop() == Exit.OK


@pytest.mark.redis_server
def test_sigterm_while_redis_is_away_ends_in_bounded_time(own: Queue, own_redis: RedisServer, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.05", drain_seconds="1", lease_seconds="30")  # a lease that outlasts the drain
    running(own, max_tokens=200)
    own_redis.kill()
    worker.popen.terminate()
    assert worker.wait(25) == Exit.OK
    assert "job_not_handed_back" in worker.log


@pytest.mark.redis_server
def test_a_worker_waits_for_a_redis_that_is_not_there_yet(tmp_path: Path, start: Start) -> None:
    server = RedisServer(tmp_path, free_port())
    with contextlib.closing(command_client(server.url)) as client:
        queue = Queue(client, server.url, Keys("late"))
        worker = start(queue)
        eventually(lambda: "redis_unreachable" in worker.log, 20)
        server.start()
        try:
            assert queue.check_ending(queue.add({"prompt": "x", "max_tokens": 1}))["status"] == "succeeded"
            assert worker.stop() == Exit.OK
        finally:
            server.kill()


@pytest.mark.redis_server
def test_a_wrong_password_ends_the_worker_and_is_not_logged(tmp_path: Path, start: Start) -> None:
    with running_redis(tmp_path) as server, contextlib.closing(command_client(server.url)) as client:
        client.config_set("requirepass", "sesame")
        client.execute_command("AUTH", "sesame")
        queue = Queue(client, f"redis://:opensesame@127.0.0.1:{server.port}/0", Keys())
        worker = start(queue)
        assert worker.wait() == Exit.REFUSED
        assert "opensesame" not in worker.log
        queue.url = f"redis://:sesame@127.0.0.1:{server.port}/0"
        worker = start(queue)
        eventually(lambda: "worker_ready" in worker.log, 20)
        assert worker.stop() == Exit.OK
        assert "sesame" not in worker.log


def test_a_missing_model_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "worker.cli", "--model", "/nowhere", "--redis", "redis://127.0.0.1:1/0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == Exit.LOAD
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
