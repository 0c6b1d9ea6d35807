"""Limits the memory of large answers that wait for slow clients.

Small answers, and streams in small frames, are limited by the number of requests. A result with log-probabilities can
have 100 MB: without a limit, a few clients that do not read such results would use up the memory of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tokenmill.openai.errors import ApiError

LARGE_BYTES: Final = 64 << 10
"""Size from which on an answer, or a frame of a stream, is counted."""
MAX_BYTES: Final = 256 << 20
"""Maximum size of all large answers that are being sent; a single answer may be larger."""
RETRY_SECONDS: Final = 1.0
"""`Retry-After` of an answer that exceeds `MAX_BYTES`."""


class Answers:
    """The large answers that a gateway is sending."""

    def __init__(self) -> None:
        self.bytes = 0
        """Size of all of them."""

    @contextmanager
    def sent(self, size: int) -> Iterator[None]:
        """Count an answer of `size` bytes in the block, which sends it.

        Raises:
            ApiError: 503: too many large answers wait for their clients.
        """
        if size < LARGE_BYTES:
            yield
            return
        if self.bytes and self.bytes + size > MAX_BYTES:
            message = (
                "Too many large answers wait for clients that read slowly; try again later. The job keeps its result."
            )
            raise ApiError(503, message, code="overloaded", retry_after=RETRY_SECONDS)
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size
