"""Bodies: strict types, every range, errors that name the key."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.protocol.body import MAX_DEPTH, Body, check_value, encode_body, parse_body
from tokenmill.protocol.errors import MAX_MESSAGE, ErrorCode, JobError

NESTED = b'{"prompt":"x","metadata":' + b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1) + b"}"


def body(**params: Any) -> Body:
    return parse_body(json.dumps({"prompt": "x", **params}).encode())


def refusal(raw: bytes) -> JobError:
    with pytest.raises(JobError) as error:
        parse_body(raw)
    return error.value


def test_a_body_needs_only_a_prompt_and_absent_keys_stay_none() -> None:
    assert body().model_dump(exclude_none=True) == {"prompt": "x"}
    assert parse_body(b'{"prompt":[0,5]}').prompt == [0, 5]


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("prompt", ["x", " ", [1, 2]], ["", 5, True, {}, [], [1.0], [True], ["a"], [-1], [2**31]]),
        ("max_tokens", [1, 2**31 - 1], [0, -1, 1.0, "5", True, 2**31]),
        ("max_completion_tokens", [1], [0, "1"]),
        ("min_tokens", [0, 5], [-1, 0.0]),
        ("temperature", [0, 0.7, 2, 1], [-0.1, 2.1, "0.7", True, []]),
        ("top_p", [1, 0.001], [0, 1.1, True]),
        ("top_k", [-1, 0, 50], [-2, 1.5, "5", False]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 1.2, 1e-6, 1e6], [0, -1, 1e-39, 1e-7, 1.1e6]),
        ("logit_bias", [{}, {"0": 1, "5": -100}], [{"a": 1}, {"01": 1}, {"-1": 1}, {"5": 101}, {"5": True}]),
        ("logit_bias", [{str(n): 0 for n in range(1024)}], [{str(n): 0 for n in range(1025)}, [], [[5, 1]]]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True, "1"]),
        ("n", [1, 64], [0, 65, 1.0, True]),
        ("stop", ["a", ["a", "b" * 256], [], ["a"] * 16], ["", ["a", ""], "b" * 257, ["a"] * 17, 5, [5]]),
        ("stop_token_ids", [[], [0]], [[-1], [True], ["1"], 5]),
        ("ignore_eos", [True, False], [0, 1, "true"]),
        ("logprobs", [True, False, 0, 20], [21, -1, 1.5, "5"]),
        ("prompt_logprobs", [0, 20], [21, -1, True]),
        ("cache_salt", ["s"], [5, "s" * 257]),
        ("skip_special_tokens", [False], [0]),
        ("return_token_ids", [True], ["yes"]),
        ("model", ["m"], [5]),
        ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, "text", {}]),
        ("response_format", [{"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}],
         [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}},
          {"type": "text", "json_schema": {"schema": {}}}]),
        ("structured_outputs", [{"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "g"}],
         [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"regex": ""}, {"choice": [1]}]),
        ("stream", [True, False], ["yes"]),
        ("stream_options", [{"include_usage": True}], [5]),
        ("user", ["u"], [5]),
        ("metadata", [{"a": [1, {"b": None}]}], ["a"]),
    ],
)  # fmt: skip
def test_every_key_accepts_its_range_and_nothing_outside_of_it(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(body(**{key: value}), key) is not None
    for value in bad:
        error = refusal(json.dumps({"prompt": "x", key: value}).encode())
        assert error.code is ErrorCode.INVALID_REQUEST, value
        assert key in error.message, value
    chat = [{"role": "user", "content": "x"}]
    absent = {"prompt": "x", key: None} if key != "prompt" else {"prompt": None, "messages": chat}
    assert getattr(parse_body(json.dumps(absent).encode()), key) is None


def test_null_means_absent_in_nested_objects_too() -> None:
    call = {"id": "c", "type": "function", "index": None, "function": {"name": "f", "arguments": "{}", "strict": None}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache": None}], "name": None},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [call]},
        {
            "role": "assistant",
            "content": "y",
            "refusal": None,
            "annotations": [],
            "function_call": None,
            "tool_calls": None,
        },
        {"role": "assistant", "content": "z", "tool_calls": [], "reasoning_content": None},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": None, "strict": None}}
    asked = {
        "prompt": None,
        "messages": chat,
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": None},
        "logit_bias": {"5": None},
        "response_format": {"type": "json_object", "json_schema": None},
        "structured_outputs": None,
        "stream_options": {"include_usage": None},
    }
    for parsed in (parse_body(json.dumps(asked).encode()), parse_body(encode_body(asked))):
        assert parsed.chat == [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "assistant", "content": "y"},
            {"role": "assistant", "content": "z"},
        ]
        assert parsed.tools == [{"type": "function", "function": {"name": "f"}}]
        assert (parsed.chat_template_kwargs, parsed.logit_bias, parsed.structure) == ({}, {}, ("json_object", None))


def test_null_is_kept_in_schemas_and_tool_arguments() -> None:
    schema = {"type": ["string", "null"], "enum": ["a", None], "default": None, "const": None}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    asked = {
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": None}},
    }
    parsed = parse_body(json.dumps(asked).encode())
    assert parsed.structure == ("json", schema)
    assert parsed.tools is not None
    assert parsed.tools[0]["function"]["parameters"] == schema
    assert parsed.chat is not None
    assert parsed.chat[0]["tool_calls"] == [call]
    assert body(structured_outputs={"json": schema, "regex": None}).structure == ("json", schema)


@pytest.mark.parametrize(
    ("key", "value", "low", "high"),
    [
        *((key, 2**31, "1", "2147483647") for key in ("max_tokens", "max_completion_tokens")),
        ("min_tokens", 2**31, "0", "2147483647"),
        ("temperature", 2.1, "0", "2"),
        ("top_p", 1.1, "0", "1"),
        ("top_k", 2**31, "-1", "2147483647"),
        ("min_p", 2, "0", "1"),
        *((key, 3, "-2", "2") for key in ("presence_penalty", "frequency_penalty")),
        ("repetition_penalty", 2e6, "0.000001", "1000000"),
        ("logit_bias", {"5": 101}, "-100", "100"),
        ("logit_bias", {str(2**31): 1}, "0", "2147483647"),
        ("seed", 2**63, str(-(2**63)), str(2**63 - 1)),
        ("n", 65, "1", "64"),
        ("stop", ["a"] * 17, "16", "256"),
        *((key, [2**31], "0", "2147483647") for key in ("prompt", "stop_token_ids")),
        *((key, 21, "0", "20") for key in ("logprobs", "prompt_logprobs", "top_logprobs")),
        ("cache_salt", "s" * 257, "256", "256"),
        ("model", "m" * 513, "512", "512"),
    ],
)
def test_the_error_of_a_value_out_of_range_states_both_ends_of_the_range(
    key: str, value: Any, low: str, high: str
) -> None:
    message = refusal(json.dumps({"prompt": "x", key: value}).encode()).message
    said = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", message)
    assert {low, high} <= set(said), message
    assert message.startswith(f"{key}: must be ")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e400"])
def test_the_error_of_a_value_that_is_not_finite_states_the_range(value: str) -> None:
    said = "temperature: must be finite: a number from 0 to 2"
    assert refusal(f'{{"prompt":"x","temperature":{value}}}'.encode()).message == said
    with pytest.raises(JobError, match=said):
        encode_body({"prompt": "x", "temperature": float(value)})


def test_check_value_applies_the_rules_of_the_body() -> None:
    assert check_value("min_p", 0.5) == 0.5
    with pytest.raises(JobError, match="min_p: must be a number from 0 to 1"):
        check_value("min_p", 2)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": None, "messages": [None]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": None}]}, "messages"),
        ({"stop": [None]}, "stop"),
        (
            {
                "prompt": None,
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"add_generation_prompt": False},
            },
            "chat_template_kwargs: add_generation_prompt",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "", "content": "x"}]}, "messages"),
        ({"prompt": None, "messages": [{"content": "x"}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x", "wieght": 1}]}, "wieght"),
        ({"tools": []}, "tools"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 2, "top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choose": ["a"]}}, "choose"),
        ({"best_of": 5}, "best_of"),
        ({"x" * 100_000: 5}, "unknown key"),
        ({"kéy": 5}, "kéy"),
    ],
)
def test_the_error_of_keys_that_exclude_each_other_names_a_key(params: dict[str, Any], word: str) -> None:
    error = refusal(json.dumps({"prompt": "x", **params}).encode())
    assert error.code is ErrorCode.INVALID_REQUEST
    assert word in error.message
    assert len(error.message) <= MAX_MESSAGE


@pytest.mark.parametrize(
    ("raw", "code", "word"),
    [
        (b"", ErrorCode.INVALID_JSON, ""),
        (b"{", ErrorCode.INVALID_JSON, ""),
        (b'{"prompt":"\xff"}', ErrorCode.INVALID_JSON, ""),
        (b'{"prompt":"\\ud800"}', ErrorCode.INVALID_JSON, ""),
        (b'{"prompt":"x"} x', ErrorCode.INVALID_JSON, ""),
        (b"\xef\xbb\xbf{}", ErrorCode.INVALID_JSON, ""),
        ('{"prompt":"x"}'.encode("utf-16"), ErrorCode.INVALID_JSON, ""),
        (b"[" * 100_000, ErrorCode.INVALID_JSON, ""),
        (b'{"prompt":' + b"[" * 500_000 + b"]" * 500_000 + b"}", ErrorCode.INVALID_JSON, ""),
        (b"null", ErrorCode.INVALID_REQUEST, "object"),
        (b"[]", ErrorCode.INVALID_REQUEST, "object"),
        (b'"x"', ErrorCode.INVALID_REQUEST, "object"),
        (NESTED, ErrorCode.INVALID_REQUEST, "metadata"),
        (b'{"prompt":"x","temperature":NaN}', ErrorCode.INVALID_REQUEST, "temperature"),
        (b'{"prompt":"x","temperature":-Infinity}', ErrorCode.INVALID_REQUEST, "temperature"),
        (b'{"prompt":"x","temperature":1e400}', ErrorCode.INVALID_REQUEST, "temperature"),
        (b'{"prompt":"x","logit_bias":{"5":NaN}}', ErrorCode.INVALID_REQUEST, "logit_bias"),
        (b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}", ErrorCode.INVALID_REQUEST, "seed"),
        (b'{"prompt":"x","seed":' + b"9" * 30 + b"}", ErrorCode.INVALID_REQUEST, "seed"),
        (b'{"prompt":[' + b"true," * 150_000 + b"1]}", ErrorCode.INVALID_REQUEST, "prompt"),
        (b'{"prompt":"x","stop":[' + b"1," * 150_000 + b"1]}", ErrorCode.INVALID_REQUEST, "stop"),
        (b'{"prompt":"' + b"x" * (1 << 20) + b'"}', ErrorCode.TOO_LARGE, "bytes"),
        (b"\x00" * 2_000_000, ErrorCode.TOO_LARGE, "bytes"),
    ],
)
def test_each_kind_of_broken_body_has_its_own_error_code(raw: bytes, code: ErrorCode, word: str) -> None:
    error = refusal(raw)
    assert error.code is code
    assert word in error.message
    assert len(error.message) <= 200


def test_derived_properties_of_a_body() -> None:
    assert body(max_completion_tokens=7).output_limit == 7
    assert body(max_tokens=7, max_completion_tokens=7).output_limit == 7
    assert (body().stops, body(stop="a").stops, body(stop=["a", "b"]).stops) == ((), ("a",), ("a", "b"))
    assert body(logit_bias={"0": 1, "7": -2.5}).bias == ((0, 1.0), (7, -2.5))
    counts = [body(**p).top_logprobs_count for p in ({}, {"logprobs": False}, {"logprobs": True}, {"logprobs": 0})]
    assert counts == [None, None, 0, 0]
    assert body(logprobs=True, top_logprobs=4).top_logprobs_count == 4
    assert body(logprobs=4, top_logprobs=4).top_logprobs_count == 4
    assert body(response_format={"type": "text"}).structure is None
    assert body(response_format={"type": "json_object"}).structure == ("json_object", None)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    assert body(response_format=schema).structure == ("json", {"type": "object"})
    assert body(structured_outputs={"choice": ["a"]}).structure == ("choice", ["a"])


def test_a_chat_is_a_list_of_plain_dicts_with_text_parts_joined() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    chat = body(prompt=None, messages=messages, tools=[{"type": "function"}]).chat
    assert chat == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        messages[2],
    ]


def test_a_refusal_that_is_sent_back_becomes_the_assistants_content() -> None:
    dumped = {"role": "assistant", "content": None, "refusal": "I can't.", "annotations": [], "audio": None}
    assert body(prompt=None, messages=[dumped, {**dumped, "content": "x"}]).chat == [
        {"role": "assistant", "content": "I can't."},
        {"role": "assistant", "content": "x"},
    ]
    with pytest.raises(JobError, match=r"messages.*refusal"):
        body(prompt=None, messages=[{**dumped, "role": "user"}])


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None, "tool_calls": []}])
def test_a_message_needs_content_or_tool_calls(message: object) -> None:
    with pytest.raises(JobError, match=r"messages.*content"):
        body(prompt=None, messages=[message])


def test_encode_body_accepts_only_bodies_that_a_worker_accepts() -> None:
    assert orjson.loads(encode_body({"prompt": "x", "seed": None, "logit_bias": {5: -1}})) == {
        "prompt": "x", "logit_bias": {"5": -1},
    }  # fmt: skip
    for params in ({"temperature": float("inf")}, {"logit_bias": {"5": float("nan")}}, {"stop": object()}, {"n": 0}):
        with pytest.raises(JobError):
            encode_body({"prompt": "x", **params})
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(JobError):
        encode_body({"prompt": "x", "seed": endless})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(Body.model_fields)) | st.text(max_size=8), JSON, max_size=6))
def test_random_json_is_a_body_or_an_error_that_names_the_key(data: dict[str, Any]) -> None:
    check(json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:promtx0123456789.eE+-\\u \n', max_size=80).map(str.encode))
def test_random_bytes_are_a_body_or_an_error(raw: bytes) -> None:
    check(raw)


def check(raw: bytes) -> None:
    try:
        orjson.dumps(parse_body(raw).model_dump())
    except JobError as refused:
        error = refused
    else:
        return
    assert error.code in (ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST)
    assert error.message.encode()
    assert len(error.message) <= MAX_MESSAGE
