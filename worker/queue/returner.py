"""Hands jobs back to the queue, and marks the running jobs that are not to blame for this worker's end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import redis
import structlog

from tokenmill.protocol.errors import JobError
from tokenmill.protocol.scripts import Scripts
from worker.inbox import Drop, Inbox
from worker.jobs.held import Held
from worker.jobs.job import Job, Phase

log = structlog.get_logger()

RETRY_BACKOFF_SECONDS = 1.0
"""Delay before a job that failed with a retryable error may be started again, times its attempts."""


class Returner:
    """Hands jobs back; called by several threads, without a thread of its own."""

    def __init__(self, scripts: Scripts, held: Held, inbox: Inbox, lease_seconds: float) -> None:
        """Connect the parts. `scripts`: over a client that retries once, since a worker that ends has little time."""
        self._scripts = scripts
        self._held = held
        self._inbox = inbox
        self._lease_seconds = lease_seconds
        self._in_use = threading.Lock()
        """Keeps the client to one connection: a second one would be refused after the password has changed."""
        self.draining = False
        """Whether this worker was asked to end and lets its running jobs finish."""

    def hand_back(self, wanted: Callable[[Job], bool], graceful: bool = True) -> None:
        """Hand the held jobs that `wanted` accepts back to the queue, where the next read of any worker takes them.

        `graceful`: the jobs are not at fault, so neither a start nor a death is counted for them.
        """
        jobs = self._held.take(wanted)
        if not jobs:
            return
        for job in jobs:
            self._inbox.post(Drop(job.handle))
        handed = 0
        with self._in_use:
            for job in jobs:
                if not self._yield(self._scripts, job, 0, graceful=graceful, count_start=not graceful):
                    break  # if Redis only times out, trying every job would take too long
                handed += 1
        log.info("jobs_handed_back", count=handed, of=len(jobs))

    def give_way(self, jobs: list[Job]) -> None:
        """Hand these waiting jobs back, except jobs that have been started meanwhile."""
        handles = {job.handle for job in jobs}
        self.hand_back(lambda job: job.handle in handles and job.may_leave)

    def retry(self, scripts: Scripts, job: Job, error: JobError) -> None:
        """Hand a job back that failed with a retryable error; a worker takes it after a delay. The start counts.

        `scripts`: the caller's own, since each thread has its own client.
        """
        delay = min(RETRY_BACKOFF_SECONDS * job.start.attempt, self._lease_seconds / 2)
        log.warning("job_retried", id=job.id, attempt=job.start.attempt, code=error.code.value, message=error.message)
        if self._held.forget(job.handle) is not None:
            self._yield(scripts, job, round(delay * 1000), graceful=True, count_start=True)

    def excuse(self) -> None:
        """Mark all running jobs in Redis as excused: this worker was asked to end, so a kill is not their fault.

        The keeper calls this at every beat of a drain, until all marks are in Redis.
        """
        jobs = [job for job in self._held.all() if job.phase is Phase.STARTED and not job.excused]
        if not jobs:
            return
        try:
            with self._in_use:
                self._scripts.excuse([job.ref for job in jobs])
        except redis.RedisError as error:
            log.warning("drain_not_announced", count=len(jobs), message=str(error))
            return
        for job in jobs:
            job.excused = True

    def keep_alive(self) -> None:
        """Use the Redis connection, so that it stays open, and jobs can be handed back even after a change of password.

        Raises:
            redis.RedisError: Redis cannot be reached.
        """
        if self._in_use.acquire(blocking=False):  # otherwise another thread uses the connection now
            try:
                self._scripts.client.ping()
            finally:
                self._in_use.release()

    def _yield(self, scripts: Scripts, job: Job, delay_ms: int, graceful: bool, count_start: bool) -> bool:
        """Hand one entry back; return False if Redis cannot be reached: the entry's lease then runs out."""
        idle_ms = round(self._lease_seconds * 1000) - delay_ms
        try:
            scripts.yield_(job.ref, idle_ms=idle_ms, graceful=graceful, count_start=count_start, due_in_ms=delay_ms)
        except redis.RedisError as error:
            message = f"another worker can take the job over once its lease has run out: {error}"
            log.warning("job_not_handed_back", **job.log_fields, message=message)
            return False
        return True
