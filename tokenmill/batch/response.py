"""Translates the result of a job into a line of OpenAI's output or error file.

    response_line(Asked(…), result) -> (bytes, ok)
    refusal_line(Asked(…), message) -> bytes

Output lines hold `chat.completion` and `text_completion` bodies. In an error line `error` is never null, so a reader
may look there or at `response.status_code`: `response` holds what OpenAI's server would answer, or is null where there
is no such answer (cancelled, expired).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import orjson

from tokenmill.openai.errors import error_of_info
from tokenmill.openai.request import CHAT
from tokenmill.openai.response import ANSWERS
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.result import ErrorInfo, Result, Status

Json = dict[str, Any]

_ID = "batch_req_"
LINE_START = f'{{"id":"{_ID}'.encode()
"""How every response line begins: identifies an incomplete line that a crash left."""

_UNANSWERED = {Status.CANCELLED: "batch_cancelled", Status.EXPIRED: "batch_expired"}


class Asked(NamedTuple):
    """The parts of a request that its response line repeats."""

    job_id: str
    custom_id: str
    url: str


def response_line(asked: Asked, result: Result) -> tuple[bytes, bool]:
    """Return the line of a finished job, ending with LF, and whether the job succeeded."""
    if result.ok:
        body = ANSWERS[asked.url](asked.job_id, result, int(time.time()))
        return _line(asked, _response(asked, 200, body), None), True
    code = _UNANSWERED.get(result.status)
    if code is not None:
        return _line(asked, None, {"code": code, "message": _reason(result)}), False
    return _failed(asked, result.error or ErrorInfo(ErrorCode.ENGINE_ERROR.value, "failed without a reason")), False


def refusal_line(asked: Asked, message: str) -> bytes:
    """Return the line of a request that was refused before it was submitted; `message` begins with the wrong key."""
    return _failed(asked, ErrorInfo(ErrorCode.INVALID_REQUEST.value, message))


def _line(asked: Asked, response: Json | None, error: Json | None) -> bytes:
    line = {"id": f"{_ID}{asked.job_id}", "custom_id": asked.custom_id, "response": response, "error": error}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _response(asked: Asked, status_code: int, body: Json) -> Json:
    return {"status_code": status_code, "request_id": asked.job_id, "body": body}


def _failed(asked: Asked, info: ErrorInfo) -> bytes:
    error = error_of_info(info, chat=asked.url == CHAT)
    return _line(asked, _response(asked, error.status, error.body()), {"code": error.code, "message": error.message})


def _reason(result: Result) -> str:
    if result.error is not None:
        return result.error.message
    return f"cancelled: {result.cancel_reason}" if result.cancel_reason else result.status.value
