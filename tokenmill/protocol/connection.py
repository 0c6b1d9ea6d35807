"""Builds all Redis clients of the project.

The defaults of redis-py 8 (5 s socket timeout, RESP3, ten retries) each break a worker without an error. So time-outs,
protocol and retries are set here, whatever the URL or the installed version says.

    command_client(url, retries=3) -> redis.Redis             # scripts and short commands, which may be repeated
    blocking_client(url, block_ms=5000) -> redis.Redis        # XREAD / XREADGROUP BLOCK up to block_ms; never retries
    async_client(url, block_ms=0) -> redis.asyncio.Redis      # block_ms > 0: for blocking reads; never retries
    with ends_by(moment): …                                   # no wait for Redis in the block ends later
    redact(url) -> str                                        # for logs

Replies are bytes. `tokenmill.protocol.faults` says which errors are retryable.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import AbstractBackoff, ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from tokenmill.protocol.diagnosis import wrong_protocol
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.url import check_url, redact

__all__ = ["DEFAULT_URL", "async_client", "blocking_client", "command_client", "ends_by", "redact"]

DEFAULT_URL: Final = "redis://localhost:6379/0"
CONNECT_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 10.0
BLOCK_MARGIN_S: Final = 5.0
"""The socket waits this much longer than a blocking read: old servers may answer late."""
RETRIES: Final = 3
MAX_CONNECTIONS: Final = 10_000
"""Each thread or task that waits holds a connection; redis-py 8 allows 100. A URL's `max_connections` overrides it."""

_RECONNECT: Final = (ConnectionError, TimeoutError, *DEMOTED)
"""After these errors redis-py closes the connection, and retries if retries are left."""

_LEAST_S: Final = 0.01
"""Minimum time-out of a socket; 0 would mean not to wait at all."""
_ends_by: ContextVar[float | None] = ContextVar("ends_by", default=None)


@contextmanager
def ends_by(moment: float | None) -> Iterator[None]:
    """End every wait for Redis in the block, connecting included, at this `time.monotonic()` moment.

    The look-up of the host's name in a synchronous client may take longer. None: the usual time-outs.
    """
    token = _ends_by.set(moment)
    try:
        yield
    finally:
        _ends_by.reset(token)


def command_client(url: str = DEFAULT_URL, retries: int = RETRIES) -> redis.Redis:
    """Make a thread-safe client for scripts and short commands.

    Raises:
        ValueError: `url` is not a Redis URL.
    """
    return _client(url, COMMAND_TIMEOUT_S, retries)


def blocking_client(url: str = DEFAULT_URL, block_ms: int = 5000) -> redis.Redis:
    """Make a client for reads that block up to `block_ms`. It never retries: a repeated read could deliver twice."""
    return _client(url, block_ms / 1000 + BLOCK_MARGIN_S, 0)


def async_client(url: str = DEFAULT_URL, block_ms: int = 0, retries: int = RETRIES) -> aioredis.Redis:
    """Make an asyncio client: with `block_ms` for blocking reads (no retries), without it for commands."""
    pool = aioredis.ConnectionPool.from_url(check_url(url), max_connections=MAX_CONNECTIONS)
    timeout = block_ms / 1000 + BLOCK_MARGIN_S if block_ms else COMMAND_TIMEOUT_S
    retry = AsyncRetry(_backoff(), 0 if block_ms else retries, _RECONNECT)
    pool.connection_kwargs.update(_settings(timeout, pool.connection_class), retry=retry)
    pool.connection_class = _mixed(_Async, pool.connection_class, limit_s=timeout)
    return aioredis.Redis.from_pool(pool)


def _client(url: str, timeout_s: float, retries: int) -> redis.Redis:
    pool = redis.ConnectionPool.from_url(check_url(url), max_connections=MAX_CONNECTIONS)
    settings = _settings(timeout_s, pool.connection_class)
    pool.connection_kwargs.update(settings, retry=Retry(_backoff(), retries, _RECONNECT))
    pool.connection_class = _mixed(_Sync, pool.connection_class, limit_s=timeout_s)
    return redis.Redis.from_pool(pool)


def _backoff() -> AbstractBackoff:
    return ExponentialWithJitterBackoff(base=0.05, cap=1.0)


def _settings(timeout_s: float, kind: type) -> dict[str, Any]:
    """Return the arguments of a connection of the class `kind`."""
    settings = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "protocol": 2,
        "decode_responses": False,
    }
    if not issubclass(kind, (redis.UnixDomainSocketConnection, aioredis.UnixDomainSocketConnection)):
        settings["socket_keepalive"] = True  # unix sockets do not take the argument
    return settings


class _Bounded:
    """Mixed into redis-py's connections, so that their time-outs obey `ends_by`."""

    limit_s: float
    """Time-out of one read or write."""

    @property
    def socket_timeout(self) -> float:
        return _left(self.limit_s)

    @socket_timeout.setter
    def socket_timeout(self, _: float) -> None:
        """Ignore the value, which redis-py sets to the pool's setting."""

    @property
    def socket_connect_timeout(self) -> float:
        return _left(CONNECT_TIMEOUT_S)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: float) -> None:
        """Ignore the value, as above."""


class _Sync(_Bounded):
    _sock: socket.socket | None = None

    @property
    def socket_timeout(self) -> float:
        # Before the connection exists, redis-py uses this time-out for the TLS handshake.
        return _left(self.limit_s if self._sock is not None else CONNECT_TIMEOUT_S)

    @socket_timeout.setter
    def socket_timeout(self, _: float) -> None:
        """Ignore the value, as above."""

    def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        if self._sock is not None:
            self._sock.settimeout(self.socket_timeout)
        super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    def connect(self) -> None:
        try:
            super().connect()  # type: ignore[misc]
        except (ConnectionError, TimeoutError) as error:
            if (wrong := wrong_protocol(self, error)) is not None:
                raise wrong from error
            raise


class _Async(_Bounded):
    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[misc]
        except (ConnectionError, TimeoutError) as error:
            if (wrong := await asyncio.to_thread(wrong_protocol, self, error)) is not None:
                raise wrong from error
            raise


def _left(seconds: float) -> float:
    moment = _ends_by.get()
    return seconds if moment is None else min(seconds, max(_LEAST_S, moment - time.monotonic()))


def _mixed(mixin: type, kind: type, **attributes: Any) -> Any:
    return type(kind.__name__, (mixin, kind), attributes)
