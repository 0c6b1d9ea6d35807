"""Translating a body in OpenAI's format: no key that changes the output is ignored."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tokenmill.batch.request import CHAT, COMPLETIONS, Unsupported, prefix_of, translate
from tokenmill.protocol.body import parse_body

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
    ],
)
def test_keys_that_are_not_supported_are_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        translate(url, body)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")


@pytest.mark.parametrize("key", ["reasoning_effort", "verbosity", "audio", "functions", "web_search_options", "typo"])
def test_unknown_parameters_are_left_to_the_worker_to_refuse(key: str) -> None:
    with pytest.raises(Exception, match=f"unknown key '{key}'"):
        parse_body(orjson.dumps(translate(CHAT, {"messages": MESSAGES, key: "x"})))


def test_an_answer_of_openai_can_be_a_message_again() -> None:
    answer = {
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


def test_prefixes_are_equal_where_the_cache_could_share_something() -> None:
    def chat(*messages: tuple[str, Any], **body: Any) -> int:
        return prefix_of({"messages": [{"role": role, "content": content} for role, content in messages], **body})

    system = ("system", "be brief")
    assert chat(system, ("user", "a")) == chat(system, ("user", "b")) != 0
    assert chat(system, ("user", "a")) != chat(("system", "be long"), ("user", "a"))
    assert chat(system, ("user", "a"), tools=TOOLS) != chat(system, ("user", "a"))
    assert chat(("user", "a"), tools=TOOLS) == chat(("user", "b"), tools=TOOLS) != 0
    assert chat(("user", "x" * 256 + "a")) == chat(("user", "x" * 256 + "b")) == prefix_of({"prompt": "x" * 300}) != 0
    assert prefix_of({"prompt": [*range(64), 1]}) == prefix_of({"prompt": [*range(64), 2]}) != 0
    assert chat(("user", "short")) == prefix_of({"prompt": "short"}) == prefix_of({}) == 0
    assert prefix_of({"messages": ["x"], "prompt": 7}) == prefix_of({"messages": "x"}) == 0
