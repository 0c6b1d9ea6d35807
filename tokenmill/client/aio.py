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
from typing import Any, Self, TypeVar, Unpack

from redis.exceptions import NoPermissionError, RedisError

from tokenmill.client.core import (
    BLOCK_MS,
    READ_COUNT,
    WINDOW,
    Ask,
    Emit,
    Exist,
    Get,
    MapResult,
    Once,
    Pause,
    Presence,
    Prompt,
    Run,
    Step,
    Steps,
    TextFollower,
    Window,
    abandon_steps,
    cancel_steps,
    check_event_id,
    finished_steps,
    forget_steps,
    make_submit,
    new_id,
    result_steps,
    results_steps,
    states_steps,
    stream_steps,
    submit_all_steps,
    submit_steps,
)
from tokenmill.client.groups import (
    Finished,
    Following,
    GroupResult,
    Progress,
    cancel_group_steps,
    check_expected,
    expect_steps,
    progress_steps,
)
from tokenmill.client.params import GroupOptions, MapOptions, RequestParams
from tokenmill.client.patience import OUTAGE_S, Deadline, Line, Tries
from tokenmill.client.state import status_steps
from tokenmill.protocol.calls import EnqueueRefused
from tokenmill.protocol.connection import DEFAULT_URL, async_client, ends_by
from tokenmill.protocol.events import Event
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys, check_name
from tokenmill.protocol.lua import AsyncRunner
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus

T = TypeVar("T")
log = logging.getLogger(__name__)


class AsyncJob:
    """One job, known by its id; made by `AsyncClient.submit` and `AsyncClient.job`."""

    def __init__(self, client: AsyncClient, job_id: str, known: bool = False) -> None:
        """`known`: Redis has it, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> AsyncGenerator[Event, None]:
        """As `Job.stream`."""
        client, deadline = self._client, self._deadline(timeout)
        start = check_event_id(from_id)
        return client._drive(stream_steps(client.keys, self.id, start, deadline, client._block_ms, self._presence))

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
        client = self._client
        return await client._once(
            result_steps(client.keys, self.id, self._deadline(timeout), client._block_ms, self._presence)
        )

    async def status(self, timeout: float | None = None) -> JobStatus:
        """As `Job.status`."""
        return await self._client.status(self.id, timeout)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(f"job {self.id}: not finished", timeout)

    async def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None) -> CancelReply:
        """As `Job.cancel`."""
        deadline = Deadline.after(f"job {self.id}: not cancelled", timeout)
        return await self._client._once(cancel_steps(self._client.keys, self.id, reason, ttl, deadline))


class AsyncGroup:
    """Jobs that are counted and followed together; made by `AsyncClient.group` and `AsyncClient.create_group`."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"AsyncGroup({self.name!r})"

    async def expect(self, expected: int, timeout: float | None = None) -> None:
        """As `Group.expect`."""
        deadline = Deadline.after(f"group {self.name}: not created", timeout)
        await self._client._once(expect_steps(self._client.keys, self.name, check_expected(expected), deadline))

    async def submit(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GroupOptions]) -> AsyncJob:
        """As `Group.submit`."""
        return await self._client.submit(prompt, **options, group=self.name)

    async def progress(self, timeout: float | None = None) -> Progress:
        """As `Group.progress`."""
        deadline = Deadline.after(f"group {self.name}: no counts", timeout)
        return await self._client._once(progress_steps(self._client.keys, self.name, deadline))

    def finished(self, after: str = "0", timeout: float | None = None) -> AsyncGenerator[Finished, None]:
        """As `Group.finished`."""
        return self._client._drive(self._following(after, timeout).finished())

    def results(self, after: str = "0", timeout: float | None = None) -> AsyncGenerator[GroupResult, None]:
        """As `Group.results`."""
        return self._client._drive(self._following(after, timeout).results())

    async def cancel(
        self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None
    ) -> dict[str, CancelReply]:
        """As `Group.cancel`."""
        deadline = Deadline.after(f"group {self.name}: not cancelled", timeout)
        return await self._client._once(cancel_group_steps(self._client.keys, self.name, reason, ttl, deadline))

    def _following(self, after: str, timeout: float | None) -> Following:
        client = self._client
        return Following(client.keys, self.name, check_event_id(after, "after"), timeout, client._block_ms)


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
        **params: Unpack[RequestParams],
    ) -> AsyncJob:
        """As `Client.submit`."""
        job = make_submit(
            self.keys,
            prompt,
            priority,
            delay,
            wait,
            timeout,
            messages=messages,
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
        full = await self._once(submit_steps(job))
        if full is not None:
            raise full
        return AsyncJob(self, job.entry.id, known=True)

    def job(self, id: str) -> AsyncJob:
        """As `Client.job`."""
        return AsyncJob(self, check_name("id", id))

    async def status(self, id: str, timeout: float | None = None) -> JobStatus:
        """As `Client.status`."""
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return await self._once(status_steps(self.keys, id, deadline))

    def group(self, name: str | None = None) -> AsyncGroup:
        """As `Client.group`."""
        return AsyncGroup(self, new_id() if name is None else check_name("group", name))

    async def create_group(self, expected: int, name: str | None = None, timeout: float | None = None) -> AsyncGroup:
        """As `Client.create_group`."""
        group = self.group(name)
        await group.expect(expected, timeout)
        return group

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        timeout: float | None = None,
        strict: bool = False,
        **params: Unpack[MapOptions],
    ) -> AsyncGenerator[MapResult, None]:
        """As `Client.map`. To leave the loop early use `contextlib.aclosing`: that cancels the unfinished at once."""
        block_ms = self._block_ms
        work = Window(
            self.keys,
            prompts,
            params,
            window=window,
            ordered=ordered,
            timeout=timeout,
            block_ms=block_ms,
            strict=strict,
        )
        try:
            async with aclosing(self._drive(work.steps())) as results:
                async for result in results:
                    yield result
        finally:
            await self._abandon(list(work.pending))

    async def submit_all(self, entries: Sequence[JobEntry], priority: str = "normal") -> list[EnqueueRefused | None]:
        """As `Client.submit_all`."""
        return await self._once(submit_all_steps(self.keys, entries, priority))

    async def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """As `Client.finished`."""
        block = None if block_ms is None else max(1, min(block_ms, self._block_ms))
        return await self._once(finished_steps(self.keys, group, after, block))

    async def results(self, ids: Sequence[str]) -> list[Result | None]:
        """As `Client.results`."""
        return await self._once(results_steps(self.keys, ids))

    async def states(self, ids: Sequence[str]) -> list[str | None]:
        """As `Client.states`."""
        return await self._once(states_steps(self.keys, ids))

    async def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """As `Client.forget`."""
        await self._once(forget_steps(self.keys, ids, group, entries))

    async def patiently(
        self,
        call: Callable[[], Awaitable[T]],
        deadline: Deadline | None = None,
        outage_s: float = OUTAGE_S,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
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
                await pause(tries.pause(error))
            else:
                self._line.works()
                return reply

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()
        await self._blocking.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel jobs whose results are no longer awaited; a failure is logged, so that it hides no other error."""
        try:
            await self._once(abandon_steps(self.keys, ids))
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs go on: %s; could not cancel them: %s", ", ".join(ids), error)

    async def _once(self, steps: Once[T]) -> T:
        """Carry out the steps of a method that returns a value."""
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = await self._carry_out(step)

    async def _drive(self, steps: Steps[T]) -> AsyncGenerator[T, None]:
        """Carry out the steps of a method that yields values."""
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration:
                return
            reply = None
            if isinstance(step, Emit):
                yield step.value
            else:
                reply = await self._carry_out(step)

    async def _carry_out(self, step: Step) -> Any:
        match step:
            case Pause():
                return await asyncio.sleep(step.seconds)
            case Run():
                return await self.patiently(lambda: self._runner.run_all(step.calls), step.deadline, step.outage_s)
            case Ask():
                return await self.patiently(lambda: self._ask(step), step.deadline, step.outage_s)
            case Exist():
                return await self._exist(step)
            case Get():
                return await self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return await self.patiently(lambda: self._xread(step.streams, step.block_ms), step.deadline)

    async def _ask(self, step: Ask) -> list[Any]:
        pipe = self.redis.pipeline(transaction=step.atomic)
        for command in step.commands:
            pipe.execute_command(*command)
        return list(await pipe.execute())

    async def _exist(self, step: Exist) -> list[bool]:
        asked = Ask([("EXISTS", *keys) for keys in step.groups], step.deadline)
        try:
            return [count > 0 for count in await self._carry_out(asked)]
        except NoPermissionError:  # the role `producer` may not look
            return [True] * len(step.groups)

    async def _xread(self, streams: Mapping[str, str], block_ms: int | None) -> Any:
        asked: dict[Any, Any] = dict(streams)
        reader = self.redis if block_ms is None else self._blocking
        return await reader.xread(asked, count=READ_COUNT, block=block_ms)
