"""The contact with Redis: whether it answers, since when, its clock, and which of its errors are retryable."""

from __future__ import annotations

import time
from collections import Counter

import redis
import structlog

from tokenmill.protocol.faults import transient

log = structlog.get_logger()

REPEAT_SECONDS = 30.0
"""Minimum time between two warnings about an outage."""


def passing(error: redis.RedisError) -> bool:
    """Return whether an error is retryable: the same command may succeed later. Clients follow the same rule."""
    return transient(error)


class RedisClock:
    """Redis' clock as `time.monotonic()` plus an offset, so that the clocks of two hosts are never compared."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def sync(self, seconds: int, micros: int, sent: float, received: float) -> None:
        """Set the clock from a reply of TIME; `sent`, `received`: `time.monotonic()` before and after the command."""
        self._offset = seconds + micros / 1e6 - (sent + received) / 2

    def deadline(self, entry_ms: int, ttl_ms: int) -> float:
        """Return the `time.monotonic()` moment `ttl_ms` after an entry was added; `entry_ms`: the time in its ID."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return (entry_ms + ttl_ms) / 1000 - self._offset

    def now_ms(self) -> int:
        """Return Redis' time in ms since the epoch."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return round((time.monotonic() + self._offset) * 1000)


class Contact:
    """How long Redis has answered without a failure. An outage is logged once, however many threads notice it."""

    def __init__(self) -> None:
        self.last_ok = 0.0
        """`time.monotonic()` of the last call of `ok`."""
        self.errors: Counter[str] = Counter()
        """Purpose of the command → failures; each purpose is counted by one thread."""
        self._since: float | None = None
        self._lost_at: float | None = None
        self._warned_at: float | None = None
        self._warned = False

    def ok(self) -> None:
        """Note that Redis answered."""
        self.last_ok = time.monotonic()
        if self._since is None:
            self._since = time.monotonic()
            if self._warned and self._lost_at is not None:
                log.info("redis_back", after_seconds=round(self._since - self._lost_at, 1))

    def failed(self, doing: str, error: Exception) -> None:
        """Note that Redis could not be reached, or refused a command for now; `doing`: the purpose of the command."""
        self.errors[doing] += 1
        warn = False
        if self._since is not None or self._lost_at is None:
            self._lost_at = now = time.monotonic()
            # A full Redis accepts some commands and refuses others: without this there would be a warning every second.
            warn = self._warned = self._warned_at is None or now - self._warned_at >= REPEAT_SECONDS
            self._warned_at = now if warn else self._warned_at
        (log.warning if warn else log.debug)("redis_unreachable", doing=doing, message=str(error))
        self._since = None

    @property
    def up(self) -> bool:
        """Whether the last command that was noted succeeded."""
        return self._since is not None

    def lasted(self) -> float:
        """Return the seconds since the last failure; 0 during an outage."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
