"""Keeps RQ jobs with fixed ids going: enqueues those that are not under way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus

LOST_AFTER: Final = timedelta(minutes=1)
"""Time after which a job that is `queued`, but in no queue, counts as lost."""
FOREVER: Final = 2**31 - 1
"""Number of repeats, or of retries, of a job that RQ is to run again and again."""
_OVER: Final = (JobStatus.FINISHED, JobStatus.STOPPED)


def keep_going(
    queue: Queue, job_id: str, enqueue: Callable[[], object], *, pause: timedelta = timedelta(0), revive: bool = False
) -> None:
    """Enqueue a job unless it is queued, scheduled or running.

    Args:
        enqueue: enqueues the job under its id.
        pause: how long a failed job rests, once its retries are used up.
        revive: enqueue the job even if it was cancelled in RQ.
    """
    try:
        job = Job.fetch(job_id, connection=queue.connection, serializer=queue.serializer)
    except NoSuchJobError:
        enqueue()
        return
    status = job.get_status(refresh=False)
    if status == JobStatus.FAILED:
        if job.ended_at is None or datetime.now(UTC) - job.ended_at.astimezone(UTC) >= pause:
            job.failed_job_registry.remove(job)
            enqueue()
    elif status in ((*_OVER, JobStatus.CANCELED) if revive else _OVER) or _is_lost(job):
        enqueue()


def _is_lost(job: Job) -> bool:
    """Return whether a job is `queued` but in no queue: its worker died after taking it, before setting its status."""
    if job.get_status(refresh=False) != JobStatus.QUEUED or job.enqueued_at is None:
        return False
    return datetime.now(UTC) - job.enqueued_at > LOST_AFTER and job.get_position() is None
