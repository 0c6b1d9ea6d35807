"""What both clients do, without I/O.

Every method is a generator: it yields steps for Redis (`Read`, `Get`, `Exist`, `Ask`, `Run`, `Pause`), is sent the
reply of each, and yields values for the caller as `Emit` or returns one. `sync.py` and `aio.py` carry the steps out.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tokenmill.client.patience import AT_ONCE_S, BRIEF_S, OUTAGE_S, Deadline, backoff
from tokenmill.protocol.body import encode_body
from tokenmill.protocol.calls import (
    Call,
    EnqueueRefused,
    QueueFull,
    QuotaExceeded,
    cancel_call,
    cancel_reply,
    enqueue_call,
    enqueue_reply,
)
from tokenmill.protocol.errors import ErrorCode, JobError, TokenmillError
from tokenmill.protocol.events import SEAL_ID, Event, FinalEvent, StartEvent, StreamReader, TokenEvent
from tokenmill.protocol.job import JobEntry, milliseconds, parse_entry
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import ErrorInfo, Result, Status
from tokenmill.protocol.state import state_of

T = TypeVar("T")
R = TypeVar("R", bound=Result)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""For `map`: text, token ids, chat messages, or keyword arguments of `submit`."""

BLOCK_MS = 5000
READ_COUNT = 512
FULL_MS = 1000
"""While the queue has no room for `map`'s next job, its running ones are waited for so long at a time."""
CLEAN_UP_S = 5.0
"""For cancelling what a `map` that is left early has unfinished."""
WINDOW = 64


class TextRestarted(TokenmillError):
    """Another worker restarted the job, and the new text differs from the text that was already yielded."""


class JobLost(TokenmillError):
    """Redis had a job and no longer knows it: Redis lost its data, was flushed, or the result expired unread.

    Attributes:
        job_id: the job's id.
    """

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
    deadline: Deadline | None


class Get(NamedTuple):
    """MGET. Reply: a list of bytes or None."""

    keys: Sequence[str]
    deadline: Deadline


class Exist(NamedTuple):
    """EXISTS for each group of keys. Reply: for each whether one of its keys is there, or may be."""

    groups: Sequence[Sequence[str]]
    deadline: Deadline


class Ask(NamedTuple):
    """Commands in one round trip, as MULTI where `atomic`. Reply: the list of their replies."""

    commands: Sequence[tuple[Any, ...]]
    deadline: Deadline | None = None
    outage_s: float = OUTAGE_S
    atomic: bool = False


class Run(NamedTuple):
    """Script calls in one round trip; each may be repeated. Reply: the list of their replies."""

    calls: Sequence[Call]
    deadline: Deadline | None = None
    outage_s: float = OUTAGE_S


class Pause(NamedTuple):
    """Wait. No reply."""

    seconds: float


class Submit(NamedTuple):
    """A checked job for `submit_steps`; with `wait` the queue's lack of room is waited for until the deadline."""

    entry: JobEntry
    call: Call
    wait: bool
    deadline: Deadline
    outage_s: float = OUTAGE_S


class Emit(NamedTuple, Generic[T]):
    """A value for the caller. No reply."""

    value: T


Full = QueueFull | QuotaExceeded
Step = Read | Get | Exist | Ask | Run | Pause
Steps = Generator[Step | Emit[T], Any, None]
"""The steps of a method that yields values."""
Once = Generator[Step, Any, T]
"""The steps of a method that returns a value."""


@dataclass(frozen=True, slots=True)
class MapResult(Result):
    """The result of one prompt of `map`."""

    index: int = 0
    """The prompt's position, counted from 0."""
    prompt: Any = None
    """The prompt as `map` was given it."""


def extended(kind: type[R], result: Result, **more: Any) -> R:
    """Return `result` as `kind`, a subclass of `Result` with the fields `more`."""
    return kind(**{one.name: getattr(result, one.name) for one in fields(Result)}, **more)


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
    """Build the entry of a job and check it by the worker's own rules.

    Raises:
        JobError: a worker would refuse the job.
    """
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise JobError(ErrorCode.INVALID_REQUEST, "prompt: must be a string or a list of token ids, not bytes")
    try:
        prompt = prompt if prompt is None or isinstance(prompt, str) else list(prompt)
    except TypeError:
        raise JobError(ErrorCode.INVALID_REQUEST, "prompt: must be a string or a list of token ids") from None
    try:
        messages = messages and [dict(message) for message in messages]
    except (TypeError, ValueError):
        raise JobError(ErrorCode.INVALID_REQUEST, "messages: must be a list of messages, each an object") from None
    body = encode_body({"prompt": prompt, "messages": messages, **params})
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


def make_submit(
    keys: Keys,
    prompt: str | Sequence[int] | None,
    priority: str,
    delay: float | None,
    wait: bool,
    timeout: float | None,
    **options: Any,
) -> Submit:
    """Check the arguments of `submit`, which are explained there.

    Raises:
        JobError: a worker would refuse the job.
        ValueError: an unknown priority.
    """
    entry = make_entry(prompt, **options)
    call = _enqueue_call(keys, entry, priority, delay)
    deadline = Deadline.after(f"job {entry.id}: not taken", timeout)
    return Submit(entry, call, wait, deadline, OUTAGE_S if wait else AT_ONCE_S)


def _enqueue_call(keys: Keys, entry: JobEntry, priority: str, delay: float | None) -> Call:
    return enqueue_call(keys, entry, priority, delay)


def submit_steps(job: Submit) -> Once[Full | None]:
    """Add a job. Returns None, or why the queue has no room for it.

    Raises:
        JobExists: the id is in use.
        TimeoutError: with `wait`: no room until the deadline.
    """
    pauses = backoff()
    while True:
        (reply,) = yield Run([job.call], job.deadline, job.outage_s)
        full = no_room(reply, job.entry)
        if full is None or not job.wait:
            return full
        if not job.deadline.left:
            raise job.deadline.missed(full) from full
        yield Pause(min(next(pauses), job.deadline.left))


def submit_all_steps(keys: Keys, entries: Sequence[JobEntry], priority: str) -> Once[list[EnqueueRefused | None]]:
    """Add many jobs; None for each that was added, else why not."""
    replies = yield Run([enqueue_call(keys, entry, priority) for entry in entries])
    return [_refusal(reply, entry) for reply, entry in zip(replies, entries, strict=True)]


def _refusal(reply: Any, entry: JobEntry) -> EnqueueRefused | None:
    try:
        enqueue_reply(reply, entry)
    except EnqueueRefused as refused:
        return refused
    return None


def cancel_steps(keys: Keys, job_id: str, reason: str, ttl: int, deadline: Deadline) -> Once[CancelReply]:
    """Cancel one job."""
    (reply,) = yield Run([cancel_call(keys, job_id, reason, ttl)], deadline, BRIEF_S)
    return cancel_reply(reply)


def abandon_steps(keys: Keys, ids: Sequence[str]) -> Once[None]:
    """Cancel jobs whose results are no longer awaited."""
    if ids:
        deadline = Deadline.after("map: not cancelled", CLEAN_UP_S)
        yield Run([cancel_call(keys, job_id, "abandoned", CANCEL_TTL_S) for job_id in ids], deadline)


def results_steps(keys: Keys, ids: Sequence[str]) -> Once[list[Result | None]]:
    """Read the results of many jobs; None where there is none."""
    replies = (yield Ask([("MGET", *map(keys.result, ids))]))[0] if ids else []
    return [None if raw is None else Result.from_json(raw) for raw in replies]


def states_steps(keys: Keys, ids: Sequence[str]) -> Once[list[str | None]]:
    """Read the states of many jobs; None where Redis knows no such job."""
    asked: list[tuple[Any, ...]] = []
    for job_id in ids:
        asked += [("EXISTS", keys.delayed_job(job_id)), ("HGET", keys.job(job_id), "state")]
    replies = yield Ask(asked)
    return [state_of(state, delayed) for delayed, state in zip(replies[::2], replies[1::2], strict=True)]


def finished_steps(keys: Keys, group: str, after: str, block_ms: int | None) -> Once[list[tuple[str, str]]]:
    """Read the next entries of a group's stream, as (entry, id)."""
    replies = yield Read({keys.group_out(group): after}, block_ms, None)
    return [(entry.decode(), fields[b"id"].decode()) for _, entries in replies or () for entry, fields in entries]


def forget_steps(keys: Keys, ids: Sequence[str], group: str, entries: Sequence[str]) -> Once[None]:
    """Delete what Redis keeps of finished jobs, and entries of a group's stream."""
    commands: list[tuple[Any, ...]] = []
    if ids:
        commands.append(("DEL", *(key(one) for one in ids for key in (keys.result, keys.out, keys.job))))
    if entries:
        commands.append(("XDEL", keys.group_out(group), *entries))
    if commands:
        yield Ask(commands)


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


def check_event_id(text: str, name: str = "from_id") -> str:
    """Return `text`, the ID of an event or entry, or `0` for the beginning.

    Raises:
        ValueError: it is neither.
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise ValueError(f"{name}: must be the id of an event such as 1-7, or 0 for the beginning, not {text[:64]!r}")
    return text


def result_steps(keys: Keys, job_id: str, deadline: Deadline, block_ms: int, presence: Presence) -> Once[Result]:
    """Wait for a job's result without reading its tokens.

    Raises:
        JobLost: it was there, and is no more.
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
        strict: bool = False,
    ) -> None:
        """`defaults`: arguments of `submit`; those of a prompt take precedence. `strict`: raise for a malformed prompt.

        Raises:
            ValueError: `window` is below 1.
        """
        if window < 1:
            raise ValueError("window: must be at least 1")
        self.keys, self.ordered, self.window, self.timeout, self.block_ms = keys, ordered, window, timeout, block_ms
        self.defaults = {"stream": False, **defaults}
        self.items = enumerate(prompts)
        self.strict = strict
        self.pending: dict[str, tuple[int, Prompt]] = {}
        """Ids of unfinished jobs, with index and prompt."""
        self._last: dict[str, str] = {}
        self._ready: dict[int, MapResult] = {}
        self._handed = 0

    def steps(self) -> Steps[MapResult]:
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
                try:
                    submit, patient = self._submit(item[1], deadline)
                except (JobError, TypeError, ValueError) as error:
                    if self.strict:
                        raise
                    yield from self._hand(_malformed(error, *item))
                    item = next(self.items, None)
                    deadline = self._deadline()
                    continue
                full = yield from submit_steps(submit)
                if full is None:
                    self.pending[submit.entry.id] = item
                    self._last[submit.entry.id] = SEAL_ID
                    item = next(self.items, None)
                    deadline = self._deadline()
                elif not patient:
                    raise full
            ids = list(self.pending)
            if not ids:
                continue
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
        entry = make_entry(**arguments)
        call = _enqueue_call(self.keys, entry, priority, delay)
        return Submit(entry, call, patient and not self.pending, deadline), patient

    def _deadline(self) -> Deadline:
        return Deadline.after("map: no job finished", self.timeout)

    def _room(self) -> bool:
        held = len(self._ready) + len(self.pending)
        return len(self.pending) < self.window and (not self.ordered or held < 4 * self.window)

    def _take(self, job_id: str, result: Result) -> Generator[Emit[MapResult], None, None]:
        index, prompt = self.pending.pop(job_id)
        del self._last[job_id]
        yield from self._hand(extended(MapResult, result, index=index, prompt=prompt))

    def _hand(self, result: MapResult) -> Generator[Emit[MapResult], None, None]:
        if not self.ordered:
            yield Emit(result)
            return
        self._ready[result.index] = result
        while self._handed in self._ready:
            yield Emit(self._ready.pop(self._handed))
            self._handed += 1


def _malformed(error: JobError | TypeError | ValueError, index: int, prompt: Prompt) -> MapResult:
    """Return the failed result of a prompt that was not submitted."""
    refused = error if isinstance(error, JobError) else JobError(ErrorCode.INVALID_REQUEST, str(error))
    given = prompt.get("id") if isinstance(prompt, Mapping) else None
    job_id = given if isinstance(given, str) else ""
    return MapResult(job_id, Status.FAILED, error=ErrorInfo.of(refused), index=index, prompt=prompt)


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
