"""Results and events can be read back, by strict JSON readers too."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.client.follow import TextFollower, TextRestarted
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import FinalEvent, StartEvent, StreamReader, TokenEvent, parse_event
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Timings, Usage


def strict(raw: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(raw, parse_constant=refuse)


def test_a_result_has_the_shape_of_docs_protocol_md() -> None:
    result = Result(
        "7f3a",
        Status.SUCCEEDED,
        model="m",
        attempt=1,
        worker="host:pid:x",
        choices=(Choice(0, "…", "stop", "\n"),),
        usage=Usage(5, 32, 0),
        timings=Timings(3, 41, 390),
    )
    assert strict(result.to_json()) == {
        "v": 1, "id": "7f3a", "status": "succeeded", "model": "m", "attempt": 1, "worker": "host:pid:x",
        "choices": [{"index": 0, "text": "…", "finish_reason": "stop", "stop": "\n"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 32, "cached_tokens": 0},
        "timings": {"queued_ms": 3, "first_token_ms": 41, "total_ms": 390},
        "error": None,
    }  # fmt: skip


def test_optional_keys_are_left_out_and_unknown_values_are_null() -> None:
    data = strict(Result("a", Status.FAILED).to_json())
    assert not {"clamped", "traceparent", "cancel_reason"} & set(data)
    assert data["usage"] == {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}


def test_a_result_has_finite_numbers_and_utf8_text_whatever_it_is_made_of() -> None:
    odd = Result(
        "a",
        Status.FAILED,
        choices=(Choice(0, "", "error", logprobs=[float("-inf"), float("nan")]),),
        timings=Timings(float("inf")),
        error=ErrorInfo("engine_error", "bad \ud800"),
        cancel_reason="\udfff",
    )
    data = strict(odd.to_json())
    assert data["choices"][0]["logprobs"] == [None, None]
    assert data["timings"]["queued_ms"] is None


@given(
    st.builds(
        Result,
        st.text(max_size=5),
        st.sampled_from(Status),
        attempt=st.none() | st.integers(0, 9),
        choices=st.lists(
            st.builds(Choice, st.integers(0, 9), st.text(), st.just("stop"), st.none() | st.text() | st.integers(0, 9)),
            max_size=3,
        ).map(tuple),
        error=st.none() | st.builds(ErrorInfo, st.just("gave_up"), st.text(max_size=9), st.booleans(), st.none()),
        cancel_reason=st.none() | st.text(max_size=9),
    )
)
def test_a_result_is_equal_after_encoding_and_parsing(result: Result) -> None:
    assert Result.from_json(result.to_json()) == result


def test_a_gave_up_names_its_cause_and_a_newer_key_is_ignored() -> None:
    error = ErrorInfo.of(JobError(ErrorCode.GAVE_UP, "three deaths", cause=ErrorCode.WORKER_LOST))
    data = strict(Result("a", Status.FAILED, error=error).to_json())
    assert data["error"] == {
        "code": "gave_up", "message": "three deaths", "retryable": False, "cause": "worker_lost",
    }  # fmt: skip
    assert Result.from_json(json.dumps({**data, "new": 1})).error == error
    for broken in (b"{", b"[]", b"{}", b'{"id":"a","status":"odd"}', b"null"):
        with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
            Result.from_json(broken)


def test_a_stream_reader_stops_at_the_final_event_and_keeps_its_last_id() -> None:
    reader = StreamReader()
    start = {b"type": b"start", b"worker": b"w", b"attempt": b"1", b"prompt_tokens": b"3"}
    token = {b"type": b"token", b"index": b"0", b"text": b"x", b"tokens": b"1"}
    final = {b"type": b"final", b"status": b"succeeded"}
    assert list(reader.feed([(b"1-0", start), (b"1-1", token)])) == [
        StartEvent("1-0", 1, "w", 1, 3),
        TokenEvent("1-1", 1, 1, 0, "x", 1),
    ]
    assert (reader.last_id, reader.done) == ("1-1", False)
    assert list(reader.feed([(b"1700000000000-0", final), (b"1700000000000-1", token)])) == [
        FinalEvent("1700000000000-0", Status.SUCCEEDED, None)
    ]
    assert reader.done


@pytest.mark.parametrize("fields", [{}, {b"type": b"odd"}, {b"type": b"token"}, {b"type": b"final", b"status": b"x"}])
def test_an_entry_that_is_not_an_event_raises_an_error(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
        parse_event("1-1", fields)


def follow(*events: tuple[int, str]) -> str:
    """Feed a start event for each new fence, and the text; return all text that was yielded."""
    follower, fence, out = TextFollower(), 0, ""
    for n, (at, text) in enumerate(events, 1):
        if at != fence:
            fence = at
            out += follower.feed(StartEvent(f"{fence}-0", fence, "w", 1, 1))
        out += follower.feed(TokenEvent(f"{fence}-{n}", fence, n, 0, text, 1))
    return out


@given(st.text(max_size=12), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4))
def test_equal_text_after_a_restart_is_yielded_once_however_it_is_split(text: str, died: int, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    second = [(2, text[a:b]) for a, b in itertools.pairwise(edges)]
    assert follow(*((1, char) for char in text[:died]), *second) == text


@pytest.mark.parametrize("whole", ["", "a"])
def test_a_result_with_less_text_than_was_yielded_is_reported_if_the_job_succeeded(whole: str) -> None:
    for status in Status:
        follower = TextFollower()
        follower.feed(TokenEvent("1-1", 1, 1, 0, "ab", 1))
        follower.feed(StartEvent("2-0", 2, "w", 2, 1))
        result = Result("job", status, choices=(Choice(0, whole, "stop"),))
        if status is Status.SUCCEEDED:
            with pytest.raises(TextRestarted):
                follower.feed(FinalEvent("9-0", status, result))
            assert follower.restart() == whole
        else:
            assert follower.feed(FinalEvent("9-0", status, result)) == ""


def test_different_text_after_a_restart_is_reported() -> None:
    with pytest.raises(TextRestarted):
        follow((1, "ab"), (2, "a"), (2, "x"))
