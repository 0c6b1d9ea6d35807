"""The clerk: an RQ worker that keeps the queue's own chores going.

    rq worker --worker-class producer.clerk.ClerkWorker --serializer json --with-scheduler clerk

It is RQ's worker with one duty more: the jobs in `CHORES` are always queued, scheduled or running, on the first queue
that it listens on. Each is one RQ job with a fixed id that RQ repeats; one that failed is queued again, and any
number of clerks may run beside each other. (`rq cron` cannot do it: it enqueues with pickle, which a worker of JSON
does not read.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from rq import Queue, Repeat
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus

from producer.jobs import place
from producer.rqworker import SteadyWorker
from producer.webhook import WebhookSettings
from tokenmill.cli.console import warn_of_variables

FOREVER: Final = 2**31 - 1
LOST_AFTER: Final = timedelta(minutes=1)


class Chore(NamedTuple):
    """A job that is to be run again and again."""

    function: str
    pause_s: int
    timeout_s: int


CHORES: Final = (Chore("deliver_callbacks", 1, 180), Chore("janitor", 300, 180))
"""`deliver_callbacks` runs for most of a minute at a time; its pauses are for the other jobs of the worker."""


class ClerkWorker(SteadyWorker):
    """An RQ worker that looks after the chores whenever it does RQ's maintenance, every ten seconds or so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_environment(os.environ)
        super().__init__(*args, **kwargs)
        self.worker_ttl = min(self.worker_ttl, 25)
        self.job_monitoring_interval = min(self.job_monitoring_interval, 10)
        self.maintenance_interval = min(self.maintenance_interval, 10)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Three heartbeats, not a minute: what a killed worker left is to go on soon, and our jobs may run twice."""
        interval: int = self.job_monitoring_interval
        return 3 * interval

    def run_maintenance_tasks(self) -> None:
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]
        for chore in CHORES:
            keep_going(self.queues[0], chore)


def check_environment(environ: Mapping[str, str]) -> None:
    """Tell which of our variables is wrong, before a chore fails for it, and which is misspelt.

    Raises:
        SystemExit: with status 2, where one is wrong; it was told in one line.
    """
    warn_of_variables(environ)
    try:
        place(environ)
        WebhookSettings.of(environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def keep_going(queue: Queue, chore: Chore) -> None:
    """Enqueue a chore unless it is under way. One that an operator cancelled (`rq` or its dashboard) stays so."""
    served = os.environ.get("TOKENMILL_QUEUE") or "default"
    job_id = f"clerk-{served}-{chore.function}".replace(".", "_")
    try:
        job = Job.fetch(job_id, connection=queue.connection, serializer=queue.serializer)
    except NoSuchJobError:
        _enqueue(queue, chore, job_id)
        return
    status = job.get_status(refresh=False)
    if status == JobStatus.FAILED:
        job.requeue()
    elif status in (JobStatus.FINISHED, JobStatus.STOPPED) or _is_lost(job):
        _enqueue(queue, chore, job_id)


def _is_lost(job: Job) -> bool:
    """A worker that dies between taking a job and noting so leaves it `queued`, and in no queue."""
    if job.get_status(refresh=False) != JobStatus.QUEUED or job.enqueued_at is None:
        return False
    return datetime.now(UTC) - job.enqueued_at > LOST_AFTER and job.get_position() is None


def _enqueue(queue: Queue, chore: Chore, job_id: str) -> None:
    queue.enqueue(
        f"producer.jobs.{chore.function}",
        job_id=job_id,
        job_timeout=chore.timeout_s,
        repeat=Repeat(times=FOREVER, interval=chore.pause_s),
    )
