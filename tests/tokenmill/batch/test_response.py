"""Response lines: their bodies are parsed by the models of the openai package, which check every field and type."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tokenmill.batch.response import Asked, refusal_line, response_line
from tokenmill.openai.request import CHAT, COMPLETIONS
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Usage


def token(text: str | bytes, logprob: float, token_id: int = 1) -> dict[str, Any]:
    raw = text.encode() if isinstance(text, str) else text
    shown = raw.decode(errors="replace")
    return {"token": shown, "token_id": token_id, "logprob": logprob, "bytes": list(raw)}


LOGPROBS = {
    "content": [
        {**token("é", -0.5), "top_logprobs": [token("e", -0.7), token("a", -0.9)]},
        {**token("€".encode()[:2], -1.0), "top_logprobs": []},
        {**token("€".encode()[2:], -2.0), "top_logprobs": []},
        {**token(" x", -3.0), "top_logprobs": []},
    ]
}


def result(**changes: Any) -> Result:
    given: dict[str, Any] = {
        "id": "job",
        "status": Status.SUCCEEDED,
        "model": "tiny",
        "choices": (Choice(0, "é€ x", "stop", "\n"), Choice(1, "other", "length")),
        "usage": Usage(5, 7, 4),
    }
    return Result(**{**given, **changes})


def line_of(url: str, given: Result) -> dict[str, Any]:
    raw, ok = response_line(Asked("job", "mine", url), given)
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == 1
    line: dict[str, Any] = json.loads(raw)
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["id"], line["custom_id"]) == ("batch_req_job", "mine")
    assert ok == (line["error"] is None)
    return line


def strictly(model: Any, body: dict[str, Any]) -> Any:
    """Read by OpenAI's model; nothing in it may be of a wrong type or unknown to it."""
    read = model.model_validate(body, strict=True)
    assert json.loads(read.model_dump_json(exclude_unset=True)) == body
    assert not read.model_extra
    return read


def test_a_chat_completion_has_the_types_of_openai() -> None:
    line = line_of(CHAT, result())
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "job")
    read = strictly(ChatCompletion, line["response"]["body"])
    assert (read.id, read.object, read.model) == ("chatcmpl-job", "chat.completion", "tiny")
    assert [(c.index, c.message.content, c.finish_reason) for c in read.choices] == [
        (0, "é€ x", "stop"),
        (1, "other", "length"),
    ]
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.total_tokens) == (5, 7, 12)
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 4


def test_a_text_completion_has_the_types_of_openai() -> None:
    read = strictly(Completion, line_of(COMPLETIONS, result())["response"]["body"])
    assert (read.id, read.object) == ("cmpl-job", "text_completion")
    assert [(c.text, c.finish_reason) for c in read.choices] == [("é€ x", "stop"), ("other", "length")]


def test_log_probabilities_have_openais_shapes() -> None:
    given = result(choices=(Choice(0, "é€ x", "stop", logprobs=LOGPROBS),))
    (chat,) = strictly(ChatCompletion, line_of(CHAT, given)["response"]["body"]).choices
    assert [entry.logprob for entry in chat.logprobs.content] == [-0.5, -1.0, -2.0, -3.0]
    assert [entry.token for entry in chat.logprobs.content[0].top_logprobs] == ["e", "a"]
    (text,) = strictly(Completion, line_of(COMPLETIONS, given)["response"]["body"]).choices
    assert text.logprobs.token_logprobs == [-0.5, -1.0, -2.0, -3.0]
    assert text.logprobs.text_offset == [0, 1, 1, 2]
    assert text.logprobs.top_logprobs[0] == {"e": -0.7, "a": -0.9, "é": -0.5}


def test_fields_that_a_worker_adds_are_kept() -> None:
    choice = Choice(0, "x", "length", token_ids=[1], prompt_logprobs=[None])
    body = line_of(CHAT, result(choices=(choice,), clamped={"max_tokens": 3}))["response"]["body"]
    assert (body["clamped"], body["prompt_logprobs"], body["choices"][0]["token_ids"]) == (
        {"max_tokens": 3},
        [None],
        [1],
    )


@pytest.mark.parametrize(
    ("code", "status_code", "openai"),
    [
        (ErrorCode.INVALID_JSON, 400, "invalid_json"),
        (ErrorCode.INVALID_REQUEST, 400, "invalid_request"),
        (ErrorCode.PROMPT_TOO_LONG, 400, "context_length_exceeded"),
        (ErrorCode.TOO_LARGE, 413, "too_large"),
        (ErrorCode.MODEL_MISMATCH, 404, "model_not_found"),
        (ErrorCode.ENGINE_ERROR, 500, "engine_error"),
        (ErrorCode.GAVE_UP, 500, "gave_up"),
    ],
)
def test_a_failure_reads_as_openais_http_error(code: ErrorCode, status_code: int, openai: str) -> None:
    error = ErrorInfo.of(JobError(code, "top_p: is wrong"))
    line = line_of(COMPLETIONS, result(status=Status.FAILED, choices=(), error=error))
    assert line["response"]["status_code"] == status_code
    told = line["response"]["body"]["error"]
    assert told["type"] == ("invalid_request_error" if status_code < 500 else "server_error")
    assert (told["code"], told["message"]) == (openai, "top_p: is wrong")
    assert told["param"] == ("top_p" if status_code == 400 else None)
    assert line["error"] == {"code": openai, "message": "top_p: is wrong"}


def test_an_unknown_code_of_a_newer_worker_is_an_error_too() -> None:
    line = line_of(CHAT, result(status=Status.FAILED, error=ErrorInfo("melted", "hot")))
    assert (line["response"]["status_code"], line["error"]["code"]) == (500, "melted")


@pytest.mark.parametrize(("status", "code"), [(Status.CANCELLED, "batch_cancelled"), (Status.EXPIRED, "batch_expired")])
def test_a_cancelled_or_expired_request_has_no_response(status: Status, code: str) -> None:
    line = line_of(CHAT, result(status=status, cancel_reason="user"))
    assert line["response"] is None
    assert line["error"]["code"] == code


@pytest.mark.parametrize(("url", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_a_prompt_that_is_too_long_is_an_error_of_the_key_that_the_request_has(url: str, param: str) -> None:
    error = ErrorInfo.of(JobError(ErrorCode.PROMPT_TOO_LONG, "prompt: the prompt has 9 tokens, at most 8 fit"))
    line = line_of(url, result(status=Status.FAILED, choices=(), error=error))
    assert line["response"]["body"]["error"]["param"] == param


def test_a_refusal_names_the_key() -> None:
    line = json.loads(refusal_line(Asked("job", "mine", CHAT), "stream: a batch has no streams"))
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["param"] == "stream"
    assert line["error"]["code"] == "invalid_request"
