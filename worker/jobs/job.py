"""A job that this worker holds, in parts: each part is written by one thread, and any thread may read it."""

from __future__ import annotations

import enum
import itertools
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.outputs import TokenLogprobs
from tokenmill.protocol.job import Identity
from tokenmill.protocol.scripts import Ref


class Phase(enum.IntEnum):
    """State of a held job as the queue sees it; the engine has its own states for a sequence."""

    WAITING = 0
    """Read and not started: handing it back costs nothing."""
    STARTED = 1
    """START is under way or done: tokens may be computed for it."""


def new_nonce() -> str:
    """Return a random name for one START, so that Redis recognises a repeat of it."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar that a job's text must match, before it is compiled."""

    key: str
    """Key of the body that holds it, for messages."""
    kind: str
    """`json_object`, `json`, `regex`, `grammar` or `choice`."""
    spec: Any


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry as it was read from its lane. Made by the intake's thread, and never changed."""

    lane: str
    id: str
    """ID of the entry in its lane; the job's id is `identity.id`."""
    identity: Identity
    """The entry's fields that an ending needs, whatever else is wrong with the entry."""
    body: bytes = b""
    """The body as read; kept for a dead letter."""
    callback: str | None = None
    """URL for the webhook; None if the entry names no URL, or a URL that `--callback-hosts` does not allow."""

    @property
    def ref(self) -> Ref:
        return Ref(self.lane, self.id, self.identity.id)


@dataclass(slots=True)
class Options:
    """The options that entry and body set. Written by the intake's thread, before the engine gets the request."""

    ttl_ms: int | None = None
    max_attempts: int = 1
    """Number of starts after which the job is given up."""
    strict: bool = False
    """Whether the producer set `max_attempts`."""
    token_ids: bool = False
    """Whether events and result carry token ids."""
    structure: Structure | None = None
    clamped: dict[str, int] = field(default_factory=dict)
    """Key of the body → the value to which this worker reduced it."""
    prompt_tokens: int | None = None
    """Number of prompt tokens; None until the prompt is tokenised."""


@dataclass(frozen=True, slots=True)
class Start:
    """The reply of START. Replaced by the engine's thread, and by the publisher's if Redis lost the job's events."""

    attempt: int = 0
    tries: int = 0
    """Number of starts that count against `max_attempts`."""
    fence: int = 0
    """The fencing token of this run; 0 before the first START that succeeded."""
    at: float = 0.0
    """`time.monotonic()` of START's reply."""
    queued_ms: int | None = None
    """Time from the entry's ID to START."""

    def since_queued(self, moment: float) -> int | None:
        """Milliseconds from the entry's ID to a `time.monotonic()` moment; None before START."""
        return None if self.queued_ms is None else self.queued_ms + round((moment - self.at) * 1000)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The cancel of a job. Set by the canceller's thread, or from START's reply."""

    reason: str | None
    seen_at: float | None = None
    """`time.monotonic()` when the cancel key was first seen; None if START saw it."""


@dataclass(slots=True)
class Chunk:
    """Text of one choice on its way to Redis."""

    index: int
    parts: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each token id; None if the job does not ask for them."""
    n: int | None = None
    """Sequence number of its token event; None until it is sent for the first time, then fixed."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, text: str, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs] | None) -> None:
        """Append new text."""
        self.parts.append(text)
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs

    def join(self, other: Chunk) -> None:
        """Append a later chunk of the same choice."""
        self.parts += other.parts
        self.token_ids += other.token_ids
        if other.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += other.logprobs


@dataclass(slots=True)
class Outgoing:
    """The text that was computed for a job, and how much of it is in Redis. Written by the publisher's thread."""

    tokens: int = 0
    """Number of tokens generated so far, over all choices."""
    first_token_at: float | None = None
    """`time.monotonic()` when the first token was computed."""
    last_text_at: float | None = None
    """`time.monotonic()` when the latest text was computed."""
    over: bool = False
    """Whether everything is computed, so that only the result has still to be written."""
    ending: bool = False
    """Whether the result is being written right now: then an entry that is gone from Redis is no loss."""
    chunks: list[Chunk] = field(default_factory=list)
    """Chunks that Redis has not confirmed, oldest first."""
    next_n: int = 1
    """Sequence number of the next token event."""
    published: dict[int, Chunk] = field(default_factory=dict)
    """Choice → all of its text that Redis has confirmed, so that a lost stream can be written again."""

    def add_text(
        self, index: int, text: str, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs] | None = None
    ) -> None:
        """Keep new text of a choice for the next write: in its chunk that was never sent, or in a new chunk."""
        for chunk in self.chunks:
            if chunk.n is None and chunk.index == index:
                chunk.add(text, token_ids, logprobs)
                return
        self.chunks.append(Chunk(index, [text], [*token_ids], None if logprobs is None else [*logprobs]))

    def number_chunks(self) -> list[Chunk]:
        """Number the chunks that have no number yet, and return all of them in order."""
        for chunk in self.chunks:
            if chunk.n is None:
                chunk.n = self.next_n
                self.next_n += 1
        return self.chunks

    @property
    def confirmed(self) -> int:
        """The number of the last token event that Redis has confirmed, 0 for none."""
        return next((chunk.n for chunk in self.chunks if chunk.n is not None), self.next_n) - 1

    def confirm(self, below: int | None = None) -> None:
        """Note that Redis has all numbered chunks, or those numbered lower than `below`."""
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

    def write_again(self) -> None:
        """Treat all text as not yet sent, since the stream of the next fence is empty."""
        self.confirm()
        unsent, self.chunks = self.chunks, []
        for chunk in [*self.published.values(), *unsent]:
            self.add_text(chunk.index, chunk.text, chunk.token_ids, chunk.logprobs)
        self.published = {}
        self.next_n = 1


@dataclass(eq=False, slots=True)
class Job:
    """One entry of a lane that this worker holds."""

    entry: Entry
    options: Options = field(default_factory=Options)
    start: Start = field(default_factory=Start)
    outgoing: Outgoing = field(default_factory=Outgoing)
    cancellation: Cancellation | None = None

    phase: Phase = Phase.WAITING
    """Changed by `Held` alone, under its lock."""
    lease_until: float = 0.0
    """`time.monotonic()` until which the entry is surely ours: one lease after the last renewal was sent. Written by
    the intake's thread, then by the keeper's."""
    nonce: str = field(default_factory=new_nonce)
    """Name of the next START; kept until its reply has come. Written where `start` is."""
    starting: bool = False
    """Whether a START is under way, so that its outcome is unknown. Written by the engine's thread."""

    marked: bool = False
    """Whether Redis knows that this worker is reading the job. Written by the intake's thread."""
    suspect: bool = False
    """Whether the job runs alone, see `quarantine.py`. Written under the quarantine's lock."""
    excused: bool = False
    """Whether Redis knows that this worker was asked to end while the job runs. Written by the main thread and the
    keeper's."""

    taken_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when the entry was read."""
    stay: int = field(default_factory=itertools.count().__next__)
    """Number of this delivery, which differs from that of any other delivery of the same entry."""
    handle: str = field(init=False)
    """Key of this delivery, and the engine's request id. Not the job's id: two entries may carry the same one, and an
    entry may be lost and come back while the engine still frees the blocks of its first delivery."""

    def __post_init__(self) -> None:
        self.handle = f"{self.entry.lane}/{self.entry.id}/{self.stay}"

    @property
    def id(self) -> str:
        return self.entry.identity.id

    @property
    def ref(self) -> Ref:
        return self.entry.ref

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields by which a log event names this job."""
        return {"id": self.id, "lane": self.entry.lane, "entry": self.entry.id}

    def note_cancel(self, reason: str | None, seen_at: float | None = None) -> None:
        """Keep the reason of a cancel, and the first moment at which its key was seen."""
        before = self.cancellation
        self.cancellation = Cancellation(reason, (before and before.seen_at) or seen_at)

    @property
    def started(self) -> bool:
        """Whether a START of this worker succeeded."""
        return self.start.fence > 0

    @property
    def may_leave(self) -> bool:
        """Whether the job waits and may be handed back for a job of a higher lane."""
        return self.phase is Phase.WAITING and not (self.outgoing.over or self.suspect or self.marked)

    @property
    def computed(self) -> bool:
        """Whether tokens of the job are being computed: its START is done, and the job has not ended."""
        return self.phase is Phase.STARTED and not (self.starting or self.outgoing.over)
