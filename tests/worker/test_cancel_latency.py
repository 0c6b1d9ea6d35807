"""Under full load a cancelled job's blocks are free after at most one poll and one engine step."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.outputs import StepOutput
from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Queue, inside
from worker.cancellation import Canceller
from worker.loop import Cancel, EngineLoop, Message

STREAMS = 64
Span = tuple[float, float]


@dataclass
class Watched(FakeEngine):
    """Notes when steps began and ended, and when each request left."""

    spans: list[Span] = field(default_factory=list)
    left: dict[int, float] = field(default_factory=dict)
    """Prompt's only id → the moment at which nothing of it was held any more."""

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
    """Spans that began after `start` and ended before `end`."""
    return sum(1 for began, ended in spans[bisect_left(spans, (start, 0.0)) :] if ended < end)


def test_a_cancel_frees_the_blocks_within_one_poll_and_one_step_of_64_streams(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[Span] = []
    told: dict[str, float] = {}
    poll, post = Canceller.poll, EngineLoop.post

    def watched(self: Canceller) -> None:
        began = time.monotonic()
        poll(self)
        polls.append((began, time.monotonic()))

    def heard(self: EngineLoop, message: Message) -> None:
        if isinstance(message, Cancel):
            told.setdefault(message.handle, time.monotonic())
        post(self, message)

    monkeypatch.setattr(Canceller, "poll", watched)
    monkeypatch.setattr(EngineLoop, "post", heard)
    engine = Watched()
    set_at: dict[int, float] = {}
    final_at: dict[int, float] = {}
    handles: dict[int, str] = {}
    with inside(queue, engine, cancel_poll_ms="20", drain_seconds="0") as worker:
        jobs = {i: queue.add({"prompt": [i], "max_tokens": 1 << 18}) for i in range(STREAMS)}
        eventually(lambda: engine.stats().running == STREAMS, 20)
        by_id = {job.id: job.handle for job in worker.worker.held.all()}
        for i in range(0, STREAMS, 2):
            handles[i] = by_id[jobs[i]]
            queue.cancel(jobs[i])
            set_at[i] = time.monotonic()
            raw: Any = eventually(lambda: queue.client.get(queue.keys.result(jobs[i])))  # noqa: B023
            final_at[i] = time.monotonic()
            assert b'"cancelled"' in raw
    for i, moment in set_at.items():
        seen, freed = told[handles[i]], engine.left[i]
        # The first poll that begins after the key was set tells the engine; the step under way is the last one.
        assert whole_within(polls, moment, seen) == 0, i
        assert whole_within(engine.spans, seen, freed) == 0, i
        assert final_at[i] - freed < 1.0, i  # and a round trip later its reader has the end
