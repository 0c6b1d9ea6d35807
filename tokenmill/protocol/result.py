"""The final result of a job, as in `result:<id>` and in the final event's field `result`.

Result(id=…, status=Status.SUCCEEDED, choices=(Choice(0, "text", "stop"),), usage=Usage(5, 32, 0), …).to_json() -> bytes
Result.from_json(raw) -> Result       # for readers; unknown keys of a newer minor version are ignored
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Self

import orjson

from tokenmill.protocol.errors import JobError, clean
from tokenmill.protocol.job import VERSION


class Status(enum.StrEnum):
    """The status of a job that has ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` generated texts."""

    index: int
    text: str
    finish_reason: str
    """`stop`, `length`, `cancelled`, `expired` or `error`."""
    stop: str | int | None = None
    """The stop string or stop id that ended the text."""
    logprobs: Any = None
    token_ids: list[int] | None = None
    prompt_logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens; the prompt counts once, whatever `n` is."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the entry was added: by Redis' clock up to START, by the worker's monotonic clock after it."""

    queued_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The error of a job that failed or expired."""

    code: str
    message: str
    retryable: bool = False
    cause: str | None = None
    """The code of the last error, for `gave_up`."""

    @classmethod
    def of(cls, error: JobError) -> Self:
        return cls(error.code.value, error.message, error.retryable, error.cause.value if error.cause else None)


@dataclass(frozen=True, slots=True)
class Result:
    """The final result of a job; each id gets exactly one."""

    id: str
    status: Status
    model: str | None = None
    attempt: int | None = None
    worker: str | None = None
    choices: tuple[Choice, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None
    clamped: Mapping[str, Any] | None = None
    """Parameters that the worker reduced, with their new values."""
    traceparent: str | None = None
    cancel_reason: str | None = None
    v: int = VERSION

    @property
    def text(self) -> str:
        """The text of the first choice; empty if there is no choice."""
        return self.choices[0].text if self.choices else ""

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCEEDED

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON. Non-finite numbers become null; keys that don't apply are left out."""
        error = None
        if self.error is not None:
            error = _plain(self.error, optional={"cause"})
            error["message"] = clean(self.error.message)
        data = {
            "v": self.v,
            "id": self.id,
            "status": self.status.value,
            "model": self.model,
            "attempt": self.attempt,
            "worker": self.worker,
            "choices": [_plain(c, optional={"logprobs", "token_ids", "prompt_logprobs"}) for c in self.choices],
            "usage": _plain(self.usage),
            "timings": _plain(self.timings),
            "error": error,
        }
        for name in ("clamped", "traceparent", "cancel_reason"):
            value = getattr(self, name)
            if value is not None:
                data[name] = clean(value) if isinstance(value, str) else value
        return orjson.dumps(data)

    @classmethod
    def from_json(cls, raw: bytes | str) -> Self:
        """Parse a result.

        Raises:
            ValueError: `raw` is not a result.
        """
        try:
            data = orjson.loads(raw)
            known = _known(cls, data)
            known["status"] = Status(data["status"])
            known["choices"] = tuple(Choice(**_known(Choice, choice)) for choice in data.get("choices") or ())
            known["usage"] = Usage(**_known(Usage, data.get("usage") or {}))
            known["timings"] = Timings(**_known(Timings, data.get("timings") or {}))
            error = data.get("error")
            known["error"] = ErrorInfo(**_known(ErrorInfo, error)) if error else None
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a result: {error!r}") from error


def _plain(value: Any, optional: set[str] | frozenset[str] = frozenset()) -> dict[str, Any]:
    pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
    return {name: item for name, item in pairs if item is not None or name not in optional}


def _known(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(cls)
    return {name: value for name, value in data.items() if name in names}


@cache
def _names(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))
