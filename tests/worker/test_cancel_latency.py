"""Under full load a cancelled job's blocks are free after one poll and one engine step, and its reader gets the end."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.outputs import StepOutput
from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Queue, inside
from tokenmill.protocol.events import SEAL_ID
from tokenmill.protocol.scripts import Scripts
from worker.inbox import Cancel, Inbox, Message
from worker.queue.canceller import Canceller

STREAMS = 64
Span = tuple[float, float]


@dataclass
class Watched(FakeEngine):
    """Records when each step began and ended, and when each request left the engine."""

    spans: list[Span] = field(default_factory=list)
    left: dict[int, float] = field(default_factory=dict)
    """The prompt's only token id → when the engine had freed its request."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=STREAMS, capacity=1 << 20, step_seconds=0.004)
        self.spans, self.left = [], {}

    def step(self) -> StepOutput:
        began, before = time.monotonic(), {live.request.prompt[0] for live in self._live.values()}
        output = super().step()
        ended = time.monotonic()
        self.spans.append((began, ended))
        for gone in before - {live.request.prompt[0] for live in self._live.values()}:
            self.left[gone] = ended
        return output


def whole_within(spans: list[Span], start: float, end: float) -> int:
    """Count the spans that began after `start` and ended before `end`."""
    return sum(1 for began, ended in spans[bisect_left(spans, (start, 0.0)) :] if ended < end)


def watch_worker(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Span], dict[str, float], list[Span], dict[str, float]]:
    """Record the polls, when cancels reached the engine, the publisher's round trips, and when results were written."""
    polls: list[Span] = []
    told: dict[str, float] = {}
    trips: list[Span] = []
    written: dict[str, float] = {}
    poll, post, publish, end_all = Canceller.poll, Inbox.post, Scripts.publish, Scripts.end_all

    def watched(self: Canceller) -> None:
        began = time.monotonic()
        poll(self)
        polls.append((began, time.monotonic()))

    def heard(self: Inbox, message: Message) -> None:
        if isinstance(message, Cancel):
            told.setdefault(message.handle, time.monotonic())
        post(self, message)

    def published(self: Scripts, batch: Any) -> Any:
        began = time.monotonic()
        refused = publish(self, batch)
        if len(batch):
            trips.append((began, time.monotonic()))
        return refused

    def ended(self: Scripts, ends: Any) -> Any:
        began = time.monotonic()
        replies = end_all(self, ends)
        now = time.monotonic()
        written.update((one[1].id, now) for one in ends)
        if ends:
            trips.append((began, now))
        return replies

    monkeypatch.setattr(Canceller, "poll", watched)
    monkeypatch.setattr(Inbox, "post", heard)
    monkeypatch.setattr(Scripts, "publish", published)
    monkeypatch.setattr(Scripts, "end_all", ended)
    return polls, told, trips, written


def read_to_the_end(queue: Queue, job: str) -> dict[bytes, bytes]:
    """Return the last event that a reader of the stream gets."""
    last: Any = SEAL_ID
    reply: Any = queue.client.xread({queue.keys.out(job): last}, block=8000)
    ((_, ((_, fields),)),) = reply
    return dict(fields)


def test_a_cancel_frees_the_blocks_of_one_of_64_streams_within_one_poll_and_one_step(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round trip later its reader has the end. Counted in polls, steps and round trips, not in seconds."""
    polls, told, trips, written = watch_worker(monkeypatch)
    engine = Watched()
    set_at: dict[int, float] = {}
    with inside(queue, engine, cancel_poll_ms="20", drain_seconds="0") as worker:
        jobs = {i: queue.add({"prompt": [i], "max_tokens": 1 << 18}) for i in range(STREAMS)}
        eventually(lambda: engine.stats().running == STREAMS, 20)
        handles = {job.id: job.handle for job in worker.worker.held.all()}
        for i in range(0, STREAMS, 2):
            queue.cancel(jobs[i])
            set_at[i] = time.monotonic()
            assert read_to_the_end(queue, jobs[i])[b"status"] == b"cancelled"
    counts: Counter[tuple[int, int, int]] = Counter()
    for i, moment in set_at.items():
        seen, freed, final = told[handles[jobs[i]]], engine.left[i], written[jobs[i]]
        # The first poll that begins after the key was set tells the engine; the step under way is the last one.
        counts[
            whole_within(polls, moment, seen),
            whole_within(engine.spans, seen, freed),
            whole_within(trips, freed, final),
        ] += 1
    print("whole polls, steps and round trips in between:", dict(counts))
    assert {count[:2] for count in counts} == {(0, 0)}
    assert max(count[2] for count in counts) <= 1
