"""The asyncio client: the synchronous one's methods, to be awaited or iterated with `async for`.

    async with AsyncClient("redis://localhost:6379/0") as client:
        job = await client.submit(messages=[{"role": "user", "content": "Hello"}])
        async for piece in job.text():
            print(piece, end="", flush=True)
        result = await job.result(timeout=60)
        async for result in client.map(prompts, window=32, ordered=False):
            ...

Docstrings of arguments and errors are in `tokenmill.client.sync`, and so is what callers see while Redis is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
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
from tokenmill.protocol.calls import cancel_call, cancel_reply, enqueue_call
from tokenmill.protocol.connection import DEFAULT_URL, async_client, ends_by
from tokenmill.protocol.events import Event
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys, check_name
from tokenmill.protocol.lua import AsyncRunner
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result

T = TypeVar("T")
log = logging.getLogger(__name__)


class AsyncJob:
    """One job, known by its id."""

    def __init__(self, client: AsyncClient, job_id: str, known: bool = False) -> None:
        """`known`: Redis has it, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> AsyncGenerator[Event, None]:
        """As `Job.stream`."""
        return self._client._stream(self.id, check_event_id(from_id), self._deadline(timeout), self._presence)

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
        return await self._client._result(self.id, self._deadline(timeout), self._presence)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(f"job {self.id}: not finished", timeout)

    async def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None) -> CancelReply:
        """As `Job.cancel`."""
        deadline = Deadline.after(f"job {self.id}: not cancelled", timeout)
        return await self._client._cancel(self.id, reason, ttl, deadline)


class AsyncClient:
    """Submits jobs to one queue and reads what comes of them; belongs to one event loop. Arguments as `Client`."""

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
        self.redis = async_client(url, retries=0)
        self._blocking = async_client(url, block_ms)
        self._block_ms = block_ms
        self._runner = AsyncRunner(self.redis)
        self._line = Line(fail_fast)

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
        timeout: float | None = None,
        **params: Any,
    ) -> AsyncJob:
        """As `Client.submit`."""
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
        full = await self._submit(Submit(entry, priority, delay, wait, deadline, OUTAGE_S if wait else AT_ONCE_S))
        if full is not None:
            raise full
        return AsyncJob(self, entry.id, known=True)

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
        work = Window(
            self.keys, prompts, params, window=window, ordered=ordered, timeout=timeout, block_ms=self._block_ms
        )
        try:
            async with aclosing(self._drive(work.steps())) as results:
                async for result in results:
                    yield result
        finally:
            await self._abandon(list(work.pending))

    async def patiently(
        self, call: Callable[[], Awaitable[T]], deadline: Deadline | None = None, outage_s: float = OUTAGE_S
    ) -> T:
        """As `Client.patiently`, but not to be nested."""
        tries = Tries(self._line, deadline, outage_s)
        while True:
            try:
                with ends_by(tries.ends_by):
                    reply = await call()
            except RedisError as error:
                if isinstance(error, DEMOTED):
                    for client in (self.redis, self._blocking):
                        await client.connection_pool.disconnect(inuse_connections=False)
                await asyncio.sleep(tries.pause(error))
            else:
                self._line.works()
                return reply

    async def close(self) -> None:
        await self.redis.aclose()
        await self._blocking.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _submit(self, job: Submit) -> Full | None:
        call, pauses = enqueue_call(self.keys, job.entry, job.priority, job.delay), backoff()
        while True:
            reply = await self.patiently(lambda: self._runner.run(*call), job.deadline, job.outage_s)
            full = no_room(reply, job.entry)
            if full is None or not job.wait:
                return full
            if not job.deadline.left:
                raise job.deadline.missed(full) from full
            await asyncio.sleep(min(next(pauses), job.deadline.left))

    async def _cancel(self, job_id: str, reason: str, ttl: int, deadline: Deadline) -> CancelReply:
        call = cancel_call(self.keys, job_id, reason, ttl)
        return cancel_reply(await self.patiently(lambda: self._runner.run(*call), deadline, BRIEF_S))

    async def _abandon(self, ids: Sequence[str]) -> None:
        deadline = Deadline.after("map: not cancelled", CLEAN_UP_S)
        left = list(ids)
        try:
            while left:
                call = cancel_call(self.keys, left[-1], "abandoned", CANCEL_TTL_S)
                await self.patiently(lambda call=call: self._runner.run(*call), deadline)  # type: ignore[misc]
                left.pop()
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs go on: %s; could not cancel them: %s", ", ".join(left), error)

    async def _stream(
        self, job_id: str, from_id: str, deadline: Deadline, presence: Presence
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(
            self._drive(stream_steps(self.keys, job_id, from_id, deadline, self._block_ms, presence))
        ) as events:
            async for event in events:
                yield event

    async def _result(self, job_id: str, deadline: Deadline, presence: Presence) -> Result:
        async with aclosing(
            self._drive(result_steps(self.keys, job_id, deadline, self._block_ms, presence))
        ) as results:
            return await anext(results)

    async def _drive(self, steps: Steps[T]) -> AsyncGenerator[T, None]:
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
                reply = await self._submit(step)
            else:
                reply = await self._read(step)

    async def _read(self, step: Read | Get | Exist) -> Any:
        if isinstance(step, Exist):
            return await self._exist(step)
        if isinstance(step, Get):
            return await self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return await self.patiently(lambda: self._xread(step.streams, step.block_ms), step.deadline)

    async def _exist(self, step: Exist) -> list[bool]:
        async def ask() -> list[int]:
            pipe = self.redis.pipeline(transaction=False)
            for keys in step.groups:
                pipe.exists(*keys)
            return list(await pipe.execute())

        try:
            return [count > 0 for count in await self.patiently(ask, step.deadline)]
        except NoPermissionError:  # the role `producer` may not look
            return [True] * len(step.groups)

    async def _xread(self, streams: Mapping[str, str], block_ms: int | None) -> Any:
        asked: dict[Any, Any] = dict(streams)
        reader = self.redis if block_ms is None else self._blocking
        return await reader.xread(asked, count=READ_COUNT, block=block_ms)
