"""Chunks under any split of text and tokens into events, any interleaving of choices and any restarts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenmill.openai.runs import chunks_of, feed, read, token
from tokenmill.client.follow import TextRestarted
from tokenmill.openai.request import CHAT, COMPLETIONS
from tokenmill.openai.response import chat_completion, completion
from tokenmill.protocol.events import Event, FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.result import Choice, Result, Status, Usage

EXAMPLES = settings(max_examples=300, deadline=None)
Step = tuple[int, int, int]
"""Choice, number of tokens, number of characters that a stop string or an incomplete character holds back."""


@dataclass(frozen=True)
class Generation:
    """What a model generates: for each choice the bytes of its tokens, some of them parts of characters, some empty."""

    choices: tuple[tuple[bytes, ...], ...]
    logprobs: bool
    ids: bool

    def text(self, index: int) -> str:
        return b"".join(self.choices[index]).decode()

    def tokens(self, index: int) -> list[dict[str, Any]]:
        return [token(raw, sum(raw) + place) for place, raw in enumerate(self.choices[index])]

    def run(self, fence: int, steps: Sequence[Step]) -> list[Event]:
        """Return the events of a run that ends after `steps`."""
        events: list[Event] = [StartEvent(f"{fence}-0", fence, "w", fence, 5)]
        tokens, chars = [0] * len(self.choices), [0] * len(self.choices)
        for index, count, held in steps:
            if index >= len(self.choices):
                continue
            first, end = tokens[index], min(tokens[index] + count, len(self.choices[index]))
            whole = len(b"".join(self.choices[index][:end]).decode(errors="ignore"))
            upto = max(chars[index], whole - held)
            events.append(self._event(fence, len(events), index, (first, end), (chars[index], upto)))
            tokens[index], chars[index] = end, upto
        return events

    def _event(self, fence: int, n: int, index: int, tokens: tuple[int, int], chars: tuple[int, int]) -> TokenEvent:
        found = self.tokens(index)[slice(*tokens)]
        return TokenEvent(
            f"{fence}-{n}",
            fence,
            n,
            index,
            self.text(index)[slice(*chars)],
            len(found),
            [one["token_id"] for one in found] if self.ids else None,
            {"content": found} if self.logprobs else None,
        )

    def final(self, status: Status = Status.SUCCEEDED) -> FinalEvent:
        choices = []
        for index in range(len(self.choices)):
            found = self.tokens(index)
            ids = [one["token_id"] for one in found] if self.ids else None
            logprobs = {"content": found} if self.logprobs else None
            choices.append(Choice(index, self.text(index), "stop", logprobs=logprobs, token_ids=ids))
        result = Result("job", status, model="m", choices=tuple(choices), usage=Usage(5, 3, 1))
        return FinalEvent("1700000000000-0", status, result)


@st.composite
def choices(draw: st.DrawFn) -> tuple[bytes, ...]:
    raw = draw(st.text(draw(st.sampled_from(["a", "ab", "ab é€😀"])), max_size=8)).encode()
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(raw)), max_size=8))), len(raw)]
    return tuple(raw[a:b] for a, b in itertools.pairwise(edges))


GENERATIONS = st.builds(
    Generation, st.lists(choices(), min_size=1, max_size=3).map(tuple), st.booleans(), st.booleans()
)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)), max_size=15)
URLS = st.sampled_from([CHAT, COMPLETIONS])


@EXAMPLES
@given(URLS, GENERATIONS, st.lists(STEPS, max_size=3))
def test_equal_runs_give_the_answer_without_a_stream_wherever_a_worker_is_lost(
    url: str, generated: Generation, runs: list[list[Step]]
) -> None:
    events = [event for fence, steps in enumerate(runs, 1) for event in generated.run(fence, steps)]
    final = generated.final()
    sent = feed(chunks_of(url), [*events, final])
    assert final.result is not None
    whole = (chat_completion if url == CHAT else completion)("job", final.result, 7)
    found = read(sent)
    assert sorted(found) == list(range(len(generated.choices)))
    expected = read([whole])
    for index, choice in found.items():
        assert choice.text == generated.text(index)
        assert (choice.ids, choice.content) == (expected[index].ids, expected[index].content)
        assert choice.finish_reason == "stop"


@EXAMPLES
@given(URLS, GENERATIONS, GENERATIONS, STEPS, STEPS, st.sampled_from(list(Status)))
def test_other_text_after_a_restart_is_never_sent_as_if_it_followed(
    url: str, first: Generation, other: Generation, steps: list[Step], again: list[Step], status: Status
) -> None:
    second = Generation(other.choices, first.logprobs, first.ids)
    chunks, sent = chunks_of(url), []
    final = second.final(status)
    restarted = False
    try:
        for event in [*first.run(1, steps), *second.run(2, again), final]:
            sent += chunks.feed(event)
    except TextRestarted:
        restarted = True
    found = read(sent)
    if restarted or status is not Status.SUCCEEDED:
        assert restarted or chunks.error is not None
        assert all(choice.finish_reason is None for choice in found.values()) or restarted
        return
    for index in range(len(second.choices)):
        tokens = second.tokens(index)
        assert found[index].text == second.text(index)
        assert found[index].ids == ([one["token_id"] for one in tokens] if second.ids else [])
        assert len(found[index].content) == (len(tokens) if second.logprobs else 0)
        assert found[index].finish_reason == "stop"


@EXAMPLES
@given(URLS, GENERATIONS, STEPS, st.sampled_from([Status.FAILED, Status.CANCELLED, Status.EXPIRED]))
def test_a_stream_that_ends_with_an_error_has_sent_all_text_of_the_result(
    url: str, generated: Generation, steps: list[Step], status: Status
) -> None:
    chunks = chunks_of(url)
    found = read(feed(chunks, [*generated.run(1, steps), generated.final(status)]))
    assert chunks.error is not None
    for index in range(len(generated.choices)):
        assert (found[index].text if index in found else "") == generated.text(index)
        assert index not in found or found[index].finish_reason is None
