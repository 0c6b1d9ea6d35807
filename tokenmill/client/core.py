"""What both clients do, without I/O.

The waiting loops are generators: they yield what they want done (`Read`, `Get`, `Submit`) or have found (`Emit`), and
are sent the reply. `client.py` and `aio.py` only carry that out.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from tokenmill.client.patience import OUTAGE_S, Deadline
from tokenmill.protocol.body import encode_body
from tokenmill.protocol.calls import QueueFull, QuotaExceeded, enqueue_reply
from tokenmill.protocol.events import SEAL_ID, Event, FinalEvent, StartEvent, StreamReader, TokenEvent
from tokenmill.protocol.job import JobEntry, milliseconds, parse_entry
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""For `map`: text, token ids, chat messages, or keyword arguments of `submit`."""

BLOCK_MS = 5000
READ_COUNT = 512
FULL_MS = 1000
"""While the queue has no room for `map`'s next job, its running ones are waited for so long at a time."""
CLEAN_UP_S = 5.0
"""For cancelling what a `map` that is left early has unfinished."""
WINDOW = 64


class TextRestarted(Exception):
    """Another worker began the job anew and its text differs from what was handed out already."""


class JobLost(Exception):
    """Redis had a job and knows nothing more of it: it came back empty, was flushed, or the result expired unread."""

    def __init__(self, job_id: str, queue: str) -> None:
        self.job_id = job_id
        super().__init__(
            f"job {job_id} is gone from queue {queue}: Redis has lost its data, or the job's result has expired; "
            "submit it again"
        )


class Read(NamedTuple):
    """XREAD: {stream: last ID}; `block_ms` None: don't wait. Reply: [(stream, entries)]."""

    streams: Mapping[str, str]
    block_ms: int | None
    deadline: Deadline


class Get(NamedTuple):
    """MGET. Reply: a list of bytes or None."""

    keys: Sequence[str]
    deadline: Deadline


class Exist(NamedTuple):
    """EXISTS for each group of keys. Reply: for each whether one of its keys is there, or may be."""

    groups: Sequence[Sequence[str]]
    deadline: Deadline


class Submit(NamedTuple):
    """Add a job. Reply: None, or why there is no room; with `wait` room is waited for until the deadline."""

    entry: JobEntry
    priority: str
    delay: float | None
    wait: bool
    deadline: Deadline
    outage_s: float = OUTAGE_S


class Emit(NamedTuple, Generic[T]):
    """A value for the caller. No reply."""

    value: T


Full = QueueFull | QuotaExceeded
Steps = Generator[Read | Get | Exist | Submit | Emit[T], Any, None]


class Presence:
    """Which jobs Redis has had, so that one that is gone is not waited for. A job that never was may still come."""

    def __init__(self, keys: Keys, *known: str) -> None:
        self._keys = keys
        self.known = set(known)

    def look(self, ids: Sequence[str], deadline: Deadline) -> Generator[Exist, Sequence[bool], None]:
        """Look for jobs of which nothing is heard.

        Raises:
            JobLost: one was there, and is no more.
        """
        keys = self._keys
        groups = [(keys.job(one), keys.out(one), keys.result(one), keys.delayed_job(one)) for one in ids]
        found = yield Exist(groups, deadline)
        for job_id, there in zip(ids, found, strict=True):
            if there:
                self.known.add(job_id)
            elif job_id in self.known:
                raise JobLost(job_id, keys.queue)


def new_id() -> str:
    """128 random bits: whoever knows an id can read and cancel the job."""
    return secrets.token_hex(16)


def make_entry(
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    *,
    id: str | None = None,
    ttl: float | None = None,
    group: str | None = None,
    tenant: str | None = None,
    stream: bool = True,
    callback: str | None = None,
    traceparent: str | None = None,
    max_attempts: int | None = None,
    **params: Any,
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
        ttl_ms=None if ttl is None else milliseconds("ttl", ttl),
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


def no_room(reply: Any, entry: JobEntry) -> Full | None:
    """What ENQUEUE says of an entry: None where it was taken.

    Raises:
        JobExists: the id is in use.
    """
    try:
        enqueue_reply(reply, entry)
    except (QueueFull, QuotaExceeded) as full:
        return full
    return None


def map_arguments(prompt: Prompt) -> dict[str, Any]:
    """What one item of `map` means to `submit`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": prompt}
    return {"prompt": prompt}


def stream_steps(
    keys: Keys, job_id: str, from_id: str, deadline: Deadline, block_ms: int, presence: Presence
) -> Steps[Event]:
    """Follow a job's events until `final`. Where the stream has expired, the result key stands in for it.

    What is there already is handed out when the time is up, too.

    Raises:
        JobLost: it was there, and is no more.
    """
    reader, out = StreamReader(from_id), keys.out(job_id)
    block: int | None = None
    raw: bytes | None = None
    while True:
        replies = yield Read({out: reader.last_id}, block, deadline)
        entries = replies[0][1] if replies else []
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
        # Result and final event are written at once: with the result seen, the rest of the stream is there to be read.
        there = raw is not None or (entries and not deadline.left)
        block = None if there else deadline.block_ms(block_ms)


def check_event_id(text: str) -> str:
    """The ID of an event, or `0` for the beginning.

    Raises:
        ValueError: it is neither.
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise ValueError(f"from_id: must be the id of an event such as 1-7, or 0 for the beginning, not {text[:64]!r}")
    return text


def result_steps(keys: Keys, job_id: str, deadline: Deadline, block_ms: int, presence: Presence) -> Steps[Result]:
    """Wait for a job's result without reading its tokens.

    Raises:
        JobLost: it was there, and is no more.
    """
    out, last = keys.out(job_id), SEAL_ID
    while True:
        raw = (yield Get([keys.result(job_id)], deadline))[0]
        if raw is not None:
            yield Emit(Result.from_json(raw))
            return
        yield from presence.look([job_id], deadline)
        replies = yield Read({out: last}, deadline.block_ms(block_ms), deadline)
        if replies:
            last = replies[0][1][-1][0].decode()


class Window:
    """`map`: keeps at most `window` jobs unfinished, and hands results out in order or as they come.

    In order, a slow job holds back the results behind it; no more than four windows of them are kept.
    """

    def __init__(
        self,
        keys: Keys,
        prompts: Iterable[Prompt],
        defaults: Mapping[str, Any],
        *,
        window: int,
        ordered: bool,
        timeout: float | None,
        block_ms: int,
    ) -> None:
        """`defaults`: arguments of `submit` that a prompt's own go before."""
        if window < 1:
            raise ValueError("window: must be at least 1")
        self.keys, self.ordered, self.window, self.timeout, self.block_ms = keys, ordered, window, timeout, block_ms
        self.defaults = {"stream": False, **defaults}
        self.items = enumerate(prompts)
        self.pending: dict[str, int] = {}
        """Ids of unfinished jobs, with their place."""
        self._last: dict[str, str] = {}
        self._ready: dict[int, Result] = {}
        self._handed = 0

    def steps(self) -> Steps[Result]:
        """Yield results until all prompts have theirs.

        Raises:
            TimeoutError: for `timeout` seconds no job finished and none was taken by the queue.
            JobLost: one was there, and is no more.
        """
        item = next(self.items, None)
        deadline = self._deadline()
        while item is not None or self.pending:
            full: Full | None = None
            while item is not None and full is None and self._room():
                place, prompt = item
                submit, patient = self._submit(prompt, deadline)
                full = yield submit
                if full is None:
                    self.pending[submit.entry.id] = place
                    self._last[submit.entry.id] = SEAL_ID
                    item = next(self.items, None)
                    deadline = self._deadline()
                elif not patient:
                    raise full
            ids = list(self.pending)
            replies = yield Get([self.keys.result(job_id) for job_id in ids], deadline)
            done = [(job_id, raw) for job_id, raw in zip(ids, replies, strict=True) if raw is not None]
            for job_id, raw in done:
                yield from self._take(job_id, Result.from_json(raw))
            if done:
                deadline = self._deadline()
                continue
            streams = {self.keys.out(job_id): self._last[job_id] for job_id in ids}
            block_ms = deadline.block_ms(min(self.block_ms, FULL_MS) if full else self.block_ms)
            read = yield Read(streams, block_ms, deadline)
            if not read:
                yield from Presence(self.keys, *ids).look(ids, deadline)
            by_stream = {self.keys.out(job_id): job_id for job_id in ids}
            for stream, entries in read or ():
                self._last[by_stream[stream.decode()]] = entries[-1][0].decode()

    def _submit(self, prompt: Prompt, deadline: Deadline) -> tuple[Submit, bool]:
        """The step, and whether a lack of room is to be waited for. While jobs run it is they who are waited for."""
        arguments = {**self.defaults, **map_arguments(prompt)}
        priority, delay = arguments.pop("priority", "normal"), arguments.pop("delay", None)
        patient = arguments.pop("wait", True)
        return Submit(make_entry(**arguments), priority, delay, patient and not self.pending, deadline), patient

    def _deadline(self) -> Deadline:
        return Deadline.after("map: no job finished", self.timeout)

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
