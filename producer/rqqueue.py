"""Enqueues RQ jobs with fixed ids again when they have ended or are lost, so that each is always queued or running."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus

LOST_AFTER: Final = timedelta(minutes=1)
"""Time, from its last enqueuing on, after which a job that waits in no place counts as lost."""
FOREVER: Final = 2**31 - 1
"""Number of repeats, or of retries, of a job that RQ is to run again and again."""
_OVER: Final = (JobStatus.FINISHED, JobStatus.STOPPED)


def keep_going(
    queue: Queue, job_id: str, enqueue: Callable[[], object], *, pause: timedelta = timedelta(0), revive: bool = False
) -> None:
    """Enqueue a job unless it is queued, scheduled or running.

    Args:
        enqueue: enqueues the job under its id.
        pause: how long after its end a failed job, whose retries are used up, is enqueued again.
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
    elif status in ((*_OVER, JobStatus.CANCELED) if revive else _OVER) or _is_lost(job, queue):
        enqueue()


def _is_lost(job: Job, queue: Queue) -> bool:
    """Return whether a job waits by its status, but is neither in its queue nor among the scheduled jobs.

    RQ writes the status of some jobs before their place, or their place before their status; a process may be killed in
    between.
    """
    if job.enqueued_at is None or datetime.now(UTC) - job.enqueued_at <= LOST_AFTER:
        return False
    status = job.get_status(refresh=False)
    if status == JobStatus.QUEUED:
        found = job.get_position() is not None
    elif status == JobStatus.SCHEDULED:
        found = job in queue.scheduled_job_registry
    else:
        return False
    return not found and job.get_status(refresh=True) == status  # it did not move on meanwhile
