"""RQ jobs with fixed ids are kept going, whatever a killed process left of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import rq
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from producer.rqqueue import LOST_AFTER, keep_going
from tests.support import RedisServer
from tokenmill.protocol.connection import command_client

pytestmark = pytest.mark.redis_server


@pytest.fixture
def queue(redis_server: RedisServer) -> Iterator[rq.Queue]:
    with command_client(redis_server.url) as redis:
        yield rq.Queue(f"kept-{secrets.token_hex(4)}", connection=redis, serializer=JSONSerializer)


def job_of(queue: rq.Queue, status: JobStatus, age: timedelta) -> Job:
    """A job with this status that is in its queue, and that was enqueued so long ago."""
    job = queue.enqueue("producer.jobs.janitor", job_id=secrets.token_hex(8))
    job.enqueued_at = datetime.now(UTC) - age
    job.set_status(status)
    job.save()
    return job


def is_enqueued_again(queue: rq.Queue, job: Job) -> bool:
    calls: list[bool] = []
    keep_going(queue, job.id, lambda: calls.append(True))
    return bool(calls)


@pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.SCHEDULED])
def test_a_job_that_waits_in_no_place_is_enqueued_again_after_a_while(queue: rq.Queue, status: JobStatus) -> None:
    lost, fresh = (job_of(queue, status, age) for age in (LOST_AFTER * 2, timedelta(0)))
    queue.remove(lost)
    queue.remove(fresh)
    assert is_enqueued_again(queue, lost)
    assert not is_enqueued_again(queue, fresh)


def test_a_job_that_waits_in_its_place_or_runs_is_left_alone(queue: rq.Queue) -> None:
    waiting, scheduled, running = (
        job_of(queue, status, LOST_AFTER * 2) for status in (JobStatus.QUEUED, JobStatus.SCHEDULED, JobStatus.STARTED)
    )
    queue.remove(scheduled)
    queue.scheduled_job_registry.schedule(scheduled, datetime.now(UTC) + timedelta(hours=1))
    queue.remove(running)
    for job in (waiting, scheduled, running):
        assert not is_enqueued_again(queue, job)
