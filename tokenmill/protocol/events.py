"""The events of an output stream, for readers. No I/O here.

    parse_event(entry_id, fields) -> StartEvent | TokenEvent | FinalEvent
    StreamReader(from_id="0").feed(entries) -> Iterator[Event]    # .last_id to read on from, .fence, .done

A `StartEvent` with a higher fence than before restarts the text: drop the text of lower fences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tokenmill.protocol.result import Result, Status

SEAL_ID: Final = "1000000000000-0"
"""Above every fence of a new id and below every `*` ID: reading on from here skips tokens, but not the final event."""


@dataclass(frozen=True, slots=True)
class StartEvent:
    """A worker started the job; text of lower fences is void."""

    id: str
    fence: int
    worker: str
    attempt: int
    prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Text of one choice, to be appended to the text of earlier events with the same fence."""

    id: str
    fence: int
    n: int
    index: int
    text: str
    tokens: int
    token_ids: list[int] | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class FinalEvent:
    """The last event. `result` is None for a job with `stream 0`, whose result is in the result key."""

    id: str
    status: Status
    result: Result | None


Event = StartEvent | TokenEvent | FinalEvent


def parse_event(entry_id: bytes | str, fields: Mapping[bytes, bytes]) -> Event:
    """Parse an entry of an output stream.

    Raises:
        ValueError: the entry is not an event of the protocol.
    """
    event_id = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    fence, _, n = event_id.partition("-")
    try:
        kind = fields[b"type"]
        if kind == b"token":
            ids, logprobs = fields.get(b"token_ids"), fields.get(b"logprobs")
            return TokenEvent(
                id=event_id,
                fence=int(fence),
                n=int(n),
                index=int(fields[b"index"]),
                text=fields[b"text"].decode(),
                tokens=int(fields[b"tokens"]),
                token_ids=orjson.loads(ids) if ids is not None else None,
                logprobs=orjson.loads(logprobs) if logprobs is not None else None,
            )
        if kind == b"start":
            prompt = fields.get(b"prompt_tokens") or None
            worker, attempt = fields[b"worker"].decode(), int(fields[b"attempt"])
            return StartEvent(event_id, int(fence), worker, attempt, int(prompt) if prompt else None)
        if kind == b"final":
            raw = fields.get(b"result")
            return FinalEvent(event_id, Status(fields[b"status"].decode()), Result.from_json(raw) if raw else None)
    except KeyError as missing:
        raise ValueError(f"event {event_id} lacks {missing}") from None
    raise ValueError(f"event {event_id} has unknown type {kind[:32]!r}")


class StreamReader:
    """Follows an output stream from an ID on; after a lost connection, read on from `last_id`."""

    def __init__(self, from_id: str = "0") -> None:
        self.last_id = from_id
        self.done = False

    def feed(self, entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[Event]:
        """Parse entries as XREAD returns them, one at a time; entries behind the final event are ignored.

        Raises:
            ValueError: an entry is not an event.
        """
        for entry_id, fields in entries:
            event = parse_event(entry_id, fields)
            self.last_id = event.id
            self.done = isinstance(event, FinalEvent)
            yield event
            if self.done:
                return
