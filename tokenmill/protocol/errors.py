"""The error codes of the wire protocol and the exception that carries one.

raise JobError(ErrorCode.INVALID_REQUEST, "temperature: must be a number from 0 to 2")
"""

from __future__ import annotations

import enum

MAX_MESSAGE = 500
"""Characters; a message never echoes its sender's whole input."""


class ErrorCode(enum.StrEnum):
    """Every `error.code`; `no_id` occurs in dead letters only, since such an entry has nobody to answer."""

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
        """True where another start may succeed."""
        return self in _RETRYABLE


_RETRYABLE = frozenset({ErrorCode.ENGINE_ERROR, ErrorCode.OUT_OF_MEMORY, ErrorCode.WORKER_LOST})


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` as valid UTF-8 of at most `limit` characters."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


class TokenmillError(Exception):
    """Base of the errors that this library raises of its own."""


class JobError(TokenmillError):
    """A job that is answered with an error.

    Args:
        code: what went wrong.
        message: for the job's sender; cut to `MAX_MESSAGE` characters.
        retryable: overrides the code's own (non-finite logits are an `engine_error` that is not).
        cause: the code behind a `gave_up`.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, retryable: bool | None = None, cause: ErrorCode | None = None
    ) -> None:
        self.code = code
        self.message = clean(message)
        self.retryable = code.retryable if retryable is None else retryable
        self.cause = cause
        super().__init__(f"{code}: {self.message}")
