"""The asyncio client: the synchronous one's methods, to be awaited or iterated with `async for`.

    async with AsyncClient("redis://localhost:6379/0") as client:
        job = await client.submit(messages=[{"role": "user", "content": "Hello"}])
        async for piece in job.text():
            print(piece, end="", flush=True)
        result = await job.result(timeout=60)
        async for result in client.map(prompts, window=32, ordered=False):
            ...

Docstrings of arguments and errors are in `producer.client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
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
    JobExists,
    QueueFull,
    QuotaExceeded,
    cancel_call,
    cancel_reply,
    enqueue_call,
    enqueue_reply,
)
from producer.protocol.connection import DEFAULT_URL, REDIS_DOWN, async_client
from producer.protocol.events import Event
from producer.protocol.job import JobEntry
from producer.protocol.keys import CANCEL_TTL_S, Keys, check_name
from producer.protocol.lua import AsyncRunner
from producer.protocol.replies import CancelReply
from producer.protocol.result import Result

T = TypeVar("T")


class AsyncJob:
    """One job, known by its id."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> AsyncGenerator[Event, None]:
        """As `Job.stream`."""
        return self._client._stream(self.id, check_event_id(from_id), Deadline.after(f"job {self.id}", timeout))

    async def text(self, index: int = 0, timeout: float | None = None) -> AsyncIterator[str]:
        """As `Job.text`."""
        follower = TextFollower(index)
        async with aclosing(self.stream(timeout=timeout)) as events:
            async for event in events:
                piece = follower.feed(event)
                if piece:
                    yield piece

    async def result(self, timeout: float | None = None) -> Result:
        """As `Job.result`."""
        return await self._client._result(self.id, Deadline.after(f"job {self.id}", timeout))

    async def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S) -> CancelReply:
        """As `Job.cancel`."""
        return await self._client._cancel(self.id, reason, ttl)


class AsyncClient:
    """Submits jobs to one queue and reads what comes of them; belongs to one event loop. Arguments as `Client`."""

    def __init__(
        self, url: str = DEFAULT_URL, queue: str = "default", *, prefix: str = "tokenmill", block_ms: int = BLOCK_MS
    ) -> None:
        self.keys = Keys(queue, prefix)
        self.redis = async_client(url)
        self._blocking = async_client(url, block_ms)
        self._block_ms = block_ms
        self._runner = AsyncRunner(self.redis)

    async def submit(
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
    ) -> AsyncJob:
        """As `Client.submit`."""
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
            await self._delay(entry, priority, delay)
        else:
            await self._enqueue(entry, priority, wait)
        return AsyncJob(self, entry.id)

    def job(self, id: str) -> AsyncJob:
        """As `Client.job`."""
        return AsyncJob(self, check_name("id", id))

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        timeout: float | None = None,
        **params: Any,
    ) -> AsyncGenerator[Result, None]:
        """As `Client.map`. To leave it early use `contextlib.aclosing`: the unfinished are then cancelled at once."""
        work = Window(self.keys, prompts, window, ordered, timeout, self._block_ms)
        try:
            async with aclosing(self._drive(work.steps(), {"stream": False, "wait": True, **params})) as results:
                async for result in results:
                    yield result
        finally:
            for job_id in list(work.pending):
                await self._cancel(job_id, "abandoned", CANCEL_TTL_S)

    async def close(self) -> None:
        await self.redis.aclose()
        await self._blocking.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _enqueue(self, entry: JobEntry, priority: str, wait: bool) -> None:
        call = enqueue_call(self.keys, entry, priority)
        pauses, give_up = backoff(), time.monotonic() + RECONNECT_S
        while True:
            try:
                enqueue_reply(await self._runner.run(*call), entry)
                return
            except (QueueFull, QuotaExceeded):
                if not wait:
                    raise
            except REDIS_DOWN:
                if not wait or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(next(pauses))

    async def _delay(self, entry: JobEntry, priority: str, delay: float) -> None:
        enqueue_call(self.keys, entry, priority)  # for its checks
        known = (self.keys.result(entry.id), self.keys.delayed_job(entry.id), self.keys.job(entry.id))
        if await self.redis.exists(*known):
            raise JobExists(entry.id, "known")
        seconds, micros = await self.redis.time()
        fields: dict[Any, Any] = {**entry.fields(), "lane": priority}
        due = seconds * 1000 + micros // 1000 + round(delay * 1000)
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.keys.delayed_job(entry.id), mapping=fields)
            pipe.zadd(self.keys.delayed, {entry.id: due})
            await pipe.execute()

    async def _cancel(self, job_id: str, reason: str, ttl: int) -> CancelReply:
        return cancel_reply(await self._runner.run(*cancel_call(self.keys, job_id, reason, ttl)))

    async def _stream(self, job_id: str, from_id: str, deadline: Deadline) -> AsyncGenerator[Event, None]:
        async with aclosing(
            self._drive(stream_steps(self.keys, job_id, from_id, deadline, self._block_ms), {})
        ) as events:
            async for event in events:
                yield event

    async def _result(self, job_id: str, deadline: Deadline) -> Result:
        async with aclosing(self._drive(result_steps(self.keys, job_id, deadline, self._block_ms), {})) as results:
            return await anext(results)

    async def _drive(self, steps: Steps[T], defaults: Mapping[str, Any]) -> AsyncGenerator[T, None]:
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
                reply = (await self.submit(**{**defaults, **step.arguments})).id
            else:
                reply = await self._read(step)

    async def _read(self, step: Read | Get) -> Any:
        """Reads change nothing, so they are tried again while Redis is away."""
        pauses, give_up = backoff(), time.monotonic() + RECONNECT_S
        while True:
            try:
                if isinstance(step, Get):
                    return await self.redis.mget(step.keys)
                streams: dict[Any, Any] = dict(step.streams)
                if step.block_ms is None:
                    return await self.redis.xread(streams, count=READ_COUNT)
                return await self._blocking.xread(streams, count=READ_COUNT, block=step.block_ms)
            except REDIS_DOWN:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(next(pauses))
