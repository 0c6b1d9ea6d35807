"""The engine's outputs that the publisher has not taken yet. None is refused, however long Redis is silent."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable

from engine.outputs import Delta, Finished, StepOutput
from worker.jobs.results import Answer

Output = StepOutput | Answer
Stamped = tuple[float, Output]
"""An output with the `time.monotonic()` moment at which it came about."""

BACKLOG = 256
"""Outputs kept as they are; then they become one, so that memory is bounded by the text of the jobs that run."""


class Outbox(queue.Queue[Stamped]):
    """A queue without a limit whose steps are merged when many of them wait."""

    queue: deque[Stamped]

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
    """The same outputs with all steps as one: one delta for each choice, then the endings. Answers come after it.

    No answer concerns a request of a step. The step has the time of the first one.
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
    """Consecutive deltas of one choice as one."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    logprobs = None
    if first.logprobs is not None:
        logprobs = tuple(one for delta in deltas for one in delta.logprobs or ())
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Delta(first.request_id, first.index, "".join(delta.text for delta in deltas), ids, logprobs)
