"""The error codes of the wire protocol, and the exception `JobError` that carries such a code.

raise JobError(ErrorCode.INVALID_REQUEST, "temperature: must be a number from 0 to 2")
"""

from __future__ import annotations

import enum

MAX_MESSAGE = 500
"""Maximum length in characters, so that a message never contains the sender's whole input."""


class ErrorCode(enum.StrEnum):
    """The values of `error.code`. `no_id` occurs in dead letters only: without an id there is no key for a result."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    TOO_LARGE = "too_large"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_MISMATCH = "model_mismatch"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE_ERROR = "engine_error"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_LOST = "worker_lost"
    GAVE_UP = "gave_up"
    NO_ID = "no_id"

    @property
    def retryable(self) -> bool:
        """Whether another start may succeed."""
        return self in _RETRYABLE


_RETRYABLE = frozenset({ErrorCode.ENGINE_ERROR, ErrorCode.OUT_OF_MEMORY, ErrorCode.WORKER_LOST})


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return `text` as valid UTF-8 of at most `limit` characters."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


class TokenmillError(Exception):
    """Base class of the errors that this library defines."""


class JobError(TokenmillError):
    """An error that ends a job.

    Args:
        code: the kind of error.
        message: for the job's sender; cut to `MAX_MESSAGE` characters.
        retryable: overrides the code's default (an `engine_error` for non-finite logits is not retryable).
        cause: the code of the last error, for `gave_up`.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, retryable: bool | None = None, cause: ErrorCode | None = None
    ) -> None:
        self.code = code
        self.message = clean(message)
        self.retryable = code.retryable if retryable is None else retryable
        self.cause = cause
        super().__init__(f"{code}: {self.message}")
