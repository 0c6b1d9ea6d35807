"""The methods of both clients, without I/O.

Every method is a generator: it yields steps for Redis (`Read`, `Get`, `Exist`, `Ask`, `Run`, `Scan`,
`Pause`), is sent the
reply of each step, and yields values for the caller as `Emit` or returns a value. `transport.py` carries the steps out.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
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
from tokenmill.protocol.job import JobEntry, milliseconds, parse_entry
from tokenmill.protocol.keys import CANCEL_TTL_S, MAX_BODY_BYTES, Keys
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import state_of

T = TypeVar("T")
R = TypeVar("R", bound=Result)
BLOCK_MS = 5000
"""How long one blocking read waits."""
READ_COUNT = 512
"""Maximum number of entries of one XREAD."""
CLEAN_UP_S = 5.0
"""Time limit for cancelling the unfinished jobs of a `map` that is left early."""


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
    """XREAD of `streams` ({stream: last ID}). Reply: [(stream, entries)], of each stream at most `limit` entries.

    `block_ms` None: don't wait.
    """

    streams: Mapping[str, str]
    block_ms: int | None
    deadline: Deadline | None
    limit: int = READ_COUNT


class Get(NamedTuple):
    """MGET of `keys`. Reply: a list of bytes or None."""

    keys: Sequence[str]
    deadline: Deadline


class Exist(NamedTuple):
    """EXISTS for each group of keys. Reply: a bool for each group: one of its keys exists, or may exist."""

    groups: Sequence[Sequence[str]]
    deadline: Deadline


class Ask(NamedTuple):
    """Commands in one round trip, within MULTI if `atomic`. Reply: the list of their replies."""

    commands: Sequence[tuple[Any, ...]]
    deadline: Deadline | None = None
    outage_s: float = OUTAGE_S
    atomic: bool = False


class Run(NamedTuple):
    """Idempotent script calls in one round trip. Reply: the list of their replies."""

    calls: Sequence[Call]
    deadline: Deadline | None = None
    outage_s: float = OUTAGE_S


class Scan(NamedTuple):
    """SCAN of the whole keyspace for a pattern. Reply: a list of keys; empty for a role without the right to SCAN."""

    pattern: str
    deadline: Deadline


class Pause(NamedTuple):
    """Sleep. No reply."""

    seconds: float


class Submit(NamedTuple):
    """A checked job for `submit_steps`. With `wait`, a queue without room is tried again until the deadline."""

    entry: JobEntry
    call: Call
    wait: bool
    deadline: Deadline
    outage_s: float = OUTAGE_S


class Emit(NamedTuple, Generic[T]):
    """A value for the caller. No reply."""

    value: T


Full = QueueFull | QuotaExceeded
Step = Read | Get | Exist | Ask | Run | Scan | Pause
Steps = Generator[Step | Emit[T], Any, None]
"""The steps of a method that yields values."""
Once = Generator[Step, Any, T]
"""The steps of a method that returns a value."""


def extended(kind: type[R], result: Result, **more: Any) -> R:
    """Return `result` as `kind`, a subclass of `Result` with the additional fields `more`."""
    return kind(**{field.name: getattr(result, field.name) for field in fields(Result)}, **more)


class Presence:
    """The jobs that Redis has had (`known`): a wait for such a job ends once Redis no longer knows it.

    A job that Redis never had may still be submitted, so the wait continues.
    """

    def __init__(self, keys: Keys, *known: str) -> None:
        self._keys = keys
        self.known = set(known)

    def look(self, ids: Sequence[str], deadline: Deadline) -> Generator[Exist, Sequence[bool], None]:
        """Check that Redis still has these jobs.

        Raises:
            JobLost: Redis had one of the jobs and no longer knows it.
        """
        keys = self._keys
        groups = [(keys.job(id), keys.out(id), keys.result(id), keys.delayed_job(id)) for id in ids]
        found = yield Exist(groups, deadline)
        for job_id, there in zip(ids, found, strict=True):
            if there:
                self.known.add(job_id)
            elif job_id in self.known:
                raise JobLost(job_id, keys.queue)


def new_id() -> str:
    """Return a random id of 128 bits. It is a secret: it is all that is needed to read and cancel the job."""
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
    """Build the entry of a job and check it by the rules of the worker.

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
    return entry_of(
        {"prompt": prompt, "messages": messages, **params},
        id=id,
        ttl=ttl,
        group=group,
        tenant=tenant,
        stream=stream,
        callback=callback,
        traceparent=traceparent,
        max_attempts=max_attempts,
    )


def entry_of(
    body: Mapping[str, Any],
    *,
    id: str | None = None,
    ttl: float | None = None,
    group: str | None = None,
    tenant: str | None = None,
    stream: bool = True,
    callback: str | None = None,
    traceparent: str | None = None,
    max_attempts: int | None = None,
    max_bytes: int = MAX_BODY_BYTES,
) -> JobEntry:
    """Build the entry of a job with the body `body` and check it by the rules of the worker.

    Args:
        max_bytes: maximum size of the encoded body.

    Raises:
        JobError: a worker would refuse the job.
    """
    entry = JobEntry(
        id=new_id() if id is None else id,
        body=encode_body(body, max_bytes),
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
    /,
    **options: Any,
) -> Submit:
    """Check the arguments of `Client.submit`, which documents them, and build the step.

    Raises:
        JobError: a worker would refuse the job.
        ValueError: an unknown priority.
    """
    return submit_of(keys, make_entry(prompt, **options), priority, delay, wait, timeout)


def submit_of(
    keys: Keys, entry: JobEntry, priority: str, delay: float | None, wait: bool, timeout: float | None
) -> Submit:
    """Build the step that submits a checked entry; arguments as `Client.submit`.

    Raises:
        JobError: `delay` is not a finite number, or is longer than ten years.
        ValueError: an unknown priority.
    """
    call = enqueue_call(keys, entry, priority, delay)
    deadline = Deadline.after(f"job {entry.id}: not taken", timeout)
    return Submit(entry, call, wait, deadline, OUTAGE_S if wait else AT_ONCE_S)


def submit_steps(job: Submit) -> Once[Full | None]:
    """Add a job; return None, or the error that says why the queue has no room for it.

    Raises:
        JobExists: the id is in use.
        TimeoutError: with `wait`: the queue had no room until the deadline.
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
    """Add many jobs; return None for each job that was added, otherwise the error that says why it was refused."""
    replies = yield Run([enqueue_call(keys, entry, priority) for entry in entries])
    return [_refusal(reply, entry) for reply, entry in zip(replies, entries, strict=True)]


def _refusal(reply: Any, entry: JobEntry) -> EnqueueRefused | None:
    try:
        enqueue_reply(reply, entry)
    except EnqueueRefused as refused:
        return refused
    return None


def cancel_steps(keys: Keys, job_id: str, reason: str, ttl: int, deadline: Deadline) -> Once[CancelReply]:
    """Cancel a job."""
    (reply,) = yield Run([cancel_call(keys, job_id, reason, ttl)], deadline, BRIEF_S)
    return cancel_reply(reply)


def cancel_all_steps(keys: Keys, ids: Sequence[str], reason: str) -> Once[list[CancelReply]]:
    """Cancel many jobs."""
    replies = (yield Run([cancel_call(keys, job_id, reason) for job_id in ids], outage_s=BRIEF_S)) if ids else []
    return [cancel_reply(reply) for reply in replies]


def abandon_steps(keys: Keys, ids: Sequence[str]) -> Once[None]:
    """Cancel the unfinished jobs of a `map` that was left early."""
    if ids:
        deadline = Deadline.after("map: not cancelled", CLEAN_UP_S)
        yield Run([cancel_call(keys, job_id, "abandoned", CANCEL_TTL_S) for job_id in ids], deadline)


def results_steps(keys: Keys, ids: Sequence[str]) -> Once[list[Result | None]]:
    """Read the results of many jobs; None for a job without a result."""
    replies = (yield Ask([("MGET", *map(keys.result, ids))]))[0] if ids else []
    return [None if raw is None else Result.from_json(raw) for raw in replies]


def states_steps(keys: Keys, ids: Sequence[str]) -> Once[list[str | None]]:
    """Read the states of many jobs; None for a job that Redis does not know."""
    asked: list[tuple[Any, ...]] = []
    for job_id in ids:
        asked += [("EXISTS", keys.delayed_job(job_id)), ("HGET", keys.job(job_id), "state")]
    replies = yield Ask(asked)
    return [state_of(state, delayed) for delayed, state in zip(replies[::2], replies[1::2], strict=True)]


def finished_steps(keys: Keys, group: str, after: str, block_ms: int | None) -> Once[list[tuple[str, str]]]:
    """Read the next entries of a group's stream as pairs (entry ID, job id)."""
    replies = yield Read({keys.group_out(group): after}, block_ms, None)
    return [(entry.decode(), fields[b"id"].decode()) for _, entries in replies or () for entry, fields in entries]


def forget_steps(keys: Keys, ids: Sequence[str], group: str, entries: Sequence[str]) -> Once[None]:
    """Delete all keys of finished jobs, and entries of a group's stream."""
    commands: list[tuple[Any, ...]] = []
    if ids:
        commands.append(("DEL", *(key(job_id) for job_id in ids for key in (keys.result, keys.out, keys.job))))
    if entries:
        commands.append(("XDEL", keys.group_out(group), *entries))
    if commands:
        yield Ask(commands)


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "replace")


def no_room(reply: Any, entry: JobEntry) -> Full | None:
    """Read the reply of ENQUEUE: None if the queue took the entry, otherwise why it has no room.

    Raises:
        JobExists: the id is in use.
    """
    try:
        enqueue_reply(reply, entry)
    except (QueueFull, QuotaExceeded) as full:
        return full
    return None
