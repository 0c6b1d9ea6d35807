"""Notes on stderr of a command that waits for a job: that the job is delayed, or why it may not have started."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from redis.exceptions import RedisError

from tokenmill.client.patience import Deadline
from tokenmill.client.sync import Client
from tokenmill.protocol.meta import paused
from tokenmill.protocol.state import JobStatus
from tokenmill.queue.jobs import JobInfo, read_job

T = TypeVar("T")

PATIENCE_S: Final = 10.0
"""Time without an event of the job after which a waiting command says why it waits."""


@contextmanager
def explained(client: Client, job_id: str) -> Iterator[Callable[[], None]]:
    """Explain on stderr, within the block, why a job has no output yet.

    A delayed job is named at once; for any job a note follows once, `PATIENCE_S` after it is due: without it, a queue
    without a worker, a wrong id and a wrong queue would all look alike.

    Yields:
        A function to call when the job's first event has come; no note follows then.
    """

    def explain() -> None:
        job = _aside(client, lambda: read_job(client.redis, client.keys, job_id))
        note = None if job is None else _note(job, client.keys.queue)
        if note is not None:
            print(f"job {job_id}: {note}; waiting", file=sys.stderr)

    job = _aside(client, lambda: read_job(client.redis, client.keys, job_id))
    due_in_s = None if job is None else job.due_in_s
    if due_in_s is not None:
        print(f"job {job_id}: delayed, due in {due_in_s:.0f} s; waiting", file=sys.stderr)
    timer = threading.Timer(PATIENCE_S + (due_in_s or 0.0), explain)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _note(job: JobInfo, queue: str) -> str | None:
    """Return why a job has not started; None for a job that has."""
    match job.status:
        case JobStatus.UNKNOWN:
            return f"queue {queue} has no such job, or no worker has read it yet"
        case JobStatus.DELAYED if job.paused:
            return "the queue is paused"
        case JobStatus.DELAYED:
            return f"due now; a worker or the clerk of queue {queue} moves it into its lane"
        case JobStatus.QUEUED if job.paused:
            return "still queued; the queue is paused"
        case JobStatus.QUEUED:
            return f"still queued; `tokenmill info` shows the workers of queue {queue}"
    return None


def note_pause(client: Client, waits: str = "the job waits") -> None:
    """Say on stderr that the queue is paused, if it is, and what `waits` until it is resumed."""
    if _aside(client, lambda: paused(client.redis, client.keys)):
        print(f"queue {client.keys.queue} is paused: {waits} until the queue is resumed", file=sys.stderr)


def _aside(client: Client, question: Callable[[], T]) -> T | None:
    """Ask Redis once, for a note; return None if Redis does not answer: the command itself reports the outage."""
    with suppress(RedisError, TimeoutError):
        return client.patiently(question, Deadline.after("no answer", 0))
    return None
