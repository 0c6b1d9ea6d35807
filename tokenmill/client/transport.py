"""Carries out the steps of `tokenmill.client.core` over connections to Redis, for both clients."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.exceptions import NoPermissionError, RedisError

from tokenmill.client.core import (
    BLOCK_MS,
    Ask,
    Emit,
    Exist,
    Get,
    Once,
    Pause,
    Read,
    Run,
    Scan,
    Step,
    Steps,
    abandon_steps,
)
from tokenmill.client.patience import BRIEF_S, OUTAGE_S, Deadline, Line, Tries
from tokenmill.protocol.connection import DEFAULT_URL, async_client, blocking_client, command_client, ends_by
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.lua import AsyncRunner, Runner
from tokenmill.protocol.workers import Roster

T = TypeVar("T")
log = logging.getLogger(__name__)
SCAN_COUNT = 1000
"""Keys that Redis looks at in one SCAN."""

_trying: ContextVar[bool] = ContextVar("trying", default=False)
"""Whether this is called inside `Client.patiently`."""


class Transport:
    """Connections of `Client`: carries out steps, and retries while Redis is away."""

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
        self._roster = Roster()

    def patiently(
        self,
        call: Callable[[], T],
        deadline: Deadline | None = None,
        outage_s: float = OUTAGE_S,
        pause: Callable[[float], object] = time.sleep,
    ) -> T:
        """Call an idempotent function that uses Redis, and retry while Redis is away; return its value.

        Within another `patiently` the function is called once: the outer call retries all of it.

        Args:
            deadline: deadline of the whole call; if it has no time-out, `outage_s` limits the retries.
            outage_s: seconds from the first failure after which the last error is raised.
            pause: sleeps between two tries.

        Raises:
            TimeoutError: the deadline is over.
            redis.RedisError: Redis stayed away, or refuses the command.
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
        """Close the connections."""
        self.redis.close()
        self._blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel the unfinished jobs of a `map` that was left early.

        A failure is logged, not raised, so that it does not hide the error that ended the `map`.
        """
        try:
            self._once(abandon_steps(self.keys, ids))
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs keep running: %s; could not cancel them: %s", ", ".join(ids), error)

    def _once(self, steps: Once[T]) -> T:
        """Carry out the steps of a method that returns a value."""
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = self._carry_out(step)

    def _drive(self, steps: Steps[T]) -> Iterator[T]:
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
                reply = self._carry_out(step)

    def _carry_out(self, step: Step) -> Any:
        match step:
            case Pause():
                return time.sleep(step.seconds)
            case Run():
                return self.patiently(lambda: self._runner.run_all(step.calls), step.deadline, step.outage_s)
            case Ask():
                return self.patiently(lambda: self._ask(step), step.deadline, step.outage_s)
            case Exist():
                return self._exist(step)
            case Scan():
                return self._scan(step)
            case Get():
                return self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return self.patiently(lambda: self._xread(step), step.deadline)

    def _ask(self, step: Ask) -> list[Any]:
        pipe = self.redis.pipeline(transaction=step.atomic)
        for command in step.commands:
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        return list(pipe.execute())

    def _exist(self, step: Exist) -> list[bool]:
        asked = Ask([("EXISTS", *keys) for keys in step.groups], step.deadline)
        try:
            return [count > 0 for count in self._carry_out(asked)]
        except NoPermissionError:  # the role `producer` has no right to EXISTS
            return [True] * len(step.groups)

    def _scan(self, step: Scan) -> list[bytes]:
        try:
            return self.patiently(
                lambda: list(self.redis.scan_iter(match=step.pattern, count=SCAN_COUNT)), step.deadline, BRIEF_S
            )
        except NoPermissionError:  # most roles have no right to SCAN
            return []

    def _xread(self, step: Read) -> Any:
        asked: dict[Any, Any] = dict(step.streams)
        reader = self.redis if step.block_ms is None else self._blocking
        return reader.xread(asked, count=step.limit, block=step.block_ms)


class AsyncTransport:
    """Connections of `AsyncClient`: carries out steps, and retries while Redis is away."""

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
        self._roster = Roster()

    async def patiently(
        self,
        call: Callable[[], Awaitable[T]],
        deadline: Deadline | None = None,
        outage_s: float = OUTAGE_S,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> T:
        """Same as `Client.patiently`, but calls must not be nested."""
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
        """Cancel the unfinished jobs of a `map` that was left early.

        A failure is logged, not raised, so that it does not hide the error that ended the `map`.
        """
        try:
            await self._once(abandon_steps(self.keys, ids))
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs keep running: %s; could not cancel them: %s", ", ".join(ids), error)

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
            case Scan():
                return await self._scan(step)
            case Get():
                return await self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return await self.patiently(lambda: self._xread(step), step.deadline)

    async def _ask(self, step: Ask) -> list[Any]:
        pipe = self.redis.pipeline(transaction=step.atomic)
        for command in step.commands:
            pipe.execute_command(*command)
        return list(await pipe.execute())

    async def _exist(self, step: Exist) -> list[bool]:
        asked = Ask([("EXISTS", *keys) for keys in step.groups], step.deadline)
        try:
            return [count > 0 for count in await self._carry_out(asked)]
        except NoPermissionError:  # the role `producer` has no right to EXISTS
            return [True] * len(step.groups)

    async def _scan(self, step: Scan) -> list[bytes]:
        async def scan() -> list[bytes]:
            return [key async for key in self.redis.scan_iter(match=step.pattern, count=SCAN_COUNT)]

        try:
            return await self.patiently(scan, step.deadline, BRIEF_S)
        except NoPermissionError:
            return []

    async def _xread(self, step: Read) -> Any:
        asked: dict[Any, Any] = dict(step.streams)
        reader = self.redis if step.block_ms is None else self._blocking
        return await reader.xread(asked, count=step.limit, block=step.block_ms)
