"""Cleans up after an RQ job that was stopped.

    with after_death(job, lambda: client.job(request).cancel()):
        …                                   # the work of the job

RQ stops a job by SIGKILL to its work horse and the horse's process group, so that neither the job's code nor a child
process of it can clean up; RQ's callback `on_stopped` must be named by the code that enqueues the job. So a watcher, a
process in a session of its own, waits for the horse to end. If the horse ends within the block, the watcher asks RQ
whether the job was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

from redis.exceptions import RedisError
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus

VERDICT_S: Final = 30.0
"""Time limit for RQ's worker to set the status of a job whose horse died. If the worker died too, no status comes."""
_POLL_S: Final = 0.1


@contextmanager
def after_death(job: Job, action: Callable[[], None]) -> Iterator[None]:
    """Run `action`, in another process, if this process is killed within the block because the job was stopped.

    If the horse dies for another reason, nothing is done, so that the job's retry finds its request. `action` runs in a
    fork and must make its own connections.
    """
    ours, theirs = get_context("fork").Pipe()
    watcher = get_context("fork").Process(target=_watch, args=(ours, theirs, job, action), daemon=True)
    watcher.start()
    theirs.close()
    ours.recv()  # the watcher has left this process group
    try:
        yield
    finally:
        try:
            ours.send(True)
        except BrokenPipeError:
            job.log.warning("Job %s: the process that would clean up after a stop was killed", job.id)
        ours.close()
        watcher.join()


def _watch(parents: Connection, pipe: Connection, job: Job, action: Callable[[], None]) -> None:
    parents.close()
    os.setsid()
    pipe.send(True)
    try:
        pipe.recv()
    except EOFError:
        if was_stopped(job, VERDICT_S):
            job.log.info("Job %s was stopped in RQ; cancelling its requests", job.id)
            action()


def was_stopped(job: Job, seconds: float) -> bool:
    """Return whether RQ stopped or cancelled a job whose horse is dead; wait up to `seconds` for its status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            status = job.get_status(refresh=True)
        except InvalidJobOperation:  # deleted
            return True
        except RedisError:
            status = None
        if status in (JobStatus.STOPPED, JobStatus.CANCELED):
            return True
        if status not in (JobStatus.STARTED, None):
            return False
        time.sleep(_POLL_S)
    return False
