"""Errors in the form of OpenAI's API.

raise ApiError(404, "Model x is not served.", code="model_not_found")
error.status, error.headers, error.body()
error_of(result), error_of_job_error(JobError(…))     # an ended job, a refused body → ApiError
"""

from __future__ import annotations

import math
import re
from typing import Any

from tokenmill.protocol.errors import ErrorCode, JobError, TokenmillError
from tokenmill.protocol.result import ErrorInfo, Result, Status

Json = dict[str, Any]

_CODES = {code.value: code for code in ErrorCode}
_HTTP = {
    ErrorCode.INVALID_JSON: 400,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED_VERSION: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.MODEL_MISMATCH: 404,
}
"""HTTP status codes of errors of the request itself; every other error is 500."""
_DEFAULTS = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed"}
"""HTTP status code → the code of an error that says nothing more."""
_OPENAI = {ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded", ErrorCode.MODEL_MISMATCH: "model_not_found"}
"""OpenAI's codes for errors that have another name there."""
_PARAM = re.compile(r"(?!body:)([a-z_]+)[.:]|unknown key '([^']+)'")
"""How a message names the wrong key. `body` is the whole request, which has no key in OpenAI's API."""


class ApiError(TokenmillError):
    """An error answer of OpenAI's API.

    Args:
        status: HTTP status code.
        message: for the sender of the request.
        code: OpenAI's machine-readable code, such as `model_not_found`; by default that of the status code.
        param: the wrong key of the request.
        retry_after: seconds after which the same request may succeed; sent as `Retry-After`, rounded up.
        retry: False tells clients not to repeat the request, where the status code alone would make them; so does 409.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        retry: bool = True,
    ) -> None:
        self.status, self.message, self.param = status, message, param
        self.code = _DEFAULTS.get(status) if code is None else code
        self.retry_after, self.retry = retry_after, retry and status != 409
        super().__init__(message)

    @property
    def type(self) -> str:
        """OpenAI's class of the error, which follows from the status code."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: `Retry-After`, `x-should-retry`, which OpenAI's packages obey, `WWW-Authenticate`."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if not self.retry:
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> Json:
        """Return the JSON of the answer; the last event of a stream that fails has the same."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def key_reused() -> ApiError:
    """Return the error of an Idempotency-Key that was used for another request before."""
    message = "The Idempotency-Key was used for another request; send a new key."
    return ApiError(409, message, code="idempotency_key_reused")


def error_of(result: Result, *, chat: bool = False) -> ApiError:
    """Return the error for a job that did not succeed. Clients should not repeat what the queue has retried already.

    Args:
        chat: whether the request has messages, which a prompt that is too long was made of.
    """
    if result.status is Status.CANCELLED:
        return ApiError(409, _cancelled(result), code="cancelled")
    if result.status is Status.EXPIRED:
        message = result.error.message if result.error else "The job's time to live ran out."
        return ApiError(504, message, code="timeout")
    return error_of_info(result.error or ErrorInfo(ErrorCode.ENGINE_ERROR.value, "failed without a reason"), chat=chat)


def error_of_job_error(error: JobError) -> ApiError:
    """Return the error for a body or field that tokenmill refused before it became a job."""
    return error_of_info(ErrorInfo.of(error))


def error_of_info(error: ErrorInfo, *, chat: bool = False) -> ApiError:
    """Return the error for the error of a job. A code of a newer worker is kept, with status code 500.

    Args:
        chat: as for `error_of`.
    """
    known = _CODES.get(error.code, ErrorCode.ENGINE_ERROR)
    status = _HTTP.get(known, 500)
    named = _PARAM.match(error.message) if status == 400 else None
    param = (named[1] or named[2]) if named else None
    if chat and known is ErrorCode.PROMPT_TOO_LONG:
        param = "messages"
    return ApiError(status, error.message, code=_OPENAI.get(known, error.code), param=param, retry=status < 500)


def _cancelled(result: Result) -> str:
    return f"The job was cancelled: {result.cancel_reason}" if result.cancel_reason else "The job was cancelled."
