"""Whether Redis answers, so that a request fails at once while it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

import structlog
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from tokenmill.protocol.connection import command_client, ends_by, redact

log = structlog.get_logger()

PING_SECONDS: Final = 1.0
"""Time between two pings of Redis, and the time in which each must be answered."""
REDIS_SECONDS: Final = 10.0
"""How long a request waits for a Redis that answers pings; a running stream waits longer."""


class RedisWatch:
    """Pings Redis, and ends what waits for it as soon as it is away. For one event loop.

    The pings come from a thread: a burst of requests can keep the event loop busy for seconds, and must not look like a
    Redis that is away.
    """

    def __init__(self, url: str) -> None:
        """Create a watch that takes Redis for present until `run` knows better."""
        self.up = True
        """Whether Redis answered the last ping."""
        self._url = url
        self._client = command_client(url, retries=0)
        self._thread = ThreadPoolExecutor(1, "redis-watch")
        self._waits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block when Redis is found to be away, or after `REDIS_SECONDS`.

        Raises:
            TimeoutError: the block was ended. A command that writes may have been carried out.
        """
        if not self.up:
            raise TimeoutError("Redis is away")
        async with asyncio.timeout(REDIS_SECONDS) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    async def run(self) -> None:
        """Ping Redis each second, for ever, and keep `up`."""
        loop, silent = asyncio.get_running_loop(), 0
        while True:
            started = time.monotonic()
            error = await loop.run_in_executor(self._thread, self._ping)
            # Silent once: perhaps the machine was too busy.
            silent = silent + 1 if isinstance(error, RedisTimeout) else 0
            if error is None:
                self._note(True)
            elif silent != 1:
                self._note(False, str(error))
            await asyncio.sleep(max(0.05, PING_SECONDS - (time.monotonic() - started)))

    def _ping(self) -> Exception | None:
        try:
            with ends_by(time.monotonic() + PING_SECONDS):
                self._client.ping()
        except (RedisError, OSError) as error:
            return error
        return None

    def _note(self, up: bool, message: str = "") -> None:
        if up == self.up:
            return
        self.up = up
        if up:
            log.info("redis_back", url=redact(self._url))
            return
        log.warning("redis_away", url=redact(self._url), message=message or "no answer")
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    def close(self) -> None:
        """Close the connection, without waiting for a ping that is under way."""
        self._thread.shutdown(wait=False)
        self._client.close()
