"""How long a call waits, and when it tries again: the one rule of both clients. No I/O here.

A command that fails with an error that passes by itself is tried again until the call's time-out. A call without one
gives up where Redis stayed away for `OUTAGE_S`, counted from the command's first failure: what was waited for before
does not count. All commands may be repeated: reads change nothing, a repeated enqueue is known by its nonce, and a
repeated cancel finds the job ended.
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
"""How long a wait without a time-out of its own outlives a Redis that is away."""
BRIEF_S: Final = 30.0
"""The same for what asks once, such as a cancel, and for a client that has never reached its Redis."""
AT_ONCE_S: Final = 3.0
"""The same for a submit that is not to wait."""
LEAST_S: Final = 1.0
"""What is asked of Redis may take so long however short the time-out is, the connecting too: 0 is to ask once."""
MARGIN_S: Final = 0.5
"""A blocking read ends with the time-out; its reply may come so much later."""
QUIET_S: Final = 1.0
"""A shorter outage is not worth a line in the log."""


def backoff() -> Generator[float, None, None]:
    """Seconds to wait between tries: doubling up to one."""
    pause = 0.02
    while True:
        yield pause
        pause = min(1.0, pause * 2)


class WaitTimeout(TokenmillError, TimeoutError):
    """A call's `timeout` is over; `__cause__` is the last error of Redis, if there was one."""


@dataclass(frozen=True)
class Deadline:
    """When a call ends; without a time-out it ends when the job's result would have expired."""

    what: str
    """What is awaited, for the message: `job 7f3a: not finished`."""
    timeout: float | None
    end: float

    @classmethod
    def after(cls, what: str, timeout: float | None) -> Deadline:
        """Return the deadline of a call that begins now. An infinite `timeout` outlives every outage.

        Raises:
            ValueError: `timeout` is no number.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout: must be a number of seconds, or None")
        return cls(what, timeout, time.monotonic() + (RESULT_TTL_S if timeout is None else timeout))

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.end - time.monotonic())

    def block_ms(self, most: int) -> int:
        """How long the next read may block.

        Raises:
            TimeoutError: the time is up.
        """
        left = self.left
        if left <= 0:
            raise self.missed()
        return max(1, int(min(most, left * 1000 + 1)))

    def missed(self, error: Exception | None = None) -> TimeoutError:
        """The error of a call whose time is up; `error`: why nothing was heard until then."""
        seconds = RESULT_TTL_S if self.timeout is None else self.timeout
        reason = "" if error is None else f"; the last error: {error}"
        return WaitTimeout(f"{self.what} within {seconds:g} s{reason}")


class Line:
    """What a client knows of its Redis.

    Args:
        fail_fast: raise at once where Redis cannot be reached at first, rather than wait for it.
    """

    def __init__(self, fail_fast: bool = False) -> None:
        self.fail_fast = fail_fast
        self.reached = False
        """It has answered once."""
        self.noted = False
        """That it is away was logged."""

    def works(self) -> None:
        """It has answered."""
        self.reached, self.noted = True, False


class Tries:
    """The tries of one command.

    Args:
        deadline: of the call; where that has no time-out, `outage_s` counts.
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
        """Seconds to wait before the next try.

        Raises:
            TimeoutError: the call's time is up.
            redis.RedisError: `error`: another try cannot help, or Redis has been away for too long.
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
