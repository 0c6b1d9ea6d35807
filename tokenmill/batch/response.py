"""Translates the result of a job into a line of OpenAI's output or error file.

    response_line(Asked(…), result) -> (bytes, ok)
    refusal_line(Asked(…), message) -> bytes

Output lines hold `chat.completion` and `text_completion` bodies. In an error line `error` is never null, so a reader
may look there or at `response.status_code`: `response` holds what OpenAI's server would answer, or is null where there
is no such answer (cancelled, expired).
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from tokenmill.batch.request import CHAT
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status

Json = dict[str, Any]

_ID = "batch_req_"
LINE_START = f'{{"id":"{_ID}'.encode()
"""How every response line begins: identifies an incomplete line that a crash left."""

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
_OPENAI = {ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded", ErrorCode.MODEL_MISMATCH: "model_not_found"}
"""OpenAI's codes for errors that have another name there."""
_UNANSWERED = {Status.CANCELLED: "batch_cancelled", Status.EXPIRED: "batch_expired"}
_PARAM = re.compile(r"([a-z_]+)[.:]")
_ALTERNATIVE = ("token", "logprob", "bytes")


class Asked(NamedTuple):
    """The parts of a request that its response line repeats."""

    job_id: str
    custom_id: str
    url: str


def response_line(asked: Asked, result: Result) -> tuple[bytes, bool]:
    """Return the line of a finished job, ending with LF, and whether the job succeeded."""
    if result.ok:
        body = _chat(asked, result) if asked.url == CHAT else _completion(asked, result)
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


def _failed(asked: Asked, error: ErrorInfo) -> bytes:
    known = _CODES.get(error.code, ErrorCode.ENGINE_ERROR)
    status_code = _HTTP.get(known, 500)
    code = _OPENAI.get(known, error.code)
    named = _PARAM.match(error.message) if status_code == 400 else None
    body = {
        "message": error.message,
        "type": "invalid_request_error" if status_code < 500 else "server_error",
        "param": named[1] if named else None,
        "code": code,
    }
    return _line(asked, _response(asked, status_code, {"error": body}), {"code": code, "message": error.message})


def _reason(result: Result) -> str:
    if result.error is not None:
        return result.error.message
    return f"cancelled: {result.cancel_reason}" if result.cancel_reason else result.status.value


def _frame(asked: Asked, result: Result, prefix: str, kind: str, choices: list[Json]) -> Json:
    body = {
        "id": f"{prefix}-{asked.job_id}",
        "object": kind,
        "created": int(time.time()),
        "model": result.model or "",
        "choices": choices,
        "usage": _usage(result),
        "system_fingerprint": None,
    }
    if result.clamped:
        body["clamped"] = dict(result.clamped)
    prompt = result.choices[0].prompt_logprobs if result.choices else None
    if prompt is not None:
        body["prompt_logprobs"] = prompt
    return body


def _usage(result: Result) -> Json:
    prompt, completion = result.usage.prompt_tokens or 0, result.usage.completion_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens or 0},
    }


def _chat(asked: Asked, result: Result) -> Json:
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **_extras(choice),
        }
        for choice in result.choices
    ]
    return _frame(asked, result, "chatcmpl", "chat.completion", choices)


def _completion(asked: Asked, result: Result) -> Json:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": _text_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **_extras(choice),
        }
        for choice in result.choices
    ]
    return _frame(asked, result, "cmpl", "text_completion", choices)


def _extras(choice: Choice) -> Json:
    return {} if choice.token_ids is None else {"token_ids": choice.token_ids}


def _chat_logprobs(logprobs: Any) -> Json | None:
    if logprobs is None:
        return None
    content = [
        {**_entry(token), "top_logprobs": [_entry(alternative) for alternative in token["top_logprobs"]]}
        for token in logprobs["content"]
    ]
    return {"content": content, "refusal": None}


def _entry(token: Mapping[str, Any]) -> Json:
    return {key: token[key] for key in _ALTERNATIVE}


def _text_logprobs(logprobs: Any) -> Json | None:
    """Return log-probabilities in the shape of `/v1/completions`.

    `text_offset` counts characters of the text; all tokens that share a character have the offset of this character.
    """
    if logprobs is None:
        return None
    content = logprobs["content"]
    decoder, offset, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for token in content:
        offsets.append(offset)
        offset += len(decoder.decode(bytes(token["bytes"] or ())))
    return {
        "tokens": [token["token"] for token in content],
        "token_logprobs": [token["logprob"] for token in content],
        "top_logprobs": [
            {entry["token"]: entry["logprob"] for entry in (*token["top_logprobs"], token)} for token in content
        ],
        "text_offset": offsets,
    }
