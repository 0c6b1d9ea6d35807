"""Translating a body in OpenAI's format: no key that changes the output is ignored."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tokenmill.openai.request import (
    _CHECKS,
    _NO_EFFECT,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Streaming,
    Unsupported,
    streaming,
    translate,
)
from tokenmill.protocol.body import Body, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    "body",
    [
        {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 1},
        {"max_tokens": 5, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}},
        {"logprobs": True, "top_logprobs": 3, "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
        {"tools": TOOLS},
        {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "structured_outputs": {"choice": ["a"]}},
    ],
)
def test_keys_of_the_protocol_are_passed_on_unchanged(body: dict[str, Any]) -> None:
    asked = {"model": "m", "messages": MESSAGES, **body}
    assert translate(CHAT, asked) == asked
    parse_body(orjson.dumps(translate(CHAT, asked)))


def test_of_the_keys_that_the_protocol_has_only_those_without_meaning_in_a_file_are_not_passed_on() -> None:
    assert set(Body.model_fields) & (_NO_EFFECT | _CHECKS.keys()) == {"user", "metadata", "stream", "stream_options"}


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "flex", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "x"}},
        {"stream": False, "modalities": ["text"], "tool_choice": "auto", "parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"temperature": None, "stream": None, "stream_options": None, "tool_choice": None, "functions": None},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_keys_that_do_not_change_the_output_are_left_out(body: dict[str, Any]) -> None:
    assert translate(CHAT, {"messages": MESSAGES, **body}) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "stream": True}, "stream"),
        (CHAT, {"messages": MESSAGES, "stream_options": {}}, "stream_options"),
        (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT, {"messages": MESSAGES, "prompt": "x"}, "prompt"),
        (CHAT, {}, "messages"),
        (COMPLETIONS, {"prompt": "x", "messages": MESSAGES}, "messages"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "input": "x"}, "input"),
        (CHAT, {"messages": MESSAGES, "input": "x"}, "input"),
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": ["a", "b"]}, "input"),
        (EMBEDDINGS, {"input": "x", "prompt": "x"}, "prompt"),
        (EMBEDDINGS, {"input": "x", "messages": MESSAGES}, "messages"),
    ],
)
def test_keys_that_are_not_supported_are_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        translate(url, body)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")


def test_a_refusal_is_an_error_answer_with_status_400() -> None:
    with pytest.raises(Unsupported) as refused:
        translate(COMPLETIONS, {"prompt": "x", "echo": True})
    assert refused.value.status == 400
    message = "echo: is not supported"
    told = {"message": message, "type": "invalid_request_error", "param": "echo", "code": "invalid_request"}
    assert refused.value.body() == {"error": told}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, Streaming(False, False)),
        ({"stream": None, "stream_options": None}, Streaming(False, False)),
        ({"stream": False}, Streaming(False, False)),
        ({"stream": True}, Streaming(True, False)),
        ({"stream": True, "stream_options": {}}, Streaming(True, False)),
        ({"stream": True, "stream_options": {"include_usage": None, "other": None}}, Streaming(True, False)),
        ({"stream": True, "stream_options": {"include_usage": False}}, Streaming(True, False)),
        (
            {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
            Streaming(True, True),
        ),
    ],
)
def test_the_stream_and_its_options_are_read_and_left_out_of_the_job(body: dict[str, Any], expected: Streaming) -> None:
    assert streaming(body) == expected
    assert translate(CHAT, {"messages": MESSAGES, **body}, stream=True) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_a_wrong_stream_option_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        streaming(body)
    assert refused.value.param == param


def test_embeddings_have_no_stream() -> None:
    with pytest.raises(Unsupported) as refused:
        translate(EMBEDDINGS, {"input": "x", "stream": True}, stream=True)
    assert refused.value.param == "stream"


@pytest.mark.parametrize(("given", "expected"), [("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_an_embedding_has_one_input(given: Any, expected: Any) -> None:
    body = {"model": "m", "input": given, "dimensions": 5, "encoding_format": "base64", "user": "u"}
    assert translate(EMBEDDINGS, body) == {
        "model": "m",
        "input": expected,
        "dimensions": 5,
        "encoding_format": "base64",
    }


@pytest.mark.parametrize("key", ["reasoning_effort", "verbosity", "audio", "functions", "web_search_options", "typo"])
def test_unknown_parameters_are_left_to_the_worker_to_refuse(key: str) -> None:
    with pytest.raises(Exception, match=f"unknown key '{key}'"):
        parse_body(orjson.dumps(translate(CHAT, {"messages": MESSAGES, key: "x"})))


def test_an_answer_of_openai_can_be_a_message_again() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    ours = translate(CHAT, {"messages": [*MESSAGES, answer]})
    assert (parse_body(orjson.dumps(ours)).chat or [])[-1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("body", "prompt", "max_tokens"),
    [
        ({"prompt": "x"}, "x", 16),
        ({"prompt": ["x"]}, "x", 16),
        ({"prompt": [1, 2]}, [1, 2], 16),
        ({"prompt": [[1, 2]], "max_tokens": 3}, [1, 2], 3),
        ({"prompt": "x", "n": 2, "best_of": 2, "echo": False, "suffix": "", "max_tokens": None}, "x", 16),
    ],
)
def test_a_completion_has_one_prompt_and_openais_default_length(
    body: dict[str, Any], prompt: Any, max_tokens: int
) -> None:
    ours = translate(COMPLETIONS, body)
    assert (ours["prompt"], ours["max_tokens"]) == (prompt, max_tokens)
    parse_body(orjson.dumps(ours))


def test_the_input_is_left_as_it_was() -> None:
    body = {"messages": [{"role": "user", "content": "hi", "name": None}], "tools": TOOLS, "tool_choice": "none"}
    before = orjson.dumps(body)
    translate(CHAT, body)
    assert orjson.dumps(body) == before
