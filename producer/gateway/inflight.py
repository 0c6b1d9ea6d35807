"""The requests that wait for a job: what ends such a wait, and which jobs lose their last client.

async with inflight.watch(request.receive) as watch:      # raises Interrupted
    result = await job.result()

claim = await inflight.claim(job_id)                       # a client's interest in a job
claim.release()                                            # the client has its answer
claim.abandon(job, "client disconnected", ttl=630)         # cancels the job, unless another client waits for it
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from redis.exceptions import RedisError
from starlette.types import Receive

from producer.gateway.answers import Answers
from tokenmill.client.handles import AsyncJob

log = structlog.get_logger()

CLOSE_S: Final = 2.0
"""How long a gateway that stops waits for the cancels that it has begun."""
REPEAT_S: Final = 0.25
"""Time after which the cancel of an interrupted wait is repeated."""


class End(enum.StrEnum):
    """Why a wait ended before its job."""

    GONE = "client disconnected"
    STALLED = "client did not read"
    TIMED_OUT = "request timed out"
    CLOSING = "gateway shut down"


class Interrupted(Exception):
    """The wait of a request ended before its job."""

    def __init__(self, end: End) -> None:
        self.end = end
        super().__init__(end.value)


class Watch:
    """The wait of one request; `end` interrupts it.

    The cancel of the task is repeated until the block ends: `asyncio.wait_for`, which redis-py uses, swallows a cancel
    that comes in the same moment as its value.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task, self._loop = task, asyncio.get_running_loop()
        self._before = task.cancelling()
        self._cancels = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self.why: End | None = None

    def end(self, why: End) -> None:
        """Interrupt the block; the first reason counts. Not for the task of the block itself."""
        if self.why is None and not self._over:
            self.why = why
            self._cancel()

    def end_after(self, seconds: float) -> None:
        """Interrupt the block with `TIMED_OUT` after `seconds`."""
        self._timer = self._loop.call_later(seconds, self.end, End.TIMED_OUT)

    def _cancel(self) -> None:
        self._stop()
        self._cancels += 1
        self._task.cancel()
        self._timer = self._loop.call_later(REPEAT_S, self._cancel)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> bool:
        """End the watch; return whether its cancels are the only ones of the task."""
        self._over = True
        self._stop()
        for _ in range(self._cancels):
            self._task.uncancel()
        self._cancels = 0
        return self._task.cancelling() <= self._before


class Claim:
    """The interest of one client in a job; either method ends it, and later calls do nothing."""

    def __init__(self, inflight: InFlight, name: str) -> None:
        self._inflight, self._name = inflight, name
        self._over = False

    def release(self) -> bool:
        """Let the job go on; return whether no other client of this gateway waits for it."""
        if self._over:
            return False
        self._over = True
        return self._inflight.leave(self._name)

    def abandon(self, job: AsyncJob, reason: str, ttl: float) -> bool:
        """Cancel the job in the background, unless another client of this gateway waits for it.

        Args:
            reason: kept in the job's result.
            ttl: seconds in which the job would end by itself: how long the cancel is tried, and kept by Redis.

        Returns:
            Whether the job is cancelled.
        """
        last = self.release()
        if last:
            self._inflight.cancel(self._name, job, reason, ttl)
        return last


class InFlight:
    """The waits and claims of one gateway.

    Args:
        deadline: set when the time of a graceful shutdown is over: all waits end then.
    """

    def __init__(self, deadline: asyncio.Event) -> None:
        self.answers = Answers()
        """The large answers that are being sent."""
        self._deadline = deadline
        self._watches: set[Watch] = set()
        self._claims: dict[str, int] = {}
        self._cancels: dict[asyncio.Task[None], str] = {}
        """Cancels that are under way → name of the job."""
        self._closer: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self, receive: Receive, timeout: float | None = None) -> AsyncIterator[Watch]:
        """End the block when the client goes away, or the time of a graceful shutdown is over.

        Args:
            receive: the ASGI channel of the request, whose body was read.
            timeout: seconds after which the block ends, too.

        Raises:
            Interrupted: the block was ended.
        """
        task = asyncio.current_task()
        assert task is not None
        watch = Watch(task)
        listener = asyncio.create_task(_listen(receive, watch))
        try:
            self._begin(watch)
            if timeout is not None and watch.why is None:
                watch.end_after(timeout)
            yield watch
        except asyncio.CancelledError:
            if watch.close() and watch.why is not None:
                raise Interrupted(watch.why) from None
            raise
        finally:
            watch.close()
            listener.cancel()
            self._watches.discard(watch)

    def _begin(self, watch: Watch) -> None:
        self._watches.add(watch)
        if self._deadline.is_set():
            asyncio.get_running_loop().call_soon(watch.end, End.CLOSING)
        elif self._closer is None:
            self._closer = asyncio.create_task(self._close_watches())

    async def _close_watches(self) -> None:
        await self._deadline.wait()
        for watch in list(self._watches):
            watch.end(End.CLOSING)

    async def claim(self, name: str) -> Claim:
        """Count a client of a job. A cancel of the job that is under way is finished first.

        Args:
            name: the job's id without its generation.
        """
        self._claims[name] = self._claims.get(name, 0) + 1
        if cancels := [task for task, of in self._cancels.items() if of == name]:
            try:
                await asyncio.wait(cancels)
            except BaseException:
                self.leave(name)
                raise
        return Claim(self, name)

    def leave(self, name: str) -> bool:
        """Count a client of a job as gone; return whether it was the last."""
        left = self._claims.pop(name) - 1
        if left:
            self._claims[name] = left
        return not left

    def cancel(self, name: str, job: AsyncJob, reason: str, ttl: float) -> None:
        """Cancel a job in the background; see `Claim.abandon`."""
        task = asyncio.create_task(_cancel(job, reason, ttl))
        self._cancels[task] = name
        task.add_done_callback(lambda task: self._cancels.pop(task, None))

    async def close(self) -> None:
        """Finish the cancels that were begun, for `CLOSE_S` at most."""
        if self._closer is not None:
            self._closer.cancel()
        if self._cancels:
            _, late = await asyncio.wait(list(self._cancels), timeout=CLOSE_S)
            for task in late:
                task.cancel()


async def _listen(receive: Receive, watch: Watch) -> None:
    """Wait until the client goes away; what it still sends is dropped."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:  # a faulty rest of a body: the client cannot be served
        log.debug("request_broken", exc_info=True)
    watch.end(End.GONE)


async def _cancel(job: AsyncJob, reason: str, ttl: float) -> None:
    try:
        reply = await job.cancel(reason, ttl=max(1, round(ttl)), timeout=ttl)
        log.info("job_abandoned", id=job.id, reason=reason, reply=reply.value)
    except (RedisError, TimeoutError) as error:
        log.warning("job_not_cancelled", id=job.id, reason=reason, message=str(error))
