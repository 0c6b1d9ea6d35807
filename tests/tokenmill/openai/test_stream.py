"""Chunks of a stream: OpenAI's types, the same answer as without a stream, and nothing twice after a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.tokenmill.openai.runs import Script, chunks_of, content_of, feed, read
from tokenmill.client.follow import TextRestarted
from tokenmill.openai.request import CHAT, COMPLETIONS
from tokenmill.openai.response import chat_completion, completion
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import Event, FinalEvent
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status

TWO = Script([["a", "b", "c"], ["d", "é"]], logprobs=True, ids=True)
PLAIN = Script([["a", "b", "c"]])


def strictly(sent: list[dict[str, Any]]) -> list[ChatCompletionChunk]:
    """Read by OpenAI's model; nothing may be of a wrong type, and only our own keys unknown to it."""
    chunks = []
    for chunk in sent:
        ours = [part.pop("token_ids") for part in chunk["choices"] if "token_ids" in part]
        found = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert json.loads(found.model_dump_json(exclude_unset=True)) == chunk
        for part, ids in zip(chunk["choices"], ours, strict=False):
            part["token_ids"] = ids
        chunks.append(found)
    return chunks


def test_a_chat_streams_a_role_the_text_and_a_finish_reason() -> None:
    sent = feed(chunks_of(), [*PLAIN.run(1), PLAIN.final()])
    choices = [chunk["choices"][0] for chunk in sent]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "stop"]
    assert all(chunk.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices"} for chunk in sent)
    frames = {(c.id, c.object, c.created, c.model) for c in strictly(sent)}
    assert frames == {("chatcmpl-job", "chat.completion.chunk", 7, "m")}


def test_a_text_completion_streams_text_and_a_finish_reason() -> None:
    sent = feed(chunks_of(COMPLETIONS), [*PLAIN.run(1), PLAIN.final()])
    assert [chunk["choices"][0]["text"] for chunk in sent] == ["a", "b", "c", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in sent] == [None, None, None, "stop"]
    for chunk in sent:
        assert (chunk["id"], chunk["object"], chunk["created"], chunk["model"]) == (
            "cmpl-job",
            "text_completion",
            7,
            "m",
        )
        for part in chunk["choices"]:  # a stream has null where the type of whole answers has none
            part["finish_reason"] = part["finish_reason"] or "stop"
        assert json.loads(Completion.model_validate(chunk, strict=True).model_dump_json(exclude_unset=True)) == chunk


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_the_chunks_add_up_to_the_answer_without_a_stream(url: str, step: int) -> None:
    final = TWO.final()
    sent = feed(chunks_of(url), [*TWO.run(1, step=step), final])
    whole = (chat_completion if url == CHAT else completion)("job", TWO.result(), 7)
    found = read(sent)
    assert sorted(found) == [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        got = found[choice["index"]]
        assert got.text == (choice["message"]["content"] if url == CHAT else choice["text"])
        assert (got.finish_reason, got.ids) == (choice["finish_reason"], choice["token_ids"])
        assert got.content == content_of(choice["logprobs"])
    if url == CHAT:
        strictly(sent)


def test_usage_comes_last_in_a_chunk_without_choices_and_is_null_before() -> None:
    sent = feed(chunks_of(usage=True), [*PLAIN.run(1), PLAIN.final()])
    assert [chunk["usage"] for chunk in sent[:-1]] == [None] * 5
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"] == chat_completion("job", PLAIN.result(), 7)["usage"]
    strictly(sent)


def test_nothing_is_started_before_the_first_token() -> None:
    chunks = chunks_of()
    assert feed(chunks, [PLAIN.start(1)]) == []
    chunks.model = "the worker's"
    assert {chunk["model"] for chunk in chunks.feed(PLAIN.event(1, 1, 0, 0, 1))} == {"the worker's"}
    assert not chunks.done
    chunks.feed(PLAIN.final())
    assert (chunks.done, chunks.error) == (True, None)


def test_a_choice_without_text_has_a_role_and_a_finish_reason() -> None:
    empty = Script([[], ["a"]])
    found = read(feed(chunks_of(), [*empty.run(1), empty.final()]))
    assert (found[0].roles, found[0].text, found[0].finish_reason) == (1, "", "stop")


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_an_expired_stream_is_sent_whole_from_its_result(url: str) -> None:
    live = read(feed(chunks_of(url), [*TWO.run(1), TWO.final()]))
    assert read(feed(chunks_of(url), [TWO.final()])) == live


def test_tokens_without_text_are_sent_only_if_asked_for() -> None:
    held: list[Event] = [PLAIN.start(1), PLAIN.event(1, 1, 0, 0, 2, held=2)]
    assert feed(chunks_of(), held) == []
    asked = Script(PLAIN.choices, logprobs=True)
    sent = feed(chunks_of(), [asked.start(1), asked.event(1, 1, 0, 0, 2, held=2)])
    assert [len(content_of(chunk["choices"][0]["logprobs"])) for chunk in sent] == [0, 2]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_restart_with_equal_text_sends_nothing_twice(url: str, logprobs: bool) -> None:
    script = Script(TWO.choices, logprobs, logprobs)
    expected = read(feed(chunks_of(url), [*script.run(1), script.final()]))
    for died in range(4):
        for again in range(4):
            for step in (1, 2, 3):
                runs = [*script.run(1, died), *script.run(2, again, step), *script.run(3, step=step)]
                assert read(feed(chunks_of(url), [*runs, script.final()])) == expected
                assert read(feed(chunks_of(url), [*script.run(1, died), script.final()])) == expected


@pytest.mark.parametrize("other", [["a", "x", "c"], ["a", "x"], ["a"], []])
def test_a_restart_with_other_text_is_an_error_and_what_was_sent_stays(other: list[str]) -> None:
    chunks, second = chunks_of(), Script([other])
    feed(chunks, PLAIN.run(1, 2))
    events = [*second.run(2), second.final()]
    sent: list[dict[str, Any]] = []

    def go() -> None:
        for event in events:
            sent.extend(chunks.feed(event))

    with pytest.raises(TextRestarted):
        go()
    assert sent == []


def test_a_restart_with_equal_text_of_other_tokens_is_an_error_if_tokens_were_sent() -> None:
    first, second = Script([["a", "b", "c"]], ids=True), Script([["ab", "c"]], ids=True)
    chunks = chunks_of()
    feed(chunks, first.run(1, 2))
    with pytest.raises(TextRestarted):
        feed(chunks, second.run(2))
    plain = chunks_of()
    expected = read(feed(plain, [*Script(first.choices).run(1, 2), *Script(second.choices).run(2), PLAIN.final()]))
    assert expected[0].text == "abc"


@pytest.mark.parametrize(
    ("status", "http", "code"),
    [(Status.FAILED, 500, "gave_up"), (Status.EXPIRED, 504, "timeout"), (Status.CANCELLED, 409, "cancelled")],
)
def test_a_job_that_does_not_succeed_ends_with_its_missing_text_and_an_error(
    status: Status, http: int, code: str
) -> None:
    chunks = chunks_of(usage=True)
    error = None if status is Status.CANCELLED else ErrorInfo.of(JobError(ErrorCode.GAVE_UP, "given up"))
    feed(chunks, PLAIN.run(1, 2))
    sent = chunks.feed(PLAIN.final(status, error=error))
    assert [chunk["choices"][0]["delta"] for chunk in sent] == [{"content": "c"}]
    assert chunks.done
    assert chunks.error is not None
    assert (chunks.error.status, chunks.error.code) == (http, code)


def test_a_job_that_fails_before_its_first_token_starts_nothing() -> None:
    chunks = chunks_of()
    error = ErrorInfo.of(JobError(ErrorCode.PROMPT_TOO_LONG, "prompt: 9 tokens, at most 8"))
    final = FinalEvent("1-0", Status.FAILED, Result("job", Status.FAILED, choices=(), error=error))
    assert feed(chunks, [PLAIN.start(1), final]) == []
    assert chunks.error is not None
    assert (chunks.error.status, chunks.error.code) == (400, "context_length_exceeded")
    partial = Result("job", Status.CANCELLED, choices=(Choice(0, "", "cancelled"),))
    assert chunks_of().feed(FinalEvent("1-0", Status.CANCELLED, partial)) == []


def test_a_failed_job_whose_last_text_differs_ends_with_its_own_error() -> None:
    for other in (["a"], ["x", "y"]):
        chunks, second = chunks_of(), Script([other])
        feed(chunks, PLAIN.run(1, 2))
        assert chunks.feed(second.final(Status.CANCELLED)) == []
        assert chunks.error is not None
        assert chunks.error.code == "cancelled"


def test_a_result_that_is_no_longer_kept_is_an_error() -> None:
    chunks = chunks_of()
    feed(chunks, PLAIN.run(1))
    assert chunks.feed(FinalEvent("1-0", Status.SUCCEEDED, None)) == []
    assert chunks.error is not None
    assert (chunks.error.status, chunks.error.code) == (500, "result_expired")


def test_the_last_chunk_has_the_keys_of_ours_that_a_whole_answer_has() -> None:
    choices = (Choice(0, "a", "length", prompt_logprobs=[None]),)
    result = Result("job", Status.SUCCEEDED, choices=choices, clamped={"max_tokens": 1})
    last = chunks_of().feed(FinalEvent("1-0", Status.SUCCEEDED, result))[-1]
    assert (last["clamped"], last["prompt_logprobs"]) == ({"max_tokens": 1}, [None])
