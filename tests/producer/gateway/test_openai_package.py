"""The official `openai` package, sync and async, unmodified: models, chat, completions, streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.producer.gateway.faces import Face
from tests.producer.gateway.harness import GatewayProcess, Stack, client_of, get, post, stack
from tests.support import RedisServer, eventually
from tests.worker.fakes import text_of
from worker.demo.child import worker_process

pytestmark = [pytest.mark.redis_server, pytest.mark.timeout(300)]
ASK: list[Any] = [{"role": "user", "content": "Name a river."}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Face:
    return Face(request.param, gateway)


def answer(count: int, choice: int = 0, prompt: str = "<user>Name a river.") -> str:
    """The text that the fake worker generates."""
    return text_of(list(prompt.encode()), choice, count)


def joined(chunks: list[Any], choice: int = 0) -> str:
    """The text of a chat choice's chunks."""
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice)


def test_models_are_the_names_that_live_workers_serve(face: Face) -> None:
    (model,) = face.items(lambda c: c.models.list())
    assert (model.id, model.object) == ("fake", "model")
    assert face(lambda c: c.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError, match="nope"):
        face(lambda c: c.models.retrieve("nope"))


def test_a_chat_has_the_text_the_usage_and_the_id_of_its_job(face: Face, gateway: GatewayProcess) -> None:
    done = face(lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=5, temperature=0))
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content) == ("assistant", answer(5))
    assert (choice.finish_reason, done.model, done.object) == ("length", "fake", "chat.completion")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (19, 5, 24)
    assert done.id == f"chatcmpl-{done._request_id}"
    job = get(f"{gateway.url}/v1/jobs/{done._request_id}").json
    assert job["status"] == "succeeded"
    assert job["result"]["choices"][0]["text"] == answer(5)


def test_a_chat_gives_n_choices_with_log_probabilities(face: Face) -> None:
    done = face(
        lambda c: c.chat.completions.create(
            model="fake", messages=ASK, max_completion_tokens=4, n=3, logprobs=True, top_logprobs=3
        )
    )
    assert [choice.message.content for choice in done.choices] == [answer(4, i) for i in range(3)]
    for choice in done.choices:
        assert len(choice.logprobs.content) == 4
        assert all(len(entry.top_logprobs) <= 4 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_a_message_as_the_package_dumps_it_is_sent_back_as_the_history_of_a_chat(face: Face) -> None:
    first = face(lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=3))
    history = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "Another."}]
    whole = [*ASK, first.choices[0].message, {"role": "user", "content": "Another."}]
    texts = {
        face(lambda c, m=messages: c.chat.completions.create(model="fake", messages=m, max_tokens=3))
        .choices[0]
        .message.content
        for messages in (history, whole)
    }
    assert texts == {answer(3, 0, f"<user>Name a river.<assistant>{answer(3)}<user>Another.")}


def test_tools_with_the_choice_auto_are_shown_to_the_model(face: Face) -> None:
    done = face(
        lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=3, tools=[TOOL], tool_choice="auto")
    )
    assert done.choices[0].message.content
    assert done.choices[0].message.content != answer(3)
    assert done.usage.prompt_tokens > 19
    ignored = face(
        lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=3, tools=[TOOL], tool_choice="none")
    )
    assert ignored.choices[0].message.content == answer(3)


def test_keys_of_tokenmill_pass_through(face: Face) -> None:
    done = face(
        lambda c: c.chat.completions.create(
            model="fake", messages=ASK, max_tokens=3, extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True}
        )
    )
    assert len(done.choices[0].token_ids) == 3


def test_a_stream_of_a_chat_joins_to_the_text_and_ends_with_the_reason(face: Face) -> None:
    chunks = face.items(lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=20, stream=True))
    assert joined(chunks) == answer(20)
    assert {(c.object, c.model, len(c.choices)) for c in chunks} == {("chat.completion.chunk", "fake", 1)}
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_a_stream_has_the_usage_if_it_is_asked_for(face: Face) -> None:
    chunks = face.items(
        lambda c: c.chat.completions.create(
            model="fake", messages=ASK, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (19, 6)
    assert all(c.usage is None for c in chunks[:-1])
    assert joined(chunks) == answer(6)


def test_a_stream_of_n_choices_has_each_text_with_its_log_probabilities(face: Face) -> None:
    chunks = face.items(
        lambda c: c.chat.completions.create(
            model="fake", messages=ASK, max_tokens=8, n=2, logprobs=True, top_logprobs=1, stream=True
        )
    )
    for index in range(2):
        assert joined(chunks, index) == answer(8, index)
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert sum(len(c.logprobs.content) for c in mine if c.logprobs is not None) == 8
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]


def test_completions_take_text_or_token_ids_and_stream(face: Face) -> None:
    done = face(lambda c: c.completions.create(model="fake", prompt="Once", max_tokens=4))
    assert (done.object, done.choices[0].text) == ("text_completion", answer(4, 0, "Once"))
    assert done.id == f"cmpl-{done._request_id}"
    ids = face(lambda c: c.completions.create(model="fake", prompt=list(b"Once"), max_tokens=4))
    assert ids.choices[0].text == done.choices[0].text
    default = face(lambda c: c.completions.create(model="fake", prompt="Once"))
    assert default.usage.completion_tokens == 16
    chunks = face.items(
        lambda c: c.completions.create(model="fake", prompt="Once", max_tokens=9, n=2, logprobs=2, stream=True)
    )
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in mine) == answer(9, index, "Once")
        assert sum(len(c.logprobs.tokens) for c in mine if c.logprobs is not None) == 9
        assert mine[-1].finish_reason == "length"


def test_the_stream_helper_of_the_package_follows_a_chat(openai_client: openai.OpenAI) -> None:
    """The fake worker ends at `max_tokens`, which the helper reports as an error with all that was generated."""
    helper = openai_client.chat.completions.stream(model="fake", messages=ASK, max_tokens=7)
    deltas: list[str] = []

    def follow() -> None:
        with helper as stream:
            deltas.extend(event.delta for event in stream if event.type == "content.delta")
            stream.get_final_completion()

    with pytest.raises(openai.LengthFinishReasonError) as raised:
        follow()
    assert raised.value.completion.choices[0].message.content == answer(7)
    assert answer(7).startswith("".join(deltas))
    assert deltas


def test_the_raw_response_has_the_job_id_as_request_id(openai_client: openai.OpenAI) -> None:
    raw = openai_client.chat.completions.with_raw_response.create(model="fake", messages=ASK, max_tokens=2)
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_request_with_the_same_idempotency_key_is_the_same_job(face: Face, stream: bool) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}

    def ask() -> tuple[str, str | None]:
        given: Any = {"model": "fake", "messages": ASK, "max_tokens": 4, "extra_headers": headers}
        if stream:
            chunks = face.items(lambda c: c.chat.completions.create(**given, stream=True))
            return chunks[0].id, joined(chunks)
        done = face(lambda c: c.chat.completions.create(**given))
        return done.id, done.choices[0].message.content

    first, again = ask(), ask()
    assert first == again
    assert first[1] == answer(4)


def test_a_stream_that_its_client_leaves_cancels_the_job(face: Face, gateway: GatewayProcess) -> None:
    chunks = face.items(
        lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=230, stream=True),
        lambda items: len(items) == 3,
    )
    job = chunks[0].id.removeprefix("chatcmpl-")
    assert get(f"{gateway.url}/v1/jobs/{job}?wait=20").json["status"] == "cancelled"


def test_a_stream_whose_job_is_cancelled_ends_with_an_error(face: Face, gateway: GatewayProcess) -> None:
    seen: list[Any] = []

    def cancel_at_the_third(items: list[Any]) -> bool:
        seen[:] = items
        if len(items) == 3:
            assert post(f"{gateway.url}/v1/jobs/{items[0].id.removeprefix('chatcmpl-')}/cancel", {}).status == 200
        return False

    with pytest.raises(openai.APIError, match="cancel"):
        face.items(
            lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=230, stream=True),
            cancel_at_the_third,
        )
    assert answer(230).startswith(joined(seen))


class Fruit(BaseModel):
    name: Literal["apple", "pear"]
    colour: Literal["red", "green", "yellow"]


@pytest.fixture(scope="module")
def real(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway before a worker with the demo model, which can write what a schema says."""
    with stack(redis_server.url, tmp_path_factory.mktemp("real")) as made:
        options = ["--model", "smollm2-135m", "--redis", made.url, "--queue", made.queue.keys.queue]
        with worker_process(*options, "--num-kv-blocks", "256"):
            made.gateway()
            eventually(lambda: get(f"{made.first_gateway.url}/readyz").status == 200, 120, 0.1)
            yield made


@pytest.mark.model
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_structured_output_is_parsed_into_its_class(real: Stack, kind: str) -> None:
    face = Face(kind, real.first_gateway)
    done = face(
        lambda c: c.chat.completions.parse(
            model="smollm2-135m", messages=[{"role": "user", "content": "Describe a fruit."}],
            response_format=Fruit, max_tokens=60, temperature=0,
        )
    )  # fmt: skip
    parsed = done.choices[0].message.parsed
    assert isinstance(parsed, Fruit)
    assert json.loads(done.choices[0].message.content) == parsed.model_dump()


@pytest.mark.model
def test_a_streamed_structured_output_is_parsed_into_its_class(real: Stack) -> None:
    with (
        client_of(real.first_gateway) as client,
        client.chat.completions.stream(
            model="smollm2-135m", messages=ASK, response_format=Fruit, max_tokens=60, temperature=0
        ) as stream,
    ):
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Fruit)
