"""The jobs this worker holds: read from the queue, not yet ended. Every thread meets here, under one lock."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


class Phase(enum.IntEnum):
    """How far a held job has come, seen from the queue; the engine has its own states."""

    WAITING = 0
    """Read, not started: it may be handed back at no cost."""
    STARTED = 1
    """START is under way or done: tokens may be computed for it."""


@dataclass(slots=True)
class Chunk:
    """Text of one choice on its way to Redis; `n` is its place in the job's events, None while it has none."""

    index: int
    text: str
    token_ids: list[int]
    n: int | None = None


@dataclass(eq=False)
class Job:
    """One entry of a lane that this worker holds.

    `handle` keys it everywhere here and is the engine's request id: two entries may carry one job id, and Redis
    alone decides which of them lives.
    """

    lane: str
    """Key of the stream it came from."""
    entry: str
    """Its ID there."""
    id: str
    """The producer's name for it."""
    stream: bool = True
    """Whether it wants token events."""
    token_ids: bool = False
    """Whether events and result carry token ids."""
    traceparent: str | None = None
    max_attempts: int = 1
    clamped: dict[str, int] = field(default_factory=dict)
    """What was reduced, and to what."""
    prompt_tokens: int | None = None
    lease_until: float = 0.0
    """`time.monotonic()` until which the entry is surely ours: one lease after the last renewal was sent."""

    phase: Phase = Phase.WAITING
    fence: int = 0
    """Handed out by START; 0 before it."""
    attempt: int = 0
    started_at: float = 0.0
    """`time.monotonic()` at START."""
    queued_ms: int | None = None
    """From the entry ID's time to START."""
    first_token_at: float | None = None
    """`time.monotonic()` when the first token was computed."""
    cancel_reason: str | None = None

    # Touched by the publisher alone.
    chunks: list[Chunk] = field(default_factory=list)
    """Not yet known to be in Redis; those with an `n` were sent at least once, and are resent as they were."""
    next_n: int = 1
    published: dict[int, Chunk] = field(default_factory=dict)
    """For each choice all that Redis has confirmed, so that a lost stream can be written again."""

    @property
    def handle(self) -> str:
        return f"{self.lane}/{self.entry}"

    @property
    def entry_ms(self) -> int:
        """When it was enqueued, by Redis' clock."""
        return int(self.entry.partition("-")[0])

    @property
    def started(self) -> bool:
        """Whether START gave it a fence."""
        return self.fence > 0

    def since_queued(self, moment: float) -> int | None:
        """Milliseconds from the entry ID's time to a `time.monotonic()` moment; None before START."""
        return None if self.queued_ms is None else self.queued_ms + round((moment - self.started_at) * 1000)


class Held:
    """Thread-safe registry of held jobs. A job that is not in it any more is nobody's business here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._waiting = 0

    def add(self, job: Job) -> None:
        """Take up a job that was just delivered.

        Raises:
            ValueError: the entry is held already.
        """
        with self._lock:
            if job.handle in self._jobs:
                raise ValueError(f"{job.handle} is held already")
            self._jobs[job.handle] = job
            self._waiting += job.phase is Phase.WAITING

    def get(self, handle: str) -> Job | None:
        with self._lock:
            return self._jobs.get(handle)

    def owns(self, job: Job) -> bool:
        with self._lock:
            return self._jobs.get(job.handle) is job

    def begin(self, handle: str) -> Job | None:
        """WAITING → STARTED; None when the job was handed back or lost meanwhile."""
        with self._lock:
            job = self._jobs.get(handle)
            if job is not None and job.phase is Phase.WAITING:
                job.phase = Phase.STARTED
                self._waiting -= 1
            return job

    def rest(self, job: Job) -> None:
        """STARTED → WAITING: its START did not reach Redis."""
        with self._lock:
            if self._jobs.get(job.handle) is job and job.phase is Phase.STARTED:
                job.phase = Phase.WAITING
                self._waiting += 1

    def forget(self, handle: str) -> Job | None:
        """Let go of a job; the caller has written its end, handed it back or lost it."""
        with self._lock:
            job = self._jobs.pop(handle, None)
            if job is not None and job.phase is Phase.WAITING:
                self._waiting -= 1
            return job

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Let go of all that `wanted` accepts, at once: nothing of them can be started in between."""
        with self._lock:
            taken = [job for job in self._jobs.values() if wanted(job)]
            for job in taken:
                del self._jobs[job.handle]
                self._waiting -= job.phase is Phase.WAITING
            return taken

    def renewed(self, jobs: Iterable[Job], until: float) -> None:
        """The leases of `jobs` were renewed."""
        for job in jobs:
            job.lease_until = max(job.lease_until, until)

    def all(self) -> list[Job]:
        """A snapshot, oldest delivery first."""
        with self._lock:
            return list(self._jobs.values())

    @property
    def waiting(self) -> int:
        """Jobs not started."""
        return self._waiting

    def __len__(self) -> int:
        return len(self._jobs)


class RedisClock:
    """Redis' clock seen from here: `time.monotonic()` plus an offset, so that no two hosts' clocks are compared."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def sync(self, seconds: int, micros: int, sent: float, received: float) -> None:
        """Take in a reply of TIME, with the `time.monotonic()` moments around it."""
        self._offset = seconds + micros / 1e6 - (sent + received) / 2

    def deadline(self, entry_ms: int, ttl_ms: int) -> float:
        """The `time.monotonic()` moment at which a budget counted from an entry ID runs out."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return (entry_ms + ttl_ms) / 1000 - self._offset

    def now_ms(self) -> int:
        """Redis' time, in ms since the epoch."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return round((time.monotonic() + self._offset) * 1000)


class Contact:
    """Since when Redis has answered without a break; None while it does not."""

    def __init__(self) -> None:
        self._since: float | None = None

    def ok(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def lost(self) -> None:
        self._since = None

    def lasted(self) -> float:
        """Seconds of uninterrupted contact."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
