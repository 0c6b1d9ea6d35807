"""The starter's thread: the round trips of START, so that the engine's thread never waits for Redis."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from engine.request import Request
from tokenmill.protocol.scripts import Scripts, Started, StartOptions
from worker.jobs.job import Job
from worker.ops.links import Contact, passing

RETRY_SECONDS = 0.5
"""Pause after a START that did not reach Redis, before the next START is tried."""


@dataclass(eq=False, slots=True)
class Batch:
    """The jobs that one engine step planned to start, on their way to Redis and back."""

    jobs: list[tuple[Job, Request]]
    replies: list[Started] | None = None
    """One reply for each job; None if Redis could not be reached."""
    done: threading.Event = field(default_factory=threading.Event)
    taken: bool = False
    """Whether the gate has acted on the replies."""


class Starter:
    """Sends the STARTs of all batches that wait in one round trip. Its Redis client must not retry for long."""

    def __init__(self, scripts: Scripts, contact: Contact, on_done: Callable[[Batch], None]) -> None:
        """`on_done`: called on this thread for each batch that has its replies, or did not reach Redis."""
        self._scripts = scripts
        self._contact = contact
        self._on_done = on_done
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._under_way: set[Batch] = set()
        self.last_seconds = 0.0
        """Duration of the last round trip."""
        self._retry_at = 0.0
        """`time.monotonic()` until which no START is tried, since the last one did not reach Redis."""

    def submit(self, batch: Batch) -> bool:
        """Queue a batch; return whether no other batch is under way. Called on the engine's thread; never blocks."""
        alone = not self._under_way
        self._under_way.add(batch)
        self._queue.put(batch)
        return alone

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until all batches submitted so far have replies; called on the main thread."""
        deadline = time.monotonic() + seconds
        for batch in list(self._under_way):
            batch.done.wait(max(0.0, deadline - time.monotonic()))

    def run(self) -> None:
        """Make the round trips until `stop` is called."""
        while (batch := self._queue.get()) is not None:
            self._start([batch, *self._waiting()])

    def stop(self) -> None:
        """End `run` after the round trip under way."""
        self._queue.put(None)

    def turn(self) -> bool:
        """Make one round trip for all batches that wait; return False if no batch waits."""
        waiting = self._waiting()
        if waiting:
            self._start(waiting)
        return bool(waiting)

    def _waiting(self) -> list[Batch]:
        found = []
        while not self._queue.empty():
            batch = self._queue.get()
            if batch is None:
                self._queue.put(None)
                break
            found.append(batch)
        return found

    def _start(self, batches: list[Batch]) -> None:
        """Start all jobs of the batches; without a try if a START did not reach Redis a moment ago."""
        if time.monotonic() >= self._retry_at:
            self._call_redis(batches)
        for batch in batches:
            self._under_way.discard(batch)
            batch.done.set()
            self._on_done(batch)

    def _call_redis(self, batches: list[Batch]) -> None:
        began = time.monotonic()
        jobs = [job for batch in batches for job, _ in batch.jobs]
        try:
            replies = iter(self._scripts.start_all([(job.ref, job.entry.identity, _options(job)) for job in jobs]))
            for batch in batches:
                batch.replies = [next(replies) for _ in batch.jobs]
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("start", error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        self.last_seconds = time.monotonic() - began


def _options(job: Job) -> StartOptions:
    return {
        "prompt_tokens": job.options.prompt_tokens or 0,
        "ttl_ms": job.options.ttl_ms,
        "max_attempts": job.options.max_attempts,
        "alone": job.suspect,
        "strict": job.options.strict,
        "nonce": job.nonce,
    }
