"""Follow one job, without I/O: its events, its text, its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenmill.client.core import READ_COUNT, Emit, Get, Once, Presence, Read, Steps
from tokenmill.client.patience import Deadline
from tokenmill.protocol.errors import TokenmillError
from tokenmill.protocol.events import SEAL_ID, Event, FinalEvent, StartEvent, StreamReader, TokenEvent
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result

FIRST_COUNT = 4
"""Maximum number of entries of the first read of a job's events; further reads have up to twice as many each."""
READ_BYTES = 64 << 10
"""Size of the entries of one read that is aimed at: they wait in memory for a reader that takes them slowly."""
ENTRY_BYTES = 600
"""Memory of an entry beside its values: the objects that redis-py makes."""


class TextRestarted(TokenmillError):
    """A second worker restarted the job, and the new text differs from the text that was already yielded."""


def restarted() -> TextRestarted:
    """Return the error for a job whose second run differs from its first."""
    return TextRestarted("the job was restarted and its text differs; read job.stream() to follow it")


def stream_steps(
    keys: Keys, job_id: str, from_id: str, deadline: Deadline, block_ms: int, presence: Presence
) -> Steps[Event]:
    """Yield a job's events until the final event. If the stream has expired, make the final event from the result.

    Events that are already in the stream are yielded even if the deadline is over.

    Raises:
        JobLost: Redis had the job and no longer knows it.
        TimeoutError: no final event by the deadline.
    """
    reader, out = StreamReader(from_id), keys.out(job_id)
    block: int | None = None
    raw: bytes | None = None
    limit = FIRST_COUNT
    while True:
        replies = yield Read({out: reader.last_id}, block, deadline, limit)
        entries = replies[0][1] if replies else []
        if entries:
            limit = _next_limit(limit, [fields for _, fields in entries])
        presence.known.update([job_id] if entries else ())
        for event in reader.feed(entries):
            if isinstance(event, FinalEvent) and event.result is None:
                raw = (yield Get([keys.result(job_id)], deadline))[0]
                event = replace(event, result=Result.from_json(raw) if raw else None)
            yield Emit(event)
        if reader.done:
            return
        if raw is not None and not entries:
            result = Result.from_json(raw)
            yield Emit(FinalEvent(reader.last_id, result.status, result))
            return
        if raw is None and not entries:
            raw = (yield Get([keys.result(job_id)], deadline))[0]
            if raw is None:
                yield from presence.look([job_id], deadline)
        # Result and final event are written together: once the result is seen, the stream is complete.
        readable = raw is not None or (entries and not deadline.left)
        block = None if readable else deadline.block_ms(block_ms)


def _next_limit(limit: int, read: Sequence[Mapping[bytes, bytes]]) -> int:
    """Return how many entries to read after `read`, whose limit was `limit`, so that a read has about `READ_BYTES`."""
    size = ENTRY_BYTES * len(read) + sum(len(value) for fields in read for value in fields.values())
    return max(1, min(2 * limit, READ_COUNT, READ_BYTES * len(read) // size))


def check_event_id(text: str, name: str = "from_id") -> str:
    """Return `text` if it is the ID of an event or entry, or `0` for the beginning.

    Raises:
        ValueError: `text` is neither; the message starts with `name`.
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise ValueError(f"{name}: must be the id of an event such as 1-7, or 0 for the beginning, not {text[:64]!r}")
    return text


def result_steps(keys: Keys, job_id: str, deadline: Deadline, block_ms: int, presence: Presence) -> Once[Result]:
    """Wait for a job's result, without reading its token events.

    Raises:
        JobLost: Redis had the job and no longer knows it.
        TimeoutError: no result by the deadline.
    """
    out, last = keys.out(job_id), SEAL_ID
    while True:
        raw = (yield Get([keys.result(job_id)], deadline))[0]
        if raw is not None:
            return Result.from_json(raw)
        yield from presence.look([job_id], deadline)
        replies = yield Read({out: last}, deadline.block_ms(block_ms), deadline)
        if replies:
            last = replies[0][1][-1][0].decode()


class TextFollower:
    """Joins the text of one choice across restarts of the job.

    After a restart the new text is compared with the text that was returned before: if it is the same (greedy or seeded
    sampling), no text is returned twice.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.text = ""
        """All text that was returned so far."""
        self._fresh: str | None = None
        """After a restart: the new text, until it is as long as `text`; None otherwise."""

    def feed(self, event: Event) -> str:
        """Return the text that `event` adds, often the empty string.

        Raises:
            TextRestarted: the text of a new start differs from the text that was returned before, or is complete and
                shorter.
        """
        if isinstance(event, StartEvent):
            self._fresh = "" if self.text else None
            return ""
        if isinstance(event, TokenEvent):
            return self._add(event.text) if event.index == self.index else ""
        if event.result is None:
            return ""
        whole = next((choice.text for choice in event.result.choices if choice.index == self.index), "")
        if event.result.ok and len(whole) < len(self.text):  # the second run ended before what was returned
            self._fresh = whole
            raise restarted()
        if not whole:
            return ""
        self._fresh = ""
        return self._add(whole)

    def restart(self) -> str:
        """Drop the text that was returned before, after a `TextRestarted`; return the new text so far."""
        self.text, self._fresh = self._fresh or "", None
        return self.text

    def _add(self, text: str) -> str:
        if self._fresh is None:
            self.text += text
            return text
        self._fresh += text
        if self.text.startswith(self._fresh):
            if len(self._fresh) == len(self.text):
                self._fresh = None
            return ""
        if not self._fresh.startswith(self.text):
            raise restarted()
        new = self._fresh[len(self.text) :]
        self.text, self._fresh = self._fresh, None
        return new
