"""Calls of a running RQ job to RQ: was the job cancelled, should it make way for others, and notes of its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import rq
from redis.exceptions import RedisError
from rq.exceptions import InvalidJobOperation
from rq.job import Job as RqJob
from rq.worker import Worker as RqWorker

from tokenmill.protocol.faults import transient

POLL_S: Final = 1.0
"""How often a running job asks RQ whether it was cancelled."""


def running() -> RqJob:
    """Return the RQ job that this process runs.

    Raises:
        RuntimeError: it runs none.
    """
    job = rq.get_current_job()
    if job is None:
        raise RuntimeError("this function must run as an RQ job; without RQ use tokenmill.Client")
    return job


def cancelled(job: RqJob) -> Callable[[], bool]:
    """Return a function that says whether the running job was cancelled or deleted; it asks RQ once in `POLL_S`."""
    asked, last = False, -POLL_S

    def probe() -> bool:
        nonlocal asked, last
        if not asked and time.monotonic() >= last + POLL_S:
            last = time.monotonic()
            try:
                asked = job.get_status(refresh=True) == "canceled"
            except InvalidJobOperation:
                asked = True
            except RedisError as error:
                check_transient(error)
        return asked

    return probe


def makes_way(job: RqJob | None) -> Callable[[float], bool]:
    """Return a function that says whether this job should end early, given the seconds for which it may run anyway.

    It should if its RQ worker was asked to stop, or after these seconds if another job waits in the same RQ queue.
    """
    if job is None:
        return lambda least_s: False
    key = f"{RqWorker.redis_worker_namespace_prefix}{job.worker_name}"
    worker = RqWorker.find_by_key(key, connection=job.connection)
    queue, begun = rq.Queue(job.origin, connection=job.connection), time.monotonic()

    def probe(least_s: float) -> bool:
        if worker is not None and worker.shutdown_requested_date is not None:
            return True
        return time.monotonic() > begun + least_s and queue.count > 0

    return probe


def note(job: RqJob, what: dict[str, Any]) -> None:
    """Write `what` into the RQ job's `meta`, where `rq` and dashboards show it. An outage of Redis is ignored."""
    job.meta["tokenmill"] = what
    try:
        job.save_meta()  # type: ignore[no-untyped-call]
    except RedisError as error:
        check_transient(error)


def check_transient(error: RedisError) -> None:
    """Raise an error of Redis that is no outage, such as a missing permission."""
    if not transient(error):
        raise error
