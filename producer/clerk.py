"""The clerk: an RQ worker that keeps the queue's own chores running.

    rq worker --worker-class producer.clerk.ClerkWorker --serializer json --with-scheduler clerk

It is RQ's worker with one additional duty: it keeps the jobs in `CHORES` queued, scheduled or running on the first
queue that it listens on. Each chore is an RQ job with a fixed id that RQ repeats; a failed chore is queued again. Any
number of clerks may run beside each other. (`rq cron` cannot do this: it enqueues with pickle, which a worker with
`--serializer json` does not read.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from redis import Redis
from rq import Queue, Repeat
from rq.job import Job

from producer.jobs import FILES, REDIS, place, storage_of
from producer.rqqueue import FOREVER, keep_going
from producer.rqworker import SteadyWorker
from producer.webhook import WebhookSettings
from tokenmill.cli.console import warn_of_variables
from tokenmill.protocol.connection import DEFAULT_URL


class Chore(NamedTuple):
    """A job that RQ runs repeatedly."""

    function: str
    """Name in `producer.jobs`."""
    pause_s: int
    """Seconds between two runs."""
    timeout_s: int
    """Time limit of one run."""
    needs: str | None = None
    """Environment variable without which the chore does not run."""


CHORES: Final = (
    Chore("deliver_callbacks", 1, 180),
    Chore("janitor", 300, 180),
    Chore("tend_batches", 10, 180, FILES),
    Chore("clean_files", 300, 1800, FILES),
)
"""`deliver_callbacks` runs for most of a minute at a time; in its pauses the worker runs other jobs."""


class ClerkWorker(SteadyWorker):
    """An RQ worker that checks the chores together with RQ's maintenance, about every ten seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_environment(os.environ)
        super().__init__(*args, **kwargs)
        warn_of_another_redis(os.environ, self.connection)
        self.worker_ttl = min(self.worker_ttl, 25)
        self.job_monitoring_interval = min(self.job_monitoring_interval, 10)
        self.maintenance_interval = min(self.maintenance_interval, 10)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Return three heartbeats instead of a minute, so that jobs of a killed worker are retried soon.

        The jobs of this project are idempotent: they may run twice.
        """
        interval: int = self.job_monitoring_interval
        return 3 * interval

    def run_maintenance_tasks(self) -> None:
        """Run RQ's maintenance, then enqueue the chores that are not under way."""
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]
        for chore in CHORES:
            keep_chore(self.queues[0], chore)


def check_environment(environ: Mapping[str, str]) -> None:
    """Check this project's environment variables before a chore fails because of them; warn of misspelt variables.

    Raises:
        SystemExit: with status 2, after one line on stderr that names the variable with a wrong value.
    """
    warn_of_variables(environ)
    try:
        place(environ)
        WebhookSettings.of(environ)
        if environ.get(FILES):
            storage_of(environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def warn_of_another_redis(environ: Mapping[str, str], connection: Redis) -> None:
    """Print a warning on stderr if RQ has a Redis of its own and no variable names that of the tokenmill queue."""
    if environ.get(REDIS):
        return
    given = connection.get_connection_kwargs()
    host, port, database = given.get("host") or given.get("path"), given.get("port") or 6379, given.get("db") or 0
    if (host, port, database) not in {("localhost", 6379, 0), ("127.0.0.1", 6379, 0)}:
        print(
            f"warning: {REDIS} is not set, so the clerk serves the tokenmill queue at {DEFAULT_URL}, although RQ has "
            f"another Redis; if the queue is there, set {REDIS} to the same URL",
            file=sys.stderr,
        )


def keep_chore(queue: Queue, chore: Chore) -> None:
    """Enqueue a chore unless it is under way. A chore that an operator cancelled in RQ stays cancelled."""
    if chore.needs is not None and not os.environ.get(chore.needs):
        return
    _, served, _ = place(os.environ)
    job_id = f"clerk-{served}-{chore.function}".replace(".", "_")
    keep_going(queue, job_id, lambda: _enqueue(queue, chore, job_id))


def _enqueue(queue: Queue, chore: Chore, job_id: str) -> None:
    queue.enqueue(
        f"producer.jobs.{chore.function}",
        job_id=job_id,
        job_timeout=chore.timeout_s,
        repeat=Repeat(times=FOREVER, interval=chore.pause_s),
    )
