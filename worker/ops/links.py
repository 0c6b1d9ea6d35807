"""The line to Redis: is it up, since when, what time is it there, and which of its errors will pass."""

from __future__ import annotations

import time
from collections import Counter

import redis
import structlog
from redis.exceptions import ResponseError

from tokenmill.protocol.faults import transient

log = structlog.get_logger()

REPEAT_SECONDS = 30.0
"""How often a new outage is worth a line."""


def passing(error: redis.RedisError) -> bool:
    """Whether the same command may work later; the rule is the clients' as well."""
    return transient(error)


def no_group(error: redis.RedisError) -> bool:
    """Whether the streams or their group are gone: Redis was flushed, or came back empty."""
    words = ("NOGROUP", "no longer exists", "requires the key to exist")  # the last one is fakeredis' word for it
    return isinstance(error, ResponseError) and any(word in str(error) for word in words)


class RedisClock:
    """Redis' clock seen from here: `time.monotonic()` plus an offset, so that no two hosts' clocks are compared."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def sync(self, seconds: int, micros: int, sent: float, received: float) -> None:
        """Take in a reply of TIME, with the `time.monotonic()` moments around it."""
        self._offset = seconds + micros / 1e6 - (sent + received) / 2

    def deadline(self, entry_ms: int, ttl_ms: int) -> float:
        """The `time.monotonic()` moment at which a budget counted from an entry ID runs out."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return (entry_ms + ttl_ms) / 1000 - self._offset

    def now_ms(self) -> int:
        """Redis' time, in ms since the epoch."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised")
        return round((time.monotonic() + self._offset) * 1000)


class Contact:
    """Since when Redis has answered without a break. An outage is logged once, however many threads meet it."""

    def __init__(self) -> None:
        self.last_ok = 0.0
        """`time.monotonic()` of its last answer that was noted."""
        self.errors: Counter[str] = Counter()
        """Failures, by what for; each kind is counted by one thread."""
        self._since: float | None = None
        self._lost_at: float | None = None
        self._told_at: float | None = None
        self._told = False

    def ok(self) -> None:
        """Redis answered."""
        self.last_ok = time.monotonic()
        if self._since is None:
            self._since = time.monotonic()
            if self._told and self._lost_at is not None:
                log.info("redis_back", after_seconds=round(self._since - self._lost_at, 1))

    def failed(self, doing: str, error: Exception) -> None:
        """Redis could not do something now."""
        self.errors[doing] += 1
        told = False
        if self._since is not None or self._lost_at is None:
            self._lost_at = now = time.monotonic()
            # A full Redis does some things and not others: that is one piece of news, not one a second.
            told = self._told = self._told_at is None or now - self._told_at >= REPEAT_SECONDS
            self._told_at = now if told else self._told_at
        (log.warning if told else log.debug)("redis_unreachable", doing=doing, message=str(error))
        self._since = None

    @property
    def up(self) -> bool:
        return self._since is not None

    def lasted(self) -> float:
        """Seconds of uninterrupted contact."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
