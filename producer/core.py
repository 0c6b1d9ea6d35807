"""What both clients do, without I/O.

The waiting loops are generators: they yield what they want done (`Read`, `Get`, `Submit`) or have found (`Emit`), and
are sent the reply. `client.py` and `aio.py` only carry that out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from producer.protocol.body import encode_body
from producer.protocol.events import SEAL_ID, Event, FinalEvent, StartEvent, StreamReader, TokenEvent
from producer.protocol.job import JobEntry, parse_entry
from producer.protocol.keys import RESULT_TTL_S, Keys
from producer.protocol.result import Result

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""For `map`: text, token ids, chat messages, or keyword arguments of `submit`."""

BLOCK_MS = 5000
READ_COUNT = 512
RECONNECT_S = 30.0
"""How long a wait outlives a Redis that is away."""
WINDOW = 64


class TextRestarted(Exception):
    """Another worker began the job anew and its text differs from what was handed out already."""


class Read(NamedTuple):
    """XREAD: {stream: last ID}; `block_ms` None: don't wait. Reply: [(stream, entries)]."""

    streams: Mapping[str, str]
    block_ms: int | None


class Get(NamedTuple):
    """MGET. Reply: a list of bytes or None."""

    keys: Sequence[str]


class Submit(NamedTuple):
    """Submit with these arguments, waiting for room. Reply: the id."""

    arguments: dict[str, Any]


class Emit(NamedTuple, Generic[T]):
    """A value for the caller. No reply."""

    value: T


Steps = Generator[Read | Get | Submit | Emit[T], Any, None]


@dataclass(frozen=True)
class Deadline:
    """When a wait ends; without a time-out it ends when the job's result would have expired."""

    what: str
    timeout: float
    end: float

    @classmethod
    def after(cls, what: str, timeout: float | None) -> Deadline:
        seconds = float(RESULT_TTL_S) if timeout is None else timeout
        return cls(what, seconds, time.monotonic() + seconds)

    def block_ms(self, most: int) -> int:
        """How long the next read may block.

        Raises:
            TimeoutError: the time is up.
        """
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.what}: not finished within {self.timeout:g} s")
        return max(1, min(most, int(left * 1000) + 1))


def new_id() -> str:
    """128 random bits: whoever knows an id can read and cancel the job."""
    return secrets.token_hex(16)


def make_entry(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    params: Mapping[str, Any],
    *,
    id: str | None,
    ttl: float | None,
    group: str | None,
    tenant: str | None,
    stream: bool,
    callback: str | None,
    traceparent: str | None,
    max_attempts: int | None,
) -> JobEntry:
    """The entry of a job, checked by the worker's own rules.

    Raises:
        JobError: the worker would refuse it.
    """
    if prompt is not None and not isinstance(prompt, str):
        prompt = list(prompt)
    body = encode_body({"prompt": prompt, "messages": messages and [dict(m) for m in messages], **params})
    entry = JobEntry(
        id=new_id() if id is None else id,
        body=body,
        ttl_ms=None if ttl is None else round(ttl * 1000),
        stream=stream,
        group=group,
        tenant=tenant,
        traceparent=traceparent,
        callback=callback,
        max_attempts=max_attempts,
    )
    fields = entry.fields().items()
    return parse_entry({name.encode(): _bytes(value) for name, value in fields})


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "replace")


def map_arguments(prompt: Prompt) -> dict[str, Any]:
    """What one item of `map` means to `submit`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": prompt}
    return {"prompt": prompt}


def backoff() -> Generator[float, None, None]:
    """Seconds to wait between tries: doubling up to one."""
    pause = 0.02
    while True:
        yield pause
        pause = min(1.0, pause * 2)


def stream_steps(keys: Keys, job_id: str, from_id: str, deadline: Deadline, block_ms: int) -> Steps[Event]:
    """Follow a job's events until `final`. Where the stream has expired, the result key stands in for it."""
    reader, out = StreamReader(from_id), keys.out(job_id)
    block: int | None = None
    raw: bytes | None = None
    while True:
        replies = yield Read({out: reader.last_id}, block)
        entries = replies[0][1] if replies else []
        for event in reader.feed(entries):
            if isinstance(event, FinalEvent) and event.result is None:
                raw = (yield Get([keys.result(job_id)]))[0]
                event = replace(event, result=Result.from_json(raw) if raw else None)
            yield Emit(event)
        if reader.done:
            return
        if raw is not None and not entries:
            result = Result.from_json(raw)
            yield Emit(FinalEvent(reader.last_id, result.status, result))
            return
        if raw is None and not entries:
            raw = (yield Get([keys.result(job_id)]))[0]
        # Result and final event are written at once: with the result seen, the rest of the stream is there to be read.
        block = None if raw is not None else deadline.block_ms(block_ms)


def check_event_id(text: str) -> str:
    """The ID of an event, or `0` for the beginning.

    Raises:
        ValueError: it is neither.
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise ValueError(f"from_id: must be the id of an event such as 1-7, or 0 for the beginning, not {text[:64]!r}")
    return text


def result_steps(keys: Keys, job_id: str, deadline: Deadline, block_ms: int) -> Steps[Result]:
    """Wait for a job's result without reading its tokens."""
    out, last = keys.out(job_id), SEAL_ID
    while True:
        raw = (yield Get([keys.result(job_id)]))[0]
        if raw is not None:
            yield Emit(Result.from_json(raw))
            return
        replies = yield Read({out: last}, deadline.block_ms(block_ms))
        if replies:
            last = replies[0][1][-1][0].decode()


class Window:
    """`map`: keeps at most `window` jobs unfinished, and hands results out in order or as they come.

    In order, a slow job holds back the results behind it; no more than four windows of them are kept.
    """

    def __init__(
        self, keys: Keys, prompts: Iterable[Prompt], window: int, ordered: bool, timeout: float | None, block_ms: int
    ) -> None:
        if window < 1:
            raise ValueError("window: must be at least 1")
        self.keys, self.ordered, self.window, self.timeout, self.block_ms = keys, ordered, window, timeout, block_ms
        self.items = enumerate(prompts)
        self.pending: dict[str, int] = {}
        """Ids of unfinished jobs, with their place."""
        self._last: dict[str, str] = {}
        self._ready: dict[int, Result] = {}
        self._handed = 0

    def steps(self) -> Steps[Result]:
        """Raises TimeoutError when no job finished for `timeout` seconds."""
        item = next(self.items, None)
        deadline = Deadline.after("map", self.timeout)
        while item is not None or self.pending:
            while item is not None and self._room():
                place, prompt = item
                job_id = yield Submit(map_arguments(prompt))
                self.pending[job_id] = place
                self._last[job_id] = SEAL_ID
                item = next(self.items, None)
            ids = list(self.pending)
            replies = yield Get([self.keys.result(job_id) for job_id in ids])
            done = [(job_id, raw) for job_id, raw in zip(ids, replies, strict=True) if raw is not None]
            for job_id, raw in done:
                yield from self._take(job_id, Result.from_json(raw))
            if done:
                deadline = Deadline.after("map", self.timeout)
                continue
            streams = {self.keys.out(job_id): self._last[job_id] for job_id in ids}
            read = yield Read(streams, deadline.block_ms(self.block_ms))
            by_stream = {self.keys.out(job_id): job_id for job_id in ids}
            for stream, entries in read or ():
                self._last[by_stream[stream.decode()]] = entries[-1][0].decode()

    def _room(self) -> bool:
        held = len(self._ready) + len(self.pending)
        return len(self.pending) < self.window and (not self.ordered or held < 4 * self.window)

    def _take(self, job_id: str, result: Result) -> Generator[Emit[Result], None, None]:
        place = self.pending.pop(job_id)
        del self._last[job_id]
        if not self.ordered:
            yield Emit(result)
            return
        self._ready[place] = result
        while self._handed in self._ready:
            yield Emit(self._ready.pop(self._handed))
            self._handed += 1


class TextFollower:
    """Joins the text of one choice over restarts.

    After a restart the new text is compared with what was handed out: where it is the same (greedy, seeded), nothing is
    repeated.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.text = ""
        """What was handed out so far."""
        self._fresh: str | None = None
        """Since a restart: the new text, until it has caught up."""

    def feed(self, event: Event) -> str:
        """The text that `event` adds, often empty.

        Raises:
            TextRestarted: the text of a new start differs from what was handed out.
        """
        if isinstance(event, StartEvent):
            self._fresh = "" if self.text else None
            return ""
        if isinstance(event, TokenEvent):
            return self._add(event.text) if event.index == self.index else ""
        choices = event.result.choices if event.result else ()
        whole = next((choice.text for choice in choices if choice.index == self.index), "")
        if not whole:
            return ""
        self._fresh = ""
        return self._add(whole)

    def restart(self) -> str:
        """After TextRestarted: forget what was handed out and return the new text so far."""
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
            raise TextRestarted("the job was begun anew and its text differs; read job.stream() to follow that")
        new = self._fresh[len(self.text) :]
        self.text, self._fresh = self._fresh, None
        return new
