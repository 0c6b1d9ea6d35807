"""What goes into the scripts and comes out of them, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.keys import Keys


class Ref(NamedTuple):
    """Where a job is: its identity in the queue is (lane, entry)."""

    lane: str
    """`high`, `normal` or `low`."""
    entry: str
    id: str
    """The job's id, or empty for an entry without a usable one."""

    @property
    def added_ms(self) -> int:
        """When the entry was added, ms of Redis' clock."""
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """Both parts of the entry's ID: its place in the order of its lane."""
        ms, _, number = self.entry.partition("-")
        return int(ms), int(number or 0)


class Delivery(NamedTuple):
    """An entry as read from a lane."""

    lane: str
    entry: str
    fields: dict[bytes, bytes]
    again: bool = False
    """Whether somebody held it before and handed it back."""


class StartStatus(enum.StrEnum):
    """What became of a START; all but OK have written nothing (DUP acked and deleted the entry)."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    SPENT = "SPENT"
    """It was started `max_attempts` times already, and has had its start alone if it is a suspect."""
    CAPPED = "CAPPED"
    """Its tenant has as many running jobs as it may; the entry is handed back already."""
    DUP = "DUP"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class Started:
    """The reply of START."""

    status: StartStatus
    fence: int
    attempt: int
    """Starts so far, this one included if OK."""
    deaths: int
    """Takeovers of this job while it was running."""
    now_ms: int
    """Redis' clock."""
    reason: str = ""
    """Of a cancel."""
    tries: int = 0
    """Starts that `max_attempts` counts: all but those that were handed back politely."""


class Ending(enum.StrEnum):
    """The reply of FINALISE and ANSWER."""

    OK = "OK"
    DUP = "DUP"
    """The id has its result, or another entry is live; this entry is gone. Nothing more to do."""
    LOST = "LOST"
    """Another worker holds the entry."""
    GONE = "GONE"
    """The stream lacks what was published: START again and finalise with the whole text."""


class CancelReply(enum.StrEnum):
    """What became of a cancel."""

    LATE = "LATE"
    """The job had ended; nothing changed."""
    DONE = "DONE"
    """It was queued or delayed and has its `cancelled` result now."""
    ASKED = "ASKED"
    """The key is set; who runs the job will see it."""


class TokenWrite(NamedTuple):
    """One token event still to be published by FINALISE. `token_ids` and `logprobs` are JSON, empty for none.

    `choice` is the event's `index` (a tuple has a method of that name).
    """

    n: int
    choice: int
    text: str
    tokens: int
    token_ids: str = ""
    logprobs: str = ""


class Why(enum.StrEnum):
    """Why Redis refused a token event."""

    REPEAT = "repeat"
    """It is there already: one's own retry."""
    LOST = "lost"
    """A higher fence, or the end, is in the stream."""
    GONE = "gone"
    """No such stream, or a gap in it: START again and republish the whole text."""
    ERROR = "error"


class Refused(NamedTuple):
    """A token event that was not appended; after all but REPEAT its stream's later events are refused too."""

    job_id: str
    n: int
    why: Why
    last_id: str
    """The stream's last ID where known, or the server's error."""


class TokenBatch:
    """The token events of one engine step, over all sequences, flat as the script wants them."""

    __slots__ = ("_at", "_events", "_extra", "_rich", "keys")

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._at: dict[str, int] = {}
        """Each job's place among the streams, from 1."""
        self._events: list[Any] = []
        """Five an event: place of its stream, ID, choice, text, number of tokens."""
        self._extra: list[str] = []
        """Two an event: token ids and log-probabilities."""
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
        """Most batches have neither, and then no places for them: arguments cost."""
        if not self._rich:
            self._rich, self._extra = True, [""] * (2 * len(self) - 2)
        self._extra += (token_ids, logprobs)

    def __len__(self) -> int:
        return len(self._events) // 5

    @property
    def args(self) -> list[bytes]:
        """The script's arguments: one JSON list of many values costs both sides less than as many arguments."""
        events = orjson.dumps(self._events)
        return [events, orjson.dumps(self._extra)] if self._rich else [events]

    @property
    def streams(self) -> list[str]:
        return [self.keys.out(job_id) for job_id in self._at]

    def owner(self, number: int) -> tuple[str, int, int]:
        """Job, fence and n of an event."""
        at, event_id = self._events[5 * number : 5 * number + 2]
        fence, _, n = event_id.partition("-")
        return list(self._at)[at - 1], int(fence), int(n)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What goes to `dead` beside the result."""

    code: ErrorCode
    reason: str
    attempts: int
    body: bytes = b""
    """Cut to 64 KiB when written."""


def classify(job_id: str, fence: int, n: int, why: str, last: str) -> Refused:
    """Tell a lost job from one's own retry, by the stream's last ID."""
    if why == "GONE":
        return Refused(job_id, n, Why.GONE, last)
    if why != "SMALL":
        return Refused(job_id, n, Why.ERROR, why)
    first, _, second = last.partition("-")
    if int(first) > fence:
        return Refused(job_id, n, Why.LOST, last)
    repeat = int(first) == fence and int(second) >= n
    return Refused(job_id, n, Why.REPEAT if repeat else Why.GONE, last)
