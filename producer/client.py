"""The synchronous client.

    with Client("redis://localhost:6379/0", queue="default") as client:
        job = client.submit("Hello", max_tokens=32)
        for piece in job.text():
            print(piece, end="", flush=True)
        print(job.result().usage)
        for result in client.map(["a", "b", "c"], max_tokens=8):
            print(result.text)

Thread-safe. Importing it does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from producer.core import (
    BLOCK_MS,
    READ_COUNT,
    RECONNECT_S,
    WINDOW,
    Deadline,
    Emit,
    Get,
    Prompt,
    Read,
    Steps,
    Submit,
    TextFollower,
    Window,
    backoff,
    check_event_id,
    make_entry,
    result_steps,
    stream_steps,
)
from producer.protocol.calls import (
    EnqueueRefused,
    JobExists,
    QueueFull,
    QuotaExceeded,
    cancel_call,
    cancel_reply,
    enqueue_call,
    enqueue_reply,
)
from producer.protocol.connection import DEFAULT_URL, REDIS_DOWN, blocking_client, command_client
from producer.protocol.events import Event
from producer.protocol.job import JobEntry
from producer.protocol.keys import CANCEL_TTL_S, Keys, check_name
from producer.protocol.lua import Runner
from producer.protocol.replies import CancelReply
from producer.protocol.result import Result

T = TypeVar("T")


class Job:
    """One job, known by its id; made by `Client.submit` and `Client.job`."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> Iterator[Event]:
        """Events in order, ending with the `FinalEvent`. Resume with the `id` of the last event seen as `from_id`.

        A `StartEvent` with a higher fence than one seen before means that another worker began anew: drop the text.

        Raises:
            ValueError: `from_id` is no event's id.
            TimeoutError: no end within `timeout` seconds (default: a day).
            redis.RedisError: Redis stayed away.
        """
        return self._client._stream(self.id, check_event_id(from_id), Deadline.after(f"job {self.id}", timeout))

    def text(self, index: int = 0, timeout: float | None = None) -> Iterator[str]:
        """Pieces of one choice's text as they come. It ends with the job, however that ended: see `result()`.

        Raises:
            TextRestarted: a worker was lost and the new text differs from what was handed out.
            TimeoutError: as `stream`.
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
        """
        return self._client._result(self.id, Deadline.after(f"job {self.id}", timeout))

    def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S) -> CancelReply:
        """Cancel: a queued or delayed job ends at once, a running one within a step. Partial text is kept.

        `ttl`: seconds for which a cancel of a job that has not come yet is remembered.
        """
        return self._client._cancel(self.id, reason, ttl)


class Client:
    """Submits jobs to one queue and reads what comes of them.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        block_ms: how long one blocking read waits.

    Raises:
        ValueError: a malformed URL, queue or prefix.
    """

    def __init__(
        self, url: str = DEFAULT_URL, queue: str = "default", *, prefix: str = "tokenmill", block_ms: int = BLOCK_MS
    ) -> None:
        self.keys = Keys(queue, prefix)
        self.redis = command_client(url)
        self._blocking = blocking_client(url, block_ms)
        self._block_ms = block_ms
        self._runner = Runner(self.redis)

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
        **params: Any,
    ) -> Job:
        """Add a job: `prompt` (text or token ids) or `messages`, and any parameter of the body (`max_tokens`, …).

        Args:
            id: the job's id, never to be used again; random when left out.
            ttl: seconds, counted from when it joins its lane, after which it expires.
            delay: seconds before it joins its lane.
            stream: False: no token events, only the result.
            wait: while the queue is full or the tenant's quota used up, wait instead of raising.

        Raises:
            JobError: a worker would refuse it; nothing was sent.
            JobExists, QueueFull, QuotaExceeded: the queue did.
        """
        entry = make_entry(
            prompt,
            messages,
            params,
            id=id,
            ttl=ttl,
            group=group,
            tenant=tenant,
            stream=stream,
            callback=callback,
            traceparent=traceparent,
            max_attempts=max_attempts,
        )
        if delay is not None and delay > 0:
            self._delay(entry, priority, delay)
        else:
            self._enqueue(entry, priority, wait)
        return Job(self, entry.id)

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
        come in the prompts' order, or as completed. Leaving the loop early cancels what is unfinished.

        Raises:
            JobError: a prompt is malformed; the unfinished are cancelled.
            TimeoutError: no job finished for `timeout` seconds.
        """
        work = Window(self.keys, prompts, window, ordered, timeout, self._block_ms)
        try:
            yield from self._drive(work.steps(), {"stream": False, "wait": True, **params})
        finally:
            for job_id in list(work.pending):
                self._cancel(job_id, "abandoned", CANCEL_TTL_S)

    def submit_all(self, entries: Sequence[JobEntry], priority: str = "normal") -> list[EnqueueRefused | None]:
        """Add many jobs in one round trip; for each None, or why the queue did not take it.

        Entries are not checked: a worker answers what is wrong with them.

        Raises:
            redis.RedisError: some may have been added. Repeated, those are refused as `JobExists`.
        """
        calls = [enqueue_call(self.keys, entry, priority) for entry in entries]
        return [_refusal(reply, entry) for reply, entry in zip(self._runner.run_all(calls), entries, strict=True)]

    def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """Up to 512 jobs of a group that have ended since `after`, as (entry, id) in the order of their ends.

        `after` is the last entry seen. `block_ms`: how long to wait for one, at most the client's own `block_ms`.
        """
        streams: dict[Any, Any] = {self.keys.group_out(group): after}
        if block_ms is None:
            replies: Any = self.redis.xread(streams, count=READ_COUNT)
        else:
            replies = self._blocking.xread(streams, count=READ_COUNT, block=max(1, min(block_ms, self._block_ms)))
        return [(entry.decode(), fields[b"id"].decode()) for _, entries in replies or () for entry, fields in entries]

    def results(self, ids: Sequence[str]) -> list[Result | None]:
        """The results of many jobs in one round trip, without waiting; None where there is none."""
        replies: Any = self.redis.mget([self.keys.result(job_id) for job_id in ids])
        return [None if raw is None else Result.from_json(raw) for raw in replies]

    def states(self, ids: Sequence[str]) -> list[str | None]:
        """The state of many jobs in one round trip; None where Redis knows no such job."""
        pipe = self.redis.pipeline(transaction=False)
        for job_id in ids:
            pipe.hget(self.keys.job(job_id), "state")
        return [None if state is None else state.decode() for state in pipe.execute()]

    def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """Delete what Redis keeps of finished jobs, and their entries of a group's stream, ahead of their time."""
        pipe = self.redis.pipeline(transaction=False)
        if ids:
            pipe.delete(*(key(job_id) for job_id in ids for key in (self.keys.result, self.keys.out, self.keys.job)))
        if entries:
            pipe.xdel(self.keys.group_out(group), *entries)
        pipe.execute()

    def close(self) -> None:
        self.redis.close()
        self._blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _enqueue(self, entry: JobEntry, priority: str, wait: bool) -> None:
        call = enqueue_call(self.keys, entry, priority)
        pauses, give_up = backoff(), time.monotonic() + RECONNECT_S
        while True:
            try:
                enqueue_reply(self._runner.run(*call), entry)
                return
            except (QueueFull, QuotaExceeded):
                if not wait:
                    raise
            except REDIS_DOWN:
                if not wait or time.monotonic() > give_up:
                    raise
            time.sleep(next(pauses))

    def _delay(self, entry: JobEntry, priority: str, delay: float) -> None:
        enqueue_call(self.keys, entry, priority)  # for its checks
        if self.redis.exists(self.keys.result(entry.id), self.keys.delayed_job(entry.id), self.keys.job(entry.id)):
            raise JobExists(entry.id, "known")
        seconds, micros = self.redis.time()
        fields: dict[Any, Any] = {**entry.fields(), "lane": priority}
        due = seconds * 1000 + micros // 1000 + round(delay * 1000)
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.keys.delayed_job(entry.id), mapping=fields)
            pipe.zadd(self.keys.delayed, {entry.id: due})
            pipe.execute()

    def _cancel(self, job_id: str, reason: str, ttl: int) -> CancelReply:
        return cancel_reply(self._runner.run(*cancel_call(self.keys, job_id, reason, ttl)))

    def _stream(self, job_id: str, from_id: str, deadline: Deadline) -> Iterator[Event]:
        yield from self._drive(stream_steps(self.keys, job_id, from_id, deadline, self._block_ms), {})

    def _result(self, job_id: str, deadline: Deadline) -> Result:
        steps = result_steps(self.keys, job_id, deadline, self._block_ms)
        return next(self._drive(steps, {}))

    def _drive(self, steps: Steps[T], defaults: Mapping[str, Any]) -> Iterator[T]:
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
                reply = self.submit(**{**defaults, **step.arguments}).id
            else:
                reply = self._read(step)

    def _read(self, step: Read | Get) -> Any:
        """Reads change nothing, so they are tried again while Redis is away."""
        pauses, give_up = backoff(), time.monotonic() + RECONNECT_S
        while True:
            try:
                if isinstance(step, Get):
                    return self.redis.mget(step.keys)
                streams: dict[Any, Any] = dict(step.streams)
                if step.block_ms is None:
                    return self.redis.xread(streams, count=READ_COUNT)
                return self._blocking.xread(streams, count=READ_COUNT, block=step.block_ms)
            except REDIS_DOWN:
                if time.monotonic() > give_up:
                    raise
            time.sleep(next(pauses))


def _refusal(reply: Any, entry: JobEntry) -> EnqueueRefused | None:
    try:
        enqueue_reply(reply, entry)
    except EnqueueRefused as refused:
        return refused
    return None
