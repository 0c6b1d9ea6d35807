"""The arguments and replies of the scripts as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.keys import Keys


class Ref(NamedTuple):
    """A job's place in the queue, which identifies it: (lane, entry)."""

    lane: str
    """`high`, `normal` or `low`."""
    entry: str
    id: str
    """The job's id; empty for an entry without a usable id."""

    @property
    def added_ms(self) -> int:
        """Time at which the entry was added, in ms of Redis' clock."""
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """Both parts of the entry's ID, by which entries of a lane are ordered."""
        ms, _, number = self.entry.partition("-")
        return int(ms), int(number or 0)


class Delivery(NamedTuple):
    """An entry as read from a lane."""

    lane: str
    entry: str
    fields: dict[bytes, bytes]
    again: bool = False
    """Whether a worker held the entry before and handed it back."""


class StartStatus(enum.StrEnum):
    """The outcome of START. All but OK, DUP and CAPPED have written nothing; DUP acknowledged and deleted the entry."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    SPENT = "SPENT"
    """The job was started `max_attempts` times; a suspect also had its start alone."""
    CAPPED = "CAPPED"
    """The tenant has `max_running_per_tenant` running jobs; the script has handed the entry back."""
    DUP = "DUP"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class Started:
    """The reply of START."""

    status: StartStatus
    fence: int
    attempt: int
    """Starts so far, including this one if OK."""
    deaths: int
    """Takeovers of this job while it was running."""
    now_ms: int
    """Redis' clock in ms."""
    reason: str = ""
    """Why the job was cancelled."""
    tries: int = 0
    """Starts that `max_attempts` limits: without those that were handed back through no fault of the job."""


class Ending(enum.StrEnum):
    """The reply of FINALISE."""

    OK = "OK"
    DUP = "DUP"
    """The id has a result, or another live entry; this entry was deleted. Nothing is left to do."""
    LOST = "LOST"
    """Another worker holds the entry."""
    GONE = "GONE"
    """The stream lacks events that were published: START again and end the job with the whole text."""


class CancelReply(enum.StrEnum):
    """The outcome of a cancel."""

    LATE = "LATE"
    """The job had ended before; nothing changed."""
    DONE = "DONE"
    """The job was queued or delayed, and has its `cancelled` result now."""
    ASKED = "ASKED"
    """The cancel key is set; the worker that runs the job, or will start it, polls that key."""


class TokenWrite(NamedTuple):
    """A token event that FINALISE is to publish. `token_ids` and `logprobs` are JSON, empty for none.

    `choice` is the event's field `index` (tuples have a method of that name).
    """

    n: int
    choice: int
    text: str
    tokens: int
    token_ids: str = ""
    logprobs: str = ""


class Why(enum.StrEnum):
    """The reason why Redis refused a token event."""

    REPEAT = "repeat"
    """The stream has the event: the caller has published it before."""
    LOST = "lost"
    """The stream has a higher fence or the final event: the job belongs to another worker, or has ended."""
    GONE = "gone"
    """The stream does not exist or has a gap: START again and republish the whole text."""
    ERROR = "error"


class Refused(NamedTuple):
    """A token event that was not appended. After any reason but REPEAT, later events of the stream are refused too."""

    job_id: str
    n: int
    why: Why
    last_id: str
    """The stream's last ID if known, or the server's error."""


class TokenBatch:
    """The token events of one engine step, of all sequences, as the flat lists that the script takes."""

    __slots__ = ("_at", "_events", "_extra", "_rich", "keys")

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._at: dict[str, int] = {}
        """Job id → number of its stream among KEYS, from 1."""
        self._events: list[Any] = []
        """Five values for each event: number of its stream, ID, choice, text, number of tokens."""
        self._extra: list[str] = []
        """Two values for each event: token ids and log-probabilities; empty while no event has any."""
        self._rich = False

    def add(
        self,
        job_id: str,
        fence: int,
        n: int,
        index: int,
        text: str,
        tokens: int,
        token_ids: str = "",
        logprobs: str = "",
    ) -> None:
        """Append event `<fence>-<n>` of a job; `n` counts up without gaps over all its choices.

        `token_ids` and `logprobs` are JSON, empty for none.
        """
        at = self._at.setdefault(job_id, len(self._at) + 1)
        self._events += (at, f"{fence}-{n}", index, text, tokens)
        if self._rich or token_ids or logprobs:
            self._enrich(token_ids, logprobs)

    def _enrich(self, token_ids: str, logprobs: str) -> None:
        """Begin to keep token ids and log-probabilities, which most batches do not have."""
        if not self._rich:
            self._rich, self._extra = True, [""] * (2 * len(self) - 2)
        self._extra += (token_ids, logprobs)

    def __len__(self) -> int:
        return len(self._events) // 5

    @property
    def args(self) -> list[bytes]:
        """The script's arguments: one or two JSON lists, which cost both sides less than many arguments."""
        events = orjson.dumps(self._events)
        return [events, orjson.dumps(self._extra)] if self._rich else [events]

    @property
    def streams(self) -> list[str]:
        return [self.keys.out(job_id) for job_id in self._at]

    def owner(self, number: int) -> tuple[str, int, int]:
        """Return job id, fence and n of the event with this number, from 0."""
        at, event_id = self._events[5 * number : 5 * number + 2]
        fence, _, n = event_id.partition("-")
        return list(self._at)[at - 1], int(fence), int(n)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter, written to `dead` beside the result."""

    code: ErrorCode
    reason: str
    attempts: int
    body: bytes = b""
    """Cut at 64 KiB when written."""


def classify(job_id: str, fence: int, n: int, why: str, last: str) -> Refused:
    """Find out by the stream's last ID whether a refused event means a lost job or a repeated write."""
    if why == "GONE":
        return Refused(job_id, n, Why.GONE, last)
    if why != "SMALL":
        return Refused(job_id, n, Why.ERROR, why)
    first, _, second = last.partition("-")
    if int(first) > fence:
        return Refused(job_id, n, Why.LOST, last)
    repeat = int(first) == fence and int(second) >= n
    return Refused(job_id, n, Why.REPEAT if repeat else Why.GONE, last)
