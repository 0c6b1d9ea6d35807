"""Messages of OpenAI's package, sent back as part of the next request, are legal on every way into the queue."""

from __future__ import annotations

import warnings
from typing import Any

import orjson
import pytest
from openai.lib._parsing._completions import parse_chat_completion
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import BaseModel

from tokenmill.client.core import make_entry
from tokenmill.openai.request import CHAT, translate
from tokenmill.protocol.body import encode_body, parse_body

QUESTION = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
DUMPED: dict[str, Any] = {
    "role": "assistant",
    "content": "x",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}


class Answer(BaseModel):
    x: int


def answer(**changes: Any) -> ChatCompletion:
    message = {"role": "assistant", "content": '{"x": 1}', "refusal": None, **changes}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}
    return ChatCompletion.model_validate(
        {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    )


def messages_of(answered: ChatCompletionMessage) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `parsed` of a type that the class does not declare
        return [answered.model_dump(), answered.to_dict(), answered.model_dump(exclude_unset=True)]


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({}, {"role": "assistant", "content": '{"x": 1}'}),
        ({"annotations": []}, {"role": "assistant", "content": '{"x": 1}'}),
        ({"content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
    ],
)
def test_a_message_as_the_package_dumps_it_is_legal_as_an_entry_from_a_client_and_over_http(
    changes: dict[str, Any], template: dict[str, Any]
) -> None:
    for message in messages_of(answer(**changes).choices[0].message):
        messages = [QUESTION, message]
        entry = parse_body(orjson.dumps({"messages": messages}))
        client = parse_body(make_entry(messages=messages).body)
        http = parse_body(encode_body(translate(CHAT, {"messages": messages})))
        for body in (entry, client, http):
            assert (body.chat or [])[-1] == template


def test_every_key_of_a_dumped_message_may_be_null() -> None:
    parsed = parse_body(orjson.dumps({"messages": [QUESTION, DUMPED], "tools": None, "stop": None}))
    assert (parsed.chat or [])[-1] == {"role": "assistant", "content": "x"}


def test_a_message_of_the_parse_helper_can_be_sent_back() -> None:
    parsed = parse_chat_completion(response_format=Answer, input_tools=[], chat_completion=answer())
    messages = messages_of(parsed.choices[0].message)
    assert messages[0]["parsed"] == {"x": 1}
    for message in messages:
        body = parse_body(encode_body(translate(CHAT, {"messages": [QUESTION, message]})))
        assert (body.chat or [])[-1] == {"role": "assistant", "content": '{"x": 1}'}


def test_a_user_message_with_the_key_parsed_is_refused() -> None:
    question = {**QUESTION, "parsed": {"x": 1}}
    with pytest.raises(Exception, match=r"unknown key 'messages\.0\.parsed'"):
        encode_body(translate(CHAT, {"messages": [question]}))
