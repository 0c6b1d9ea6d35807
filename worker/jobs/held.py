"""The jobs this worker holds: read from the queue, not yet ended. Every thread meets here, under one lock."""

from __future__ import annotations

import enum
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.outputs import TokenLogprobs
from tokenmill.protocol.job import Identity
from tokenmill.protocol.scripts import Ref


class Phase(enum.IntEnum):
    """How far a held job has come, seen from the queue; the engine has its own states."""

    WAITING = 0
    """Read, not started: it may be handed back at no cost."""
    STARTED = 1
    """START is under way or done: tokens may be computed for it."""


def new_nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a job's text must match, before it is compiled."""

    key: str
    """Of the body, for messages."""
    kind: str
    """`json_object`, `json`, `regex`, `grammar` or `choice`."""
    spec: Any


@dataclass(slots=True)
class Chunk:
    """Text of one choice on its way to Redis."""

    index: int
    parts: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One an id, where asked for."""
    n: int | None = None
    """Its place in the job's events; None until it is sent for the first time, and fixed from then on."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, text: str, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs] | None) -> None:
        """Append to it."""
        self.parts.append(text)
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs

    def join(self, other: Chunk) -> None:
        """Append another."""
        self.parts += other.parts
        self.token_ids += other.token_ids
        if other.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += other.logprobs


@dataclass(eq=False)
class Job:
    """One entry of a lane that this worker holds.

    `handle` keys it everywhere here and is the engine's request id: two entries may carry one job id, and an entry may
    be lost and come back while the engine still clears away its first stay.
    """

    lane: str
    """Name of the lane it came from."""
    entry: str
    """Its ID there."""
    who: Identity
    """What the producer said of it outside the body."""
    body: bytes = b""
    """Kept for a dead letter."""
    callback: str | None = None
    """Where its result is to be posted; None where it named no URL, or one that is not allowed."""
    ttl_ms: int | None = None
    max_attempts: int = 1
    strict: bool = False
    """Whether its producer named a cap on its starts."""
    marked: bool = False
    """Whether Redis knows that it is being read, see `blame.py`."""
    suspect: bool = False
    """Whether it runs alone, see `blame.py`."""
    stay: int = field(default_factory=itertools.count().__next__)
    """Tells one taking of an entry from the next."""
    taken_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` at which it was read."""
    lease_until: float = 0.0
    """`time.monotonic()` until which the entry is surely ours: one lease after the last renewal was sent."""

    # From the body.
    token_ids: bool = False
    """Whether events and result carry token ids."""
    structure: Structure | None = None
    clamped: dict[str, int] = field(default_factory=dict)
    """What was reduced, and to what."""
    prompt_tokens: int | None = None

    # From START on.
    phase: Phase = Phase.WAITING
    nonce: str = field(default_factory=new_nonce)
    """Of the next START; the same until its reply has come, so that a repeat is known as one."""
    fence: int = 0
    """Handed out by START; 0 before it."""
    attempt: int = 0
    tries: int = 0
    """Starts that count against `max_attempts`."""
    started_at: float = 0.0
    """`time.monotonic()` at START."""
    queued_ms: int | None = None
    """From the entry ID's time to START."""
    first_token_at: float | None = None
    """`time.monotonic()` when the first token was computed."""
    last_text_at: float | None = None
    """`time.monotonic()` of its latest piece of text."""
    cancel_reason: str | None = None
    cancel_seen_at: float | None = None
    """`time.monotonic()` when its cancel key was first seen."""
    starting: bool = False
    """Whether its START is under way: until the reply has come, nobody knows whether it runs."""
    excused: bool = False
    """Whether Redis knows that this worker was told to end while the job runs."""
    over: bool = False
    """Whether all of it is computed; only its end is still to be written."""
    ending: bool = False
    """Whether its end is being written right now: then it is no loss that Redis has the entry no more."""

    # Touched by the publisher alone.
    tokens: int = 0
    """Generated so far."""
    chunks: list[Chunk] = field(default_factory=list)
    """Not yet known to be in Redis."""
    next_n: int = 1
    published: dict[int, Chunk] = field(default_factory=dict)
    """For each choice all that Redis has confirmed, so that a lost stream can be written again."""

    @property
    def id(self) -> str:
        return self.who.id

    @property
    def ref(self) -> Ref:
        return Ref(self.lane, self.entry, self.who.id)

    handle: str = field(init=False)

    def __post_init__(self) -> None:
        self.handle = f"{self.lane}/{self.entry}/{self.stay}"

    @property
    def may_leave(self) -> bool:
        """Whether it only waits, and may do so elsewhere."""
        return self.phase is Phase.WAITING and not (self.over or self.suspect or self.marked)

    @property
    def computed(self) -> bool:
        """Whether tokens of it are computed: its START is done and its end has not come."""
        return self.phase is Phase.STARTED and not (self.starting or self.over)

    @property
    def started(self) -> bool:
        """Whether START gave it a fence."""
        return self.fence > 0

    def since_queued(self, moment: float) -> int | None:
        """Milliseconds from the entry ID's time to a `time.monotonic()` moment; None before START."""
        return None if self.queued_ms is None else self.queued_ms + round((moment - self.started_at) * 1000)

    def add_text(
        self, index: int, text: str, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs] | None = None
    ) -> None:
        """Keep new text of a choice for the next write; what was not sent yet grows."""
        for chunk in self.chunks:
            if chunk.n is None and chunk.index == index:
                chunk.add(text, token_ids, logprobs)
                return
        self.chunks.append(Chunk(index, [text], [*token_ids], None if logprobs is None else [*logprobs]))

    def number_chunks(self) -> list[Chunk]:
        """The chunks in order, each with its place."""
        for chunk in self.chunks:
            if chunk.n is None:
                chunk.n = self.next_n
                self.next_n += 1
        return self.chunks

    @property
    def confirmed(self) -> int:
        """The last n that Redis is known to have, 0 for none."""
        return next((chunk.n for chunk in self.chunks if chunk.n is not None), self.next_n) - 1

    def confirm(self, below: int | None = None) -> None:
        """Redis has all chunks that were numbered, or those under `below`."""
        chunks = self.chunks
        if below is None and chunks and chunks[-1].n is not None:
            sent, self.chunks = chunks, []
        else:
            sent = [c for c in chunks if c.n is not None and (below is None or c.n < below)]
            self.chunks = chunks[len(sent) :]
        published = self.published
        for chunk in sent:
            if chunk.index in published:
                published[chunk.index].join(chunk)
            else:
                published[chunk.index] = chunk

    def begin_again(self, fence: int, attempt: int) -> None:
        """Under a new fence, all text is still to be written."""
        self.confirm()
        unsent, self.chunks = self.chunks, []
        for chunk in [*self.published.values(), *unsent]:
            self.add_text(chunk.index, chunk.text, chunk.token_ids, chunk.logprobs)
        self.published = {}
        self.fence, self.attempt, self.next_n = fence, attempt, 1


class Held:
    """Thread-safe registry of held jobs. A job that is not in it any more is nobody's business here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._jobs: dict[str, Job] = {}
        self.get: Callable[[str], Job | None] = self._jobs.get
        """The job of a handle; one look at a dict needs no lock."""
        self._entries: set[tuple[str, str]] = set()
        self._waiting = 0

    def add(self, job: Job) -> None:
        """Take up a job that was just delivered.

        Raises:
            ValueError: its entry is held already.
        """
        with self._lock:
            if (job.lane, job.entry) in self._entries:
                raise ValueError(f"{job.lane} {job.entry} is held already")
            self._jobs[job.handle] = job
            self._entries.add((job.lane, job.entry))
            self._waiting += job.phase is Phase.WAITING

    def holds(self, lane: str, entry: str) -> bool:
        with self._lock:
            return (lane, entry) in self._entries

    def owns(self, job: Job) -> bool:
        return self.get(job.handle) is job

    def begin(self, handle: str) -> Job | None:
        """WAITING → STARTED; None when the job was handed back or lost meanwhile."""
        with self._lock:
            job = self._jobs.get(handle)
            if job is not None and job.phase is Phase.WAITING:
                job.phase = Phase.STARTED
                self._leave_waiting()
            return job

    def rest(self, job: Job) -> None:
        """STARTED → WAITING: its START did not reach Redis."""
        with self._lock:
            if job.handle in self._jobs and job.phase is Phase.STARTED:
                job.phase = Phase.WAITING
                self._waiting += 1

    def forget(self, handle: str) -> Job | None:
        """Let go of a job; the caller has written its end, handed it back or lost it."""
        with self._lock:
            job = self._jobs.get(handle)
            if job is not None:
                self._remove(job)
            return job

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Let go of all that `wanted` accepts, at once: nothing of them can be started in between."""
        with self._lock:
            taken = [job for job in self._jobs.values() if wanted(job)]
            for job in taken:
                self._remove(job)
            return taken

    def _remove(self, job: Job) -> None:
        del self._jobs[job.handle]
        self._entries.discard((job.lane, job.entry))
        if job.phase is Phase.WAITING:
            self._leave_waiting()

    def _leave_waiting(self) -> None:
        self._waiting -= 1
        self._room.notify_all()

    def all(self) -> list[Job]:
        """A snapshot, oldest delivery first."""
        with self._lock:
            return list(self._jobs.values())

    def wait_for_room(self, most: int, timeout: float) -> int:
        """How many more jobs may wait, `most` in all; sleeps up to `timeout` seconds while there is no room."""
        with self._room:
            self._room.wait_for(lambda: self._waiting < most, timeout)
            return max(0, most - self._waiting)

    @property
    def waiting(self) -> int:
        """Jobs not started."""
        return self._waiting

    def __len__(self) -> int:
        return len(self._jobs)
