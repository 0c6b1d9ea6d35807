"""What can be read of a queue: its numbers, its workers, and why a job has no output yet."""

from __future__ import annotations

import pytest

from tests.tokenmill.mini import Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.state import JobStatus
from tokenmill.queue.jobs import JobInfo, read_job
from tokenmill.queue.overview import read_overview
from tokenmill.queue.workers import WorkerInfo


def test_an_unused_queue_is_empty_and_without_workers(queue: Queue) -> None:
    found = read_overview(queue.redis, queue.keys)
    assert found.lanes == {"high": 0, "normal": 0, "low": 0}
    assert (found.delayed, found.dead, found.workers) == (0, 0, ())
    assert (found.meta.paused, found.meta.problems) == (False, ())


def test_the_overview_counts_lanes_delayed_jobs_and_dead_letters(queue: Queue, client: Client) -> None:
    client.submit("x", priority="low")
    client.submit("x", priority="low")
    client.submit("x", delay=60)
    queue.redis.xadd(queue.keys.dead, {"id": "lost"})
    queue.redis.hset(queue.keys.meta, mapping={"paused": "yes", "max_dept": "5"})
    found = read_overview(queue.redis, queue.keys)
    assert found.lanes == {"high": 0, "normal": 0, "low": 2}
    assert (found.delayed, found.dead, found.meta.paused) == (1, 1, True)
    assert len(found.meta.problems) == 1


def test_workers_are_listed_by_name_with_their_fields(queue: Queue) -> None:
    queue.redis.hset(queue.keys.worker("b:2:y"), mapping={"status": "ready", "model": "tiny"})
    queue.redis.hset(queue.keys.worker("a:1:x"), mapping={"status": "draining"})
    queue.redis.hset(queue.keys.job("x"), mapping={"state": "queued"})
    assert read_overview(queue.redis, queue.keys).workers == (
        WorkerInfo("a:1:x", {"status": "draining"}),
        WorkerInfo("b:2:y", {"model": "tiny", "status": "ready"}),
    )


@pytest.mark.parametrize("paused", [False, True])
def test_a_job_has_a_status_and_its_queue_may_be_paused(queue: Queue, client: Client, paused: bool) -> None:
    if paused:
        queue.redis.hset(queue.keys.meta, "paused", "1")
    job = client.submit("x")
    assert read_job(queue.redis, queue.keys, job.id) == JobInfo(JobStatus.QUEUED, None, paused)
    job.cancel()
    assert read_job(queue.redis, queue.keys, job.id) == JobInfo(JobStatus.CANCELLED, None, paused)
    assert read_job(queue.redis, queue.keys, "unknown") == JobInfo(JobStatus.UNKNOWN, None, paused)


def test_a_delayed_job_has_the_seconds_until_it_is_due(queue: Queue, client: Client) -> None:
    client.submit("x", id="later", delay=60)
    found = read_job(queue.redis, queue.keys, "later")
    assert found.status is JobStatus.DELAYED
    assert found.due_in_s is not None
    assert 30 < found.due_in_s <= 60
    queue.redis.zadd(queue.keys.delayed, {"later": 0})
    assert read_job(queue.redis, queue.keys, "later").due_in_s == 0.0
