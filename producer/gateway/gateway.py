"""What the requests of one gateway share: settings, client, keys, rates, workers, files, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from producer.files.storage import Storage
from producer.gateway.inflight import InFlight
from producer.gateway.keys import KeyRing
from producer.gateway.metrics import Metrics
from producer.gateway.rates import Rates
from producer.gateway.redis_watch import RedisWatch
from producer.gateway.settings import GatewaySettings
from producer.gateway.workers import LiveWorkers
from tokenmill.client.aio import AsyncClient
from tokenmill.openai.errors import ApiError

log = structlog.get_logger()

RETRY_SECONDS: Final = 2.0
"""`Retry-After` while Redis is away."""


@dataclass
class Gateway:
    """The parts of a gateway. Handlers get it with `requests.gateway_of`."""

    settings: GatewaySettings
    client: AsyncClient
    metrics: Metrics = field(default_factory=Metrics)
    keys: KeyRing | None = None
    """The API keys; None: requests need no key."""
    rates: Rates = field(init=False)
    """Requests and tokens a minute of each key."""
    workers: LiveWorkers = field(init=False)
    """The live workers of the queue."""
    storage: Storage | None = None
    """Files and batches; None without --files."""
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway shuts down: no new request is served."""
    deadline: asyncio.Event = field(default_factory=asyncio.Event)
    """Set --drain-seconds after `drain`: running requests end now; their jobs go on."""
    redis: RedisWatch = field(init=False)
    """Whether Redis answers."""
    inflight: InFlight = field(init=False)
    """The requests that wait for a job."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.inflight = InFlight(self.deadline)
        self.redis = RedisWatch(self.settings.redis)
        self.rates = Rates(self.client)
        self.workers = LiveWorkers(self.client, self.settings.worker_timeout, self.redis.limit)

    def require_redis(self) -> None:
        """Raise the error of a request that needs Redis, if Redis does not answer.

        Raises:
            ApiError: 503, with `Retry-After`.
        """
        if not self.redis.up:
            raise redis_away()

    @asynccontextmanager
    async def redis_limit(self) -> AsyncIterator[None]:
        """End the commands of the block with status 503 if Redis is away or too slow; see `RedisWatch.limit`.

        Raises:
            ApiError: 503. A command that writes may have been carried out.
        """
        try:
            async with self.redis.limit():
                yield
        except TimeoutError as error:
            raise redis_away() from error

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Run a coroutine in the background until it ends or the gateway stops; log its error under `name`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_failed", task=task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Finish the cancels of jobs, cancel the other background tasks and close the connections."""
        await self.inflight.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()
        self.redis.close()


def redis_away() -> ApiError:
    """Return the error of a request that Redis did not answer."""
    return ApiError(503, "Redis does not answer; try again later.", code="redis_unavailable", retry_after=RETRY_SECONDS)
