"""Finds the request that makes a step raise, by running the requests of that step alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from engine.outputs import Fault
from engine.scheduling.plan import Plan
from engine.sequence import RequestState


class Suspects:
    """The requests of steps that raised; each of them runs alone in one of the next steps."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque()
        self.in_doubt = False
        """Whether a request raised alone for the first time, so that the canary must run."""

    def __bool__(self) -> bool:
        return bool(self._ids)

    def next(self, live: Mapping[str, RequestState]) -> RequestState | None:
        """Return the first suspect that has not ended; None if there is none.

        Args:
            live: all requests that have not ended, by id.
        """
        while self._ids and self._ids[0] not in live:
            self._ids.popleft()
        return live[self._ids[0]] if self._ids else None

    def skip(self) -> None:
        """Remove the first suspect: other requests hold the blocks that it needs, so these must run first."""
        self._ids.popleft()

    def clear(self, plan: Plan) -> None:
        """Remove the first suspect, if there is one: it ran alone in this plan, and nothing was raised."""
        if self._ids:
            self._ids.popleft()
            plan.slices[0].seq.state.failed_alone = False

    def blame(self, plan: Plan, error: Exception) -> Fault | None:
        """Decide what follows from a step that raised `error`.

        * Several requests: each of them runs alone in one of the next steps.
        * One request, first time: it runs alone once more, and the canary runs.
        * One request, second time: it fails.

        Returns:
            The fault with which the only request of the plan fails; None: it does not fail now.
        """
        states = list(dict.fromkeys(piece.seq.state for piece in plan.slices))
        ids = [state.request.id for state in states]
        if len(ids) > 1:
            self._ids.extend(i for i in ids if i not in self._ids)
            return None
        if not states[0].failed_alone:  # the error may be transient
            states[0].failed_alone = True
            self.in_doubt = True
            if ids[0] not in self._ids:
                self._ids.appendleft(ids[0])
            return None
        return Fault.OUT_OF_MEMORY if is_out_of_memory(error) else Fault.INTERNAL


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error says that the device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)
