"""The official package reads our answers, streams and errors: the same object from both ways of asking."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import httpx2
import openai
import orjson
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tests.tokenmill.openai.runs import Script, chunks_of
from tokenmill.openai.errors import ApiError
from tokenmill.openai.request import CHAT, COMPLETIONS, URLS, streaming, translate
from tokenmill.openai.response import ANSWERS
from tokenmill.protocol.body import encode_body
from tokenmill.protocol.events import Event
from tokenmill.protocol.result import Status

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
THREE = Script([["a", "é"], ["b", "c", "d"], []], logprobs=True, ids=True, reasons=["stop"])
"""Choices of different lengths; the second has its first token before the others in `late`."""


class Answer(BaseModel):
    x: int
    y: str


JSON = Script([['{"x"', ": 1", ', "y": "z', '"}']])


def late(script: Script) -> list[Event]:
    """Return events whose first token is one of the second choice."""
    return [script.start(1), script.event(1, 1, 1, 0, 1), script.event(1, 2, 0, 0, len(script.choices[0]))]


class Server:
    """Answers as a gateway whose worker has run `script` already."""

    def __init__(self, script: Script, events: Iterable[Event] = (), status: Status = Status.SUCCEEDED) -> None:
        self.script, self.events, self.final = script, list(events), script.final(status)
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body, url = orjson.loads(request.content), request.url.path
        self.bodies.append(body)
        assert url in URLS
        try:
            encode_body(translate(url, body, stream=True))
            options = streaming(body)
            if options.on:
                return self._stream(url, options.include_usage)
            assert self.final.result is not None
            return httpx2.Response(200, json=ANSWERS[url]("job", self.final.result, 7))
        except ApiError as error:
            return httpx2.Response(error.status, json=error.body(), headers=error.headers)

    def _stream(self, url: str, usage: bool) -> httpx2.Response:
        chunks, lines = chunks_of(url, usage=usage), []
        for event in [*self.events, self.final]:
            lines += [orjson.dumps(chunk) for chunk in chunks.feed(event)]
        lines.append(b"[DONE]" if chunks.error is None else orjson.dumps(chunks.error.body()))
        content = b"".join(b"data: " + line + b"\n\n" for line in lines)
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})


def client_of(server: Callable[[httpx2.Request], httpx2.Response]) -> OpenAI:
    http = httpx2.Client(transport=httpx2.MockTransport(server))
    return OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http, max_retries=0)


@pytest.mark.parametrize("events", [THREE.run(1), late(THREE), [*late(THREE), *THREE.run(2)], []])
def test_the_streaming_helper_assembles_the_answer_without_a_stream(events: list[Event]) -> None:
    client = client_of(Server(THREE, events))
    options: dict[str, Any] = {"model": "m", "messages": HELLO, "n": 3, "logprobs": True}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion()
    assert kinds.count("content.done") == 2
    assert (found.id, found.usage, found.model) == (whole.id, whole.usage, whole.model)
    for streamed, choice in zip(found.choices, whole.choices, strict=True):
        assert (streamed.index, streamed.finish_reason) == (choice.index, choice.finish_reason)
        assert (streamed.message.content, streamed.message.role) == (choice.message.content, "assistant")
        assert choice.logprobs is not None
        assert (streamed.logprobs.content if streamed.logprobs else []) == choice.logprobs.content


def test_the_parse_helpers_give_the_object_with_and_without_a_stream() -> None:
    client = client_of(Server(JSON, JSON.run(1)))
    parsed = client.chat.completions.parse(model="m", messages=HELLO, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(x=1, y="z")
    with client.chat.completions.stream(model="m", messages=HELLO, response_format=Answer) as stream:
        contents = [event.snapshot for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.parsed == Answer(x=1, y="z")
    assert contents[-1] == JSON.text(0)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the package's own, for `parsed`
def test_an_answer_can_be_sent_back_as_the_object_that_the_package_made() -> None:
    server = Server(JSON, JSON.run(1))
    client = client_of(server)
    plain: ChatCompletion = client.chat.completions.create(model="m", messages=HELLO)
    parsed = client.chat.completions.parse(model="m", messages=HELLO, response_format=Answer)
    for message in (plain.choices[0].message, parsed.choices[0].message):
        history: list[Any] = [*HELLO, message, *HELLO]
        client.chat.completions.create(model="m", messages=history)
    assert server.bodies[-1]["messages"][1]["parsed"] == {"x": 1, "y": "z"}


def test_text_completions_are_read_with_and_without_a_stream() -> None:
    client = client_of(Server(THREE, late(THREE)))
    whole = client.completions.create(model="m", prompt="x", n=3, logprobs=1)
    texts, reasons, offsets = ["", "", ""], [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    for chunk in client.completions.create(model="m", prompt="x", n=3, logprobs=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert offsets == [choice.logprobs and choice.logprobs.text_offset for choice in whole.choices]


def test_usage_is_in_the_last_chunk_if_it_was_asked_for() -> None:
    client = client_of(Server(JSON, JSON.run(1)))
    asked = client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = asked
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (5, 4, 9)
    plain = client.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in plain)


@pytest.mark.parametrize(("status", "code"), [(Status.FAILED, "engine_error"), (Status.CANCELLED, "cancelled")])
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_a_stream_that_breaks_off_raises_the_error_after_its_text(status: Status, code: str, url: str) -> None:
    client = client_of(Server(JSON, JSON.run(1, 2), status))
    chunks: Any = (
        client.chat.completions.create(model="m", messages=HELLO, stream=True)
        if url == CHAT
        else client.completions.create(model="m", prompt="x", stream=True)
    )
    text = ""

    def go() -> None:
        nonlocal text
        for chunk in chunks:
            text += (chunk.choices[0].delta.content if url == CHAT else chunk.choices[0].text) or ""

    with pytest.raises(openai.APIError) as broken:
        go()
    assert text == JSON.text(0)
    assert (broken.value.code, broken.value.param) == (code, None)


def test_a_refused_key_is_a_bad_request_with_its_name() -> None:
    client = client_of(Server(JSON))
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt=["a", "b"])
    assert (refused.value.param, refused.value.code, refused.value.type) == (
        "prompt",
        "invalid_request",
        "invalid_request_error",
    )


@pytest.mark.parametrize(("retry", "requests"), [(True, 3), (False, 1)])
def test_the_package_repeats_a_request_unless_the_error_forbids_it(retry: bool, requests: int) -> None:
    seen = []

    def server(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        error = ApiError(500, "broken", retry_after=0.01, retry=retry)
        headers = {**error.headers, "retry-after-ms": "1"}
        return httpx2.Response(error.status, json=error.body(), headers=headers)

    client = client_of(server).with_options(max_retries=2)
    with pytest.raises(openai.InternalServerError, match="broken"):
        client.chat.completions.create(model="m", messages=HELLO)
    assert len(seen) == requests
