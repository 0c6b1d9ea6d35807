"""When a command of a client is retried, and for how long. No I/O here.

A command that fails with a retryable error is tried again until the call's time-out. A call without a time-out gives up
once Redis has been away for `OUTAGE_S`, counted from the first failure of the command: time that the call waited before
does not count. All commands are idempotent: reads change nothing, the script knows a repeated enqueue by its nonce, and
a repeated cancel finds the job ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from redis.exceptions import RedisError

from tokenmill.protocol.errors import TokenmillError
from tokenmill.protocol.faults import answered, misdirected, transient
from tokenmill.protocol.keys import RESULT_TTL_S

log = logging.getLogger(__name__)

OUTAGE_S: Final = 300.0
"""How long a wait without a time-out tolerates an outage of Redis."""
BRIEF_S: Final = 30.0
"""The same for a single question, such as a cancel, and for a client that has never reached its Redis."""
AT_ONCE_S: Final = 3.0
"""The same for a `submit` without `wait`."""
LEAST_S: Final = 1.0
"""Minimum time for one try, connecting included: with a time-out of 0 Redis is asked once."""
MARGIN_S: Final = 0.5
"""How much later than the time-out the reply of a blocking read may come."""
QUIET_S: Final = 1.0
"""A shorter outage is not logged."""


def backoff() -> Generator[float, None, None]:
    """Yield the seconds to wait between tries: doubling, at most 1."""
    pause = 0.02
    while True:
        yield pause
        pause = min(1.0, pause * 2)


class WaitTimeout(TokenmillError, TimeoutError):
    """The `timeout` of a call is over; `__cause__` is the last error of Redis, if there was an error."""


@dataclass(frozen=True)
class Deadline:
    """When a call ends; without a time-out, after the default lifetime of a result."""

    what: str
    """The beginning of the error's message, such as `job 7f3a: not finished`."""
    timeout: float | None
    """Seconds, as the caller passed it."""
    end: float
    """Moment of `time.monotonic()`."""

    @classmethod
    def after(cls, what: str, timeout: float | None) -> Deadline:
        """Return the deadline of a call that begins now. An infinite `timeout` outlives every outage.

        Raises:
            ValueError: `timeout` is NaN.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout: must be a number of seconds, or None")
        return cls(what, timeout, time.monotonic() + (RESULT_TTL_S if timeout is None else timeout))

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.end - time.monotonic())

    def block_ms(self, most: int) -> int:
        """Return how many milliseconds the next read may block, at most `most`.

        Raises:
            TimeoutError: the deadline is over.
        """
        left = self.left
        if left <= 0:
            raise self.missed()
        return max(1, int(min(most, left * 1000 + 1)))

    def missed(self, error: Exception | None = None) -> TimeoutError:
        """Return the error of a call whose deadline is over; `error`: the last error of Redis."""
        seconds = RESULT_TTL_S if self.timeout is None else self.timeout
        reason = "" if error is None else f"; the last error: {error}"
        return WaitTimeout(f"{self.what} within {seconds:g} s{reason}")


class Line:
    """Whether Redis has answered this client, and whether its outage is logged.

    Args:
        fail_fast: raise at once if Redis cannot be reached by the client's first command, instead of waiting for it.
    """

    def __init__(self, fail_fast: bool = False) -> None:
        self.fail_fast = fail_fast
        self.reached = False
        """Redis has answered at least once."""
        self.noted = False
        """The present outage was logged."""

    def works(self) -> None:
        """Note that Redis has answered."""
        self.reached, self.noted = True, False


class Tries:
    """The tries of one command.

    Args:
        deadline: deadline of the call; if it has no time-out, `outage_s` limits the tries.
        outage_s: seconds from the first failure after which the last error is raised.
    """

    def __init__(self, line: Line, deadline: Deadline | None, outage_s: float) -> None:
        self._line, self._outage_s = line, outage_s
        self._deadline = deadline if deadline is not None and deadline.timeout is not None else None
        self._failed_at: float | None = None
        self._pauses = backoff()

    @property
    def ends_by(self) -> float | None:
        """The `time.monotonic()` moment at which the next try is given up; None: at the usual time-outs."""
        if self._deadline is None:
            return None
        return time.monotonic() + max(LEAST_S, self._deadline.left + MARGIN_S)

    def pause(self, error: RedisError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            TimeoutError: the call's deadline is over.
            redis.RedisError: `error` itself: it is not retryable, or Redis has been away for too long.
        """
        now, pause, line = time.monotonic(), next(self._pauses), self._line
        if answered(error):
            line.reached = True
        if not transient(error) or (not line.reached and (line.fail_fast or misdirected(error))):
            raise error
        if self._failed_at is None:
            self._failed_at = now
        give_up = self._failed_at + (self._outage_s if line.reached else min(self._outage_s, BRIEF_S))
        if self._deadline is not None:
            give_up = self._deadline.end
            if now >= give_up:
                raise self._deadline.missed(error) from error
        elif now >= give_up:
            raise error
        if now - self._failed_at > QUIET_S and not line.noted:
            line.noted = True
            log.warning("waiting for Redis, up to %.0f s: %s", give_up - self._failed_at, error)
        return min(pause, give_up - now)
