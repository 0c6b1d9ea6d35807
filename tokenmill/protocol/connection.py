"""The only place that builds Redis clients.

redis-py 8 changed its defaults (5 s socket timeout, RESP3, ten retries), each of which breaks a worker in a quiet way.
So time-outs, protocol and retries are set here, whatever the URL or the installed version says.

    command_client(url, retries=3) -> redis.Redis             # scripts, short commands: ours may be repeated
    blocking_client(url, block_ms=5000) -> redis.Redis        # XREAD / XREADGROUP BLOCK up to block_ms; never retries
    async_client(url, block_ms=0) -> redis.asyncio.Redis      # block_ms > 0: for blocking reads; never retries
    with ends_by(moment): …                                   # no command within it outlasts the moment
    redact(url) -> str                                        # for logs

Replies are bytes. Which errors mean "try again later" is said in `tokenmill.protocol.faults`.
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
"""A blocking read may overrun its time-out on old servers; the socket waits this much longer."""
RETRIES: Final = 3
MAX_CONNECTIONS: Final = 10_000
"""Each wait in a thread or task of its own holds one; redis-py 8 stops at 100. A URL's `max_connections` goes first."""

_RECONNECT: Final = (ConnectionError, TimeoutError, *DEMOTED)
"""After one of these redis-py drops the connection, whether it may try again or not."""

_LEAST_S: Final = 0.01
"""A socket's time-out is never 0, which would mean not to wait at all."""
_ends_by: ContextVar[float | None] = ContextVar("ends_by", default=None)


@contextmanager
def ends_by(moment: float | None) -> Iterator[None]:
    """Let every wait for Redis within the block, the connecting too, end by this `time.monotonic()` moment.

    What it cannot cut short is a synchronous client's look-up of the host's name. None: the usual time-outs.
    """
    token = _ends_by.set(moment)
    try:
        yield
    finally:
        _ends_by.reset(token)


def command_client(url: str = DEFAULT_URL, retries: int = RETRIES) -> redis.Redis:
    """A thread-safe client for scripts and short commands.

    Raises:
        ValueError: not a Redis URL.
    """
    return _client(url, COMMAND_TIMEOUT_S, retries)


def blocking_client(url: str = DEFAULT_URL, block_ms: int = 5000) -> redis.Redis:
    """A client for reads that block up to `block_ms`. It never retries: a repeated read could deliver twice."""
    return _client(url, block_ms / 1000 + BLOCK_MARGIN_S, 0)


def async_client(url: str = DEFAULT_URL, block_ms: int = 0, retries: int = RETRIES) -> aioredis.Redis:
    """The asyncio client; with `block_ms` for blocking reads (no retries), without it for commands."""
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
    """Return our arguments of a connection of the class `kind`."""
    settings = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "protocol": 2,
        "decode_responses": False,
    }
    if not issubclass(kind, (redis.UnixDomainSocketConnection, aioredis.UnixDomainSocketConnection)):
        settings["socket_keepalive"] = True  # TCP's; the others do not take the argument
    return settings


class _Bounded:
    """Mixed into redis-py's connections, so that they keep to `ends_by`."""

    limit_s: float
    """For one read or write."""

    @property
    def socket_timeout(self) -> float:
        return _left(self.limit_s)

    @socket_timeout.setter
    def socket_timeout(self, _: float) -> None:
        """Set by redis-py to what it knows from us."""

    @property
    def socket_connect_timeout(self) -> float:
        return _left(CONNECT_TIMEOUT_S)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: float) -> None:
        """As above."""


class _Sync(_Bounded):
    _sock: socket.socket | None = None

    @property
    def socket_timeout(self) -> float:
        # Before there is a connection redis-py takes it for TLS' handshake.
        return _left(self.limit_s if self._sock is not None else CONNECT_TIMEOUT_S)

    @socket_timeout.setter
    def socket_timeout(self, _: float) -> None:
        """As above."""

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
