"""What is to be done when RQ kills a job.

    with after_death(job, lambda: client.job(request).cancel()):
        …                                   # what the job does

RQ stops a job by SIGKILL to its work horse and the horse's process group, so that neither code of the job nor a child
of it can clean up; a callback (`on_stopped`) would be the enqueuer's to name. So a process in a session of its own
waits for the horse to end, and where it ended in the middle, asks RQ whether it was stopped.
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
"""RQ's worker says within a moment what became of a job whose horse died; where the worker died too, nobody does."""
_POLL_S: Final = 0.1


@contextmanager
def after_death(job: Job, action: Callable[[], None]) -> Iterator[None]:
    """Run `action`, in another process, if this one is killed within the block because somebody stopped the job.

    A job whose horse died for another reason is left as it is, so that its retry finds what it had begun. `action`
    makes its own connections: it runs in a fork.
    """
    ours, theirs = get_context("fork").Pipe()
    watcher = get_context("fork").Process(target=_watch, args=(ours, theirs, job, action), daemon=True)
    watcher.start()
    theirs.close()
    ours.recv()  # it has left our process group
    try:
        yield
    finally:
        try:
            ours.send(True)
        except BrokenPipeError:  # somebody killed the watcher; there is nothing left to call off
            job.log.warning("Job %s: its watcher is gone", job.id)
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
            job.log.info("Job %s: stopped; its requests are cancelled", job.id)
            action()


def was_stopped(job: Job, seconds: float) -> bool:
    """True where RQ says so of a job whose horse is dead; waits for its verdict."""
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
