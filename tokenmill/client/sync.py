"""The synchronous client.

    with Client("redis://localhost:6379/0", queue="default") as client:
        job = client.submit("Hello", max_tokens=32)
        for piece in job.text():
            print(piece, end="", flush=True)
        print(job.result().usage)
        for result in client.map(["a", "b", "c"], max_tokens=8):
            print(result.text)

Thread-safe. Importing it does not import torch.

While Redis is away, restarts or changes its master, every method tries again: for as long as its `timeout` allows;
without one a wait outlives five minutes of that, a single question such as `cancel` 30 s and a submit that is not to
wait 3 s. A client that has never reached its Redis gives up after 30 s. So callers see

    TimeoutError         the time-out is over, whether Redis was there or not; `__cause__` is Redis' last error, if any
    redis.RedisError     no time-out was given and Redis stayed away, or it refuses for good: a wrong password
                         (AuthenticationError), no right to a command (NoPermissionError), an unknown host, TLS spoken
                         to a plain port, a key of another type. What waiting does not mend is raised at once.

A time-out of 0 asks once. When a time-out ends, Redis has up to a second more for the answer under way, so that very
short ones can succeed at all. What they cannot cut short is this client's look-up of the host's name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.exceptions import NoPermissionError, RedisError

from tokenmill.client.core import (
    BLOCK_MS,
    CLEAN_UP_S,
    READ_COUNT,
    WINDOW,
    Emit,
    Exist,
    Full,
    Get,
    Presence,
    Prompt,
    Read,
    Steps,
    Submit,
    TextFollower,
    Window,
    check_event_id,
    make_entry,
    no_room,
    result_steps,
    stream_steps,
)
from tokenmill.client.patience import AT_ONCE_S, BRIEF_S, OUTAGE_S, Deadline, Line, Tries, backoff
from tokenmill.protocol.calls import (
    EnqueueRefused,
    cancel_call,
    cancel_reply,
    enqueue_call,
    enqueue_reply,
)
from tokenmill.protocol.connection import DEFAULT_URL, blocking_client, command_client, ends_by
from tokenmill.protocol.events import Event
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys, check_name
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result

T = TypeVar("T")
log = logging.getLogger(__name__)

_trying: ContextVar[bool] = ContextVar("trying", default=False)
"""Inside of `Client.patiently`."""


class Job:
    """One job, known by its id; made by `Client.submit` and `Client.job`."""

    def __init__(self, client: Client, job_id: str, known: bool = False) -> None:
        """`known`: Redis has it, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> Iterator[Event]:
        """Events in order, ending with the `FinalEvent`. Resume with the `id` of the last event seen as `from_id`.

        A `StartEvent` with a higher fence than one seen before means that another worker began anew: drop the text.

        Raises:
            ValueError: `from_id` is no event's id.
            TimeoutError: no end within `timeout` seconds (default: a day). What was there by then was handed out.
            JobLost: Redis had the job and knows nothing more of it.
            redis.RedisError: without a time-out: Redis stayed away for five minutes; with one: it refuses for good.
        """
        return self._client._stream(self.id, check_event_id(from_id), self._deadline(timeout), self._presence)

    def text(self, index: int = 0, timeout: float | None = None) -> Iterator[str]:
        """Pieces of one choice's text as they come. It ends with the job, however that ended: see `result()`.

        Raises:
            TextRestarted: a worker was lost and the new text differs from what was handed out.
            TimeoutError, JobLost: as `stream`.
        """
        follower = TextFollower(index)
        for event in self.stream(timeout=timeout):
            piece = follower.feed(event)
            if piece:
                yield piece

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, whatever its status.

        Raises:
            TimeoutError: none within `timeout` seconds (default: a day). The job goes on.
            JobLost: as `stream`.
            redis.RedisError: as `stream`.
        """
        return self._client._result(self.id, self._deadline(timeout), self._presence)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(f"job {self.id}: not finished", timeout)

    def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None) -> CancelReply:
        """Cancel: a queued or delayed job ends at once, a running one within a step. Partial text is kept.

        Args:
            ttl: seconds for which a cancel of a job that has not come yet is remembered.
            timeout: seconds to wait for Redis; the end of the job is not waited for.

        Raises:
            TimeoutError: Redis did not answer within `timeout` seconds. The job may have been cancelled.
            redis.RedisError: without a time-out: Redis stayed away for 30 s; with one: it refuses for good.
        """
        return self._client._cancel(self.id, reason, ttl, Deadline.after(f"job {self.id}: not cancelled", timeout))


class Client:
    """Submits jobs to one queue and reads what comes of them.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        block_ms: how long one blocking read waits.
        fail_fast: where Redis cannot be reached at first, raise at once rather than wait for it.

    Raises:
        ValueError: a malformed URL, queue or prefix.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        queue: str = "default",
        *,
        prefix: str = "tokenmill",
        block_ms: int = BLOCK_MS,
        fail_fast: bool = False,
    ) -> None:
        self.keys = Keys(queue, prefix)
        self.redis = command_client(url, retries=0)
        self._blocking = blocking_client(url, block_ms)
        self._block_ms = block_ms
        self._runner = Runner(self.redis)
        self._line = Line(fail_fast)

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        id: str | None = None,
        priority: str = "normal",
        ttl: float | None = None,
        delay: float | None = None,
        group: str | None = None,
        tenant: str | None = None,
        stream: bool = True,
        callback: str | None = None,
        traceparent: str | None = None,
        max_attempts: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        **params: Any,
    ) -> Job:
        """Add a job: `prompt` (text or token ids) or `messages`, and any parameter of the body (`max_tokens`, …).

        Args:
            id: the job's id, never to be used again; random when left out.
            ttl: seconds, counted from when it joins its lane, after which it expires.
            delay: seconds before it joins its lane; longer where a cap of the queue stands against it then.
            stream: False: no token events, only the result.
            wait: while the queue is full or the tenant's quota used up, wait instead of raising.
            timeout: seconds to wait for Redis and, with `wait`, for room.

        Raises:
            JobError: a worker would refuse it; nothing was sent.
            JobExists, QueueFull, QuotaExceeded: the queue did.
            TimeoutError: not taken within `timeout` seconds.
            redis.RedisError: without a time-out: Redis stayed away, for 3 s or, with `wait`, for five minutes.

        After the last two the job may have been added all the same. Name an `id` to find out: submitted again, it
        is refused as `JobExists` where it was.
        """
        entry = make_entry(
            prompt,
            messages,
            id=id,
            ttl=ttl,
            group=group,
            tenant=tenant,
            stream=stream,
            callback=callback,
            traceparent=traceparent,
            max_attempts=max_attempts,
            **params,
        )
        deadline = Deadline.after(f"job {entry.id}: not taken", timeout)
        full = self._submit(Submit(entry, priority, delay, wait, deadline, OUTAGE_S if wait else AT_ONCE_S))
        if full is not None:
            raise full
        return Job(self, entry.id, known=True)

    def job(self, id: str) -> Job:
        """A job submitted elsewhere. Nothing is asked of Redis yet.

        Raises:
            ValueError: not an id.
        """
        return Job(self, check_name("id", id))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        timeout: float | None = None,
        **params: Any,
    ) -> Iterator[Result]:
        """Run many prompts with at most `window` unfinished at a time; yields each one's result.

        A prompt is text, token ids, chat messages, or a dict of `submit` arguments, which go before `params`. Results
        come in the prompts' order, or as completed. Leaving the loop early cancels what is unfinished, and so does an
        error; where Redis cannot be asked to within five seconds, the log has their ids.

        Raises:
            JobLost: Redis had one of the jobs and knows nothing more of it; the unfinished are cancelled.
            JobError: a prompt is malformed; the unfinished are cancelled.
            TimeoutError: for `timeout` seconds no job finished and the queue took none.
            redis.RedisError: as `Job.stream`.
        """
        work = Window(
            self.keys, prompts, params, window=window, ordered=ordered, timeout=timeout, block_ms=self._block_ms
        )
        try:
            yield from self._drive(work.steps())
        finally:
            self._abandon(list(work.pending))

    def submit_all(self, entries: Sequence[JobEntry], priority: str = "normal") -> list[EnqueueRefused | None]:
        """Add many jobs in one round trip; for each None, or why the queue did not take it.

        Entries are not checked: a worker answers what is wrong with them.

        Raises:
            redis.RedisError: some may have been added. Repeated, those are refused as `JobExists`.
        """
        calls = [enqueue_call(self.keys, entry, priority) for entry in entries]
        replies = self.patiently(lambda: self._runner.run_all(calls))
        return [_refusal(reply, entry) for reply, entry in zip(replies, entries, strict=True)]

    def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """Up to 512 jobs of a group that have ended since `after`, as (entry, id) in the order of their ends.

        `after` is the last entry seen. `block_ms`: how long to wait for one, at most the client's own `block_ms`.
        """
        streams: dict[Any, Any] = {self.keys.group_out(group): after}
        block = None if block_ms is None else max(1, min(block_ms, self._block_ms))
        replies = self.patiently(lambda: self._xread(streams, block))
        return [(entry.decode(), fields[b"id"].decode()) for _, entries in replies or () for entry, fields in entries]

    def results(self, ids: Sequence[str]) -> list[Result | None]:
        """The results of many jobs in one round trip, without waiting; None where there is none."""
        replies: Any = self.patiently(lambda: self.redis.mget([self.keys.result(job_id) for job_id in ids]))
        return [None if raw is None else Result.from_json(raw) for raw in replies]

    def states(self, ids: Sequence[str]) -> list[str | None]:
        """The state of many jobs in one round trip, `delayed` included; None where Redis knows no such job."""

        def ask() -> list[Any]:
            pipe = self.redis.pipeline(transaction=False)
            for job_id in ids:
                pipe.exists(self.keys.delayed_job(job_id))
                pipe.hget(self.keys.job(job_id), "state")
            return pipe.execute()

        replies = self.patiently(ask)
        return [_state(state, delayed) for delayed, state in zip(replies[::2], replies[1::2], strict=True)]

    def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """Delete what Redis keeps of finished jobs, and their entries of a group's stream, ahead of their time."""

        def delete() -> None:
            pipe = self.redis.pipeline(transaction=False)
            if ids:
                kinds = (self.keys.result, self.keys.out, self.keys.job)
                pipe.delete(*(key(job_id) for job_id in ids for key in kinds))
            if entries:
                pipe.xdel(self.keys.group_out(group), *entries)
            pipe.execute()

        self.patiently(delete)

    def patiently(
        self,
        call: Callable[[], T],
        deadline: Deadline | None = None,
        outage_s: float = OUTAGE_S,
        pause: Callable[[float], object] = time.sleep,
    ) -> T:
        """Call something that asks Redis and may be repeated, again and again while Redis is away; returns its reply.

        Within another `patiently` it is called once: the outer one does it all again.

        Args:
            deadline: of the whole call; where it has no time-out, `outage_s` counts.
            pause: waits between two tries.

        Raises:
            TimeoutError: the deadline is over.
            redis.RedisError: Redis stayed away, or refuses.
        """
        if _trying.get():
            return call()
        tries, token = Tries(self._line, deadline, outage_s), _trying.set(True)
        try:
            while True:
                try:
                    with ends_by(tries.ends_by):
                        reply = call()
                except RedisError as error:
                    if isinstance(error, DEMOTED):
                        for client in (self.redis, self._blocking):
                            client.connection_pool.disconnect(inuse_connections=False)
                    pause(tries.pause(error))
                else:
                    self._line.works()
                    return reply
        finally:
            _trying.reset(token)

    def close(self) -> None:
        self.redis.close()
        self._blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(self, job: Submit) -> Full | None:
        call, pauses = enqueue_call(self.keys, job.entry, job.priority, job.delay), backoff()
        while True:
            reply = self.patiently(lambda: self._runner.run(*call), job.deadline, job.outage_s)
            full = no_room(reply, job.entry)
            if full is None or not job.wait:
                return full
            if not job.deadline.left:
                raise job.deadline.missed(full) from full
            time.sleep(min(next(pauses), job.deadline.left))

    def _cancel(self, job_id: str, reason: str, ttl: int, deadline: Deadline) -> CancelReply:
        call = cancel_call(self.keys, job_id, reason, ttl)
        return cancel_reply(self.patiently(lambda: self._runner.run(*call), deadline, BRIEF_S))

    def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel jobs whose results nobody waits for any more; an error must not hide why that is so."""
        calls = [cancel_call(self.keys, job_id, "abandoned", CANCEL_TTL_S) for job_id in ids]
        try:
            if calls:
                self.patiently(lambda: self._runner.run_all(calls), Deadline.after("map: not cancelled", CLEAN_UP_S))
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs go on: %s; could not cancel them: %s", ", ".join(ids), error)

    def _stream(self, job_id: str, from_id: str, deadline: Deadline, presence: Presence) -> Iterator[Event]:
        yield from self._drive(stream_steps(self.keys, job_id, from_id, deadline, self._block_ms, presence))

    def _result(self, job_id: str, deadline: Deadline, presence: Presence) -> Result:
        return next(self._drive(result_steps(self.keys, job_id, deadline, self._block_ms, presence)))

    def _drive(self, steps: Steps[T]) -> Iterator[T]:
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration:
                return
            reply = None
            if isinstance(step, Emit):
                yield step.value
            elif isinstance(step, Submit):
                reply = self._submit(step)
            else:
                reply = self._read(step)

    def _read(self, step: Read | Get | Exist) -> Any:
        if isinstance(step, Exist):
            return self._exist(step)
        if isinstance(step, Get):
            return self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return self.patiently(lambda: self._xread(step.streams, step.block_ms), step.deadline)

    def _exist(self, step: Exist) -> list[bool]:
        def ask() -> list[int]:
            pipe = self.redis.pipeline(transaction=False)
            for keys in step.groups:
                pipe.exists(*keys)
            return list(pipe.execute())

        try:
            return [count > 0 for count in self.patiently(ask, step.deadline)]
        except NoPermissionError:  # the role `producer` may not look
            return [True] * len(step.groups)

    def _xread(self, streams: Mapping[str, str], block_ms: int | None) -> Any:
        asked: dict[Any, Any] = dict(streams)
        reader = self.redis if block_ms is None else self._blocking
        return reader.xread(asked, count=READ_COUNT, block=block_ms)


def _state(state: bytes | None, delayed: int) -> str | None:
    if delayed and state is None:  # put aside by hand, without a hash of the job
        return "delayed"
    return None if state is None or (state == b"delayed" and not delayed) else state.decode()


def _refusal(reply: Any, entry: JobEntry) -> EnqueueRefused | None:
    try:
        enqueue_reply(reply, entry)
    except EnqueueRefused as refused:
        return refused
    return None
