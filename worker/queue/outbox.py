"""The queue of outputs to the publisher, from engine, intake and gate. Never full, however long Redis is away."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterable

from engine.outputs import Delta, Finished, StepOutput
from worker.jobs.results import Answer

Output = StepOutput | Answer
Stamped = tuple[float, Output]
"""`time.monotonic()` when an output was made, and the output."""

BACKLOG = 256
"""Outputs after which all that wait are merged, so that memory is bounded by the text of the running jobs."""


class Outbox(queue.Queue[Stamped]):
    """An unbounded queue whose step outputs are merged when many of them wait."""

    queue: deque[Stamped]

    def give(self, output: Output) -> None:
        """Add an output without blocking. Any thread may call it."""
        self.put((time.monotonic(), output))

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._unmerged = 0

    def _put(self, item: Stamped) -> None:
        self.queue.append(item)
        self._unmerged += 1
        if self._unmerged >= BACKLOG:
            self.queue = deque(merge(self.queue))
            self._unmerged = 0

    def _get(self) -> Stamped:
        self._unmerged = max(0, self._unmerged - 1)
        return self.queue.popleft()


def merge(outputs: Iterable[Stamped]) -> list[Stamped]:
    """Merge all step outputs into one, with one delta for each choice, then the finished requests; answers follow.

    Answers may be moved to the end, since no answer is about a request in a step. The merged output has the time of
    the first step.
    """
    texts: dict[tuple[str, int], list[Delta]] = {}
    finished: list[Finished] = []
    answers: list[Stamped] = []
    began: float | None = None
    for at, output in outputs:
        if not isinstance(output, StepOutput):
            answers.append((at, output))
            continue
        began = at if began is None else began
        for delta in output.deltas:
            texts.setdefault((delta.request_id, delta.index), []).append(delta)
        finished += output.finished
    if began is None:
        return answers
    return [(began, StepOutput(tuple(map(_joined, texts.values())), tuple(finished))), *answers]


def _joined(deltas: list[Delta]) -> Delta:
    """Merge consecutive deltas of one choice."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    logprobs = None
    if first.logprobs is not None:
        logprobs = tuple(one for delta in deltas for one in delta.logprobs or ())
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Delta(first.request_id, first.index, "".join(delta.text for delta in deltas), ids, logprobs)
