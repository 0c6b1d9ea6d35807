"""The only place that builds Redis clients.

redis-py 8 changed its defaults (5 s socket timeout, RESP3, ten retries), each of which breaks a worker in a quiet way.
So time-outs, protocol and retries are set here, whatever the URL or the installed version says.

    command_client(url) -> redis.Redis                    # scripts, short commands; retries: ours are idempotent
    blocking_client(url, block_ms=5000) -> redis.Redis    # XREAD / XREADGROUP BLOCK up to block_ms; never retries
    async_client(url, block_ms=0) -> redis.asyncio.Redis  # block_ms > 0: for blocking reads
    redact(url) -> str                                    # for logs

Replies are bytes. `REDIS_DOWN` are the errors that mean "try again later".
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, ReadOnlyError, TimeoutError
from redis.retry import Retry

DEFAULT_URL: Final = "redis://localhost:6379/0"
CONNECT_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 10.0
BLOCK_MARGIN_S: Final = 5.0
"""A blocking read may overrun its time-out on old servers; the socket waits this much longer."""
RETRIES: Final = 3
MAX_CONNECTIONS: Final = 10_000
"""Each wait in a thread or task of its own holds one; redis-py 8 stops at 100. A URL's `max_connections` goes first."""

REDIS_DOWN: Final = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError)


def command_client(url: str = DEFAULT_URL, retries: int = RETRIES) -> redis.Redis:
    """A thread-safe client for scripts and short commands.

    Raises:
        ValueError: not a Redis URL.
    """
    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries) if retries else Retry(NoBackoff(), 0)
    pool = redis.ConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS)
    pool.connection_kwargs.update(_settings(COMMAND_TIMEOUT_S), retry=retry)
    return redis.Redis.from_pool(pool)


def blocking_client(url: str = DEFAULT_URL, block_ms: int = 5000) -> redis.Redis:
    """A client for reads that block up to `block_ms`. It never retries: a repeated read could deliver twice."""
    pool = redis.ConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS)
    pool.connection_kwargs.update(_settings(block_ms / 1000 + BLOCK_MARGIN_S), retry=Retry(NoBackoff(), 0))
    return redis.Redis.from_pool(pool)


def async_client(url: str = DEFAULT_URL, block_ms: int = 0) -> aioredis.Redis:
    """The asyncio client; with `block_ms` for blocking reads (no retries), without it for commands."""
    timeout = block_ms / 1000 + BLOCK_MARGIN_S if block_ms else COMMAND_TIMEOUT_S
    backoff = NoBackoff() if block_ms else ExponentialWithJitterBackoff(base=0.05, cap=1.0)
    pool = aioredis.ConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS)
    pool.connection_kwargs.update(_settings(timeout), retry=AsyncRetry(backoff, 0 if block_ms else RETRIES))
    return aioredis.Redis.from_pool(pool)


def _settings(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_keepalive": True,
        "protocol": 2,
        "decode_responses": False,
    }


def redact(url: str) -> str:
    """`url` without its password and query."""
    parts = urlsplit(url)
    if parts.password is None:
        return url.partition("?")[0]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}", query=""))
