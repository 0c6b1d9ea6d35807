"""The live workers of the queue, and the models that they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Final

from redis.exceptions import RedisError

from producer.gateway.redis_watch import REDIS_SECONDS
from tokenmill.client.aio import AsyncClient
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.errors import clean
from tokenmill.protocol.workers import WorkerInfo

CACHE_SECONDS: Final = 1.0
"""How long the list of workers is used before Redis is asked again."""
POLL_SECONDS: Final = 0.25
"""The same while a request waits for a worker."""
RETRY_SECONDS: Final = 5.0
"""`Retry-After` of a queue without a worker."""


class LiveWorkers:
    """The workers of a gateway's queue; requests share one look at Redis. For one event loop.

    Args:
        worker_timeout: seconds that `require` waits for a worker.
        limit: makes a context that ends a wait for Redis with a `TimeoutError`.
    """

    def __init__(
        self,
        client: AsyncClient,
        worker_timeout: float,
        limit: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._limit = limit
        self._client, self._worker_timeout = client, worker_timeout
        self._found: tuple[WorkerInfo, ...] = ()
        self._found_at: float | None = None
        self._asking: asyncio.Task[tuple[WorkerInfo, ...]] | None = None
        """The present look at Redis; its answer or error is that of all requests that wait for it."""

    async def live(self, max_age: float = CACHE_SECONDS) -> tuple[WorkerInfo, ...]:
        """Return the live workers, as they were at most `max_age` seconds ago.

        Raises:
            redis.RedisError, TimeoutError: Redis is away.
        """
        if self._found_at is not None and time.monotonic() - self._found_at <= max_age:
            return self._found
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(_retrieve)
        async with self._limit():
            return await asyncio.shield(self._asking)

    async def _ask(self) -> tuple[WorkerInfo, ...]:
        now = time.monotonic()
        self._found = await self._client.workers(timeout=REDIS_SECONDS)
        self._found_at = now
        return self._found

    async def models(self) -> list[str]:
        """Return the names of all served models, ordered.

        Raises:
            redis.RedisError, TimeoutError: Redis is away.
        """
        return served(await self.live())

    async def model_of(self, worker: str) -> str:
        """Return the name that a worker gives its model in results; of an unknown worker, that of another one."""
        with suppress(RedisError, TimeoutError):
            await self.live()
        loaded = [one for one in self._found if one.models]
        return min(loaded, key=lambda one: one.name != worker).models[0] if loaded else ""

    async def require(self, model: str | None, *, wait: bool = True) -> None:
        """Check that a live worker serves a model; None stands for any model.

        Without a worker that serves anything, wait for one up to `worker_timeout` seconds.

        Args:
            wait: False accepts a queue without workers at once: the job waits in the queue.

        Raises:
            ApiError: 404 `model_not_found`: workers live, and none serves the model. 503 `no_worker`: no worker came.
            redis.RedisError, TimeoutError: Redis is away.
        """
        end = time.monotonic() + self._worker_timeout
        models = await self.models()
        while not models and wait:
            left = end - time.monotonic()
            if left <= 0:
                message = f"No worker serves queue {self._client.keys.queue} now; try again later."
                raise ApiError(503, message, code="no_worker", retry_after=RETRY_SECONDS)
            await asyncio.sleep(min(left, POLL_SECONDS))
            models = served(await self.live(POLL_SECONDS))
        if models and model is not None and model not in models:
            raise unknown_model(model, models)


def _retrieve(task: asyncio.Task[tuple[WorkerInfo, ...]]) -> None:
    """Keep asyncio from logging an error that no request waits for any more."""
    if not task.cancelled():
        task.exception()


def served(workers: tuple[WorkerInfo, ...]) -> list[str]:
    """Return the names of the models that workers serve, ordered. A worker that starts or is broken serves none."""
    return sorted({name for worker in workers if worker.fields.get("status") != "broken" for name in worker.models})


def unknown_model(model: str, models: list[str]) -> ApiError:
    """Return the error for a model that is not among the served `models`."""
    known = f"served: {', '.join(models)}" if models else "no model is served now"
    return ApiError(
        404, f"The model {clean(model, 256)!r} does not exist; {known}.", code="model_not_found", param="model"
    )
