"""Runs of a made-up job, as events and as a result, and the answer that a reader assembles from chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.openai.request import CHAT
from tokenmill.openai.stream import Chunks
from tokenmill.protocol.events import Event, FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.result import Choice, Result, Status, Usage


def token(text: str | bytes, token_id: int) -> dict[str, Any]:
    raw = text.encode() if isinstance(text, str) else text
    one = {"token": raw.decode(errors="replace"), "token_id": token_id, "logprob": -token_id / 100, "bytes": list(raw)}
    other = {"token": "x", "token_id": 0, "logprob": -9.0, "bytes": [120]}
    return {**one, "top_logprobs": [other]}


@dataclass(frozen=True)
class Script:
    """What a worker generates for each choice: the texts of its tokens; ids follow from place and text."""

    choices: Sequence[Sequence[str]]
    logprobs: bool = False
    ids: bool = False
    reasons: Sequence[str] = ("stop", "length")
    """Finish reasons of the choices, in turns."""

    def text(self, index: int) -> str:
        return "".join(self.choices[index])

    def token_ids(self, index: int) -> list[int]:
        return [sum(text.encode()) + place for place, text in enumerate(self.choices[index])]

    def content(self, index: int) -> list[dict[str, Any]]:
        pairs = zip(self.choices[index], self.token_ids(index), strict=True)
        return [token(text, token_id) for text, token_id in pairs]

    def start(self, fence: int) -> StartEvent:
        return StartEvent(f"{fence}-0", fence, "worker", fence, 5)

    def event(self, fence: int, n: int, index: int, first: int, end: int, held: int = 0) -> TokenEvent:
        """Tokens `first` to `end` of a choice as one event; `held`: characters at its end that follow later."""
        before, upto = "".join(self.choices[index][:first]), "".join(self.choices[index][:end])
        return TokenEvent(
            f"{fence}-{n}",
            fence,
            n,
            index,
            upto[len(before) :][: len(upto) - len(before) - held],
            end - first,
            self.token_ids(index)[first:end] if self.ids else None,
            {"content": self.content(index)[first:end]} if self.logprobs else None,
        )

    def run(self, fence: int, upto: int | None = None, step: int = 1) -> list[Event]:
        """The start, and the tokens of all choices in turns, `step` at a time, up to token `upto` of each."""
        events: list[Event] = [self.start(fence)]
        longest = max((len(texts) for texts in self.choices), default=0)
        for first in range(0, min(longest, longest if upto is None else upto), step):
            for index, texts in enumerate(self.choices):
                end = min(first + step, len(texts) if upto is None else min(upto, len(texts)))
                if first < end:
                    events.append(self.event(fence, len(events), index, first, end))
        return events

    def result(self, status: Status = Status.SUCCEEDED, **changes: Any) -> Result:
        choices = tuple(
            Choice(
                index,
                self.text(index),
                self.reasons[index % len(self.reasons)],
                logprobs={"content": self.content(index)} if self.logprobs else None,
                token_ids=self.token_ids(index) if self.ids else None,
            )
            for index in range(len(self.choices))
        )
        usage = Usage(5, sum(map(len, self.choices)), 2)
        given = {"id": "job", "status": status, "model": "m", "choices": choices, "usage": usage, **changes}
        return Result(**given)

    def final(self, status: Status = Status.SUCCEEDED, **changes: Any) -> FinalEvent:
        return FinalEvent("1700000000000-0", status, self.result(status, **changes))


@dataclass
class Read:
    """What a reader has read of one choice."""

    text: str = ""
    content: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    roles: int = 0


def chunks_of(url: str = CHAT, *, usage: bool = False) -> Chunks:
    return Chunks(url, "job", model="m", include_usage=usage, created=7)


def feed(chunks: Chunks, events: Iterable[Event]) -> list[dict[str, Any]]:
    return [chunk for event in events for chunk in chunks.feed(event)]


def read(sent: Iterable[dict[str, Any]]) -> dict[int, Read]:
    """Assemble the choices of a stream as any reader does; nothing may come after a choice's `finish_reason`."""
    found: dict[int, Read] = defaultdict(Read)
    for chunk in sent:
        for part in chunk["choices"]:
            choice = found[part["index"]]
            assert choice.finish_reason is None
            if "message" in part:
                choice.text += part["message"]["content"]
            elif "delta" in part:
                assert ("role" in part["delta"]) == (choice.roles == 0), "the first chunk, and no other, has the role"
                choice.roles += "role" in part["delta"]
                choice.text += part["delta"].get("content") or ""
            else:
                choice.text += part["text"]
            choice.finish_reason = part["finish_reason"]
            choice.ids += part.get("token_ids", [])
            choice.content += content_of(part["logprobs"])
    return dict(found)


def content_of(logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [dict(zip(names, row, strict=True)) for row in zip(*(logprobs[name] for name in names), strict=True)]
