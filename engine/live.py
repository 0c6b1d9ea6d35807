"""The requests that have not ended, how they end, and the outputs that the next step returns."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from engine.choice import final_output, take_delta
from engine.outputs import Delta, Fault, Finished, Outcome, StepOutput
from engine.runner import Runner
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.plan import Plan
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, RequestState, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request that was cancelled, dropped, expired or failed."""

    outcome: Outcome | None
    """None: the request ends without a `Finished`."""
    fault: Fault | None = None
    message: str | None = None


_FORCED = {
    Outcome.CANCELLED: (SequenceStatus.CANCELLED, FinishReason.CANCELLED),
    Outcome.EXPIRED: (SequenceStatus.FINISHED, FinishReason.EXPIRED),
    Outcome.FAILED: (SequenceStatus.FINISHED, FinishReason.ERROR),
}


class LiveRequests:
    """Holds each request from `Engine.add` until its end, and the deltas and final outputs not returned yet."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        """Create it without requests. `scheduler` frees the blocks of sequences that end, `runner` their state."""
        self.by_id: dict[str, RequestState] = {}
        self.endings: dict[str, Ending] = {}
        """Request id → how the next `apply_endings` ends the request."""
        self.deadlines = Deadlines()
        self._scheduler = scheduler
        self._runner = runner
        self._deltas: list[Delta] = []
        self._finished: list[Finished] = []

    def add(self, state: RequestState) -> None:
        """Add a request whose id is not live."""
        self.by_id[state.request.id] = state
        self.deadlines.add(state)
        self._scheduler.add(state)

    # ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────

    def end_soon(self, request_id: str, ending: Ending) -> None:
        """End a request at the next `apply_endings`. The first ending counts, but a drop replaces any other. Ignore
        unknown ids."""
        if request_id in self.by_id and (ending.outcome is None or request_id not in self.endings):
            self.endings[request_id] = ending

    def fail_soon(self, request_id: str, fault: Fault, message: str) -> None:
        """End a request as failed at the next `apply_endings`; see `end_soon`."""
        self.end_soon(request_id, Ending(Outcome.FAILED, fault, message))

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed at the next `apply_endings`."""
        for request_id in self.deadlines.due(now, self.by_id):
            self.end_soon(request_id, Ending(Outcome.EXPIRED))

    def any_ends(self, plan: Plan) -> bool:
        """Return whether the next `apply_endings` ends a request of this plan."""
        return bool(self.endings) and any(piece.seq.request.id in self.endings for piece in plan.slices)

    def apply_drops(self) -> None:
        """End the requests that were dropped since the last call."""
        for request_id in [request_id for request_id, ending in self.endings.items() if ending.outcome is None]:
            self._end(request_id)

    def apply_endings(self) -> None:
        """End the requests that were cancelled, dropped, expired or failed since the last call."""
        while self.endings:
            self._end(next(reversed(self.endings)))

    def _end(self, request_id: str) -> None:
        outcome = self.endings[request_id].outcome
        status, reason = _FORCED.get(outcome or Outcome.CANCELLED, _FORCED[Outcome.CANCELLED])
        state = self.by_id[request_id]
        for seq in state.sequences:
            if not seq.status.ended:
                seq.finish_reason = reason
                if outcome is not None:
                    with contextlib.suppress(BaseException):  # text that cannot be decoded is left out
                        seq.text.finish()
                    self.send(seq)
                self._retire(seq, status)
        self._close(state)

    def finish(self, seq: Sequence) -> None:
        """End a sequence whose `finish_reason` is set, and its request if no other choice is live."""
        self._scheduler.lengths.learn(seq.num_output_tokens)
        self._retire(seq, SequenceStatus.FINISHED)
        self._close(seq.state)

    def _retire(self, seq: Sequence, status: SequenceStatus) -> None:
        """Free the blocks and the sampler state of a sequence that ends."""
        self._scheduler.end(seq, status)
        self._runner.forget(seq)

    def _close(self, state: RequestState) -> None:
        """If all choices of a request have ended, forget the request and append its `Finished`."""
        if not all(seq.status.ended for seq in state.sequences):
            return
        request = state.request
        del self.by_id[request.id]
        ending = self.endings.pop(request.id, Ending(Outcome.SUCCEEDED))
        if not self.by_id:
            self.deadlines.clear()
        if ending.outcome is not None:
            self._finished.append(final_output(state, ending.outcome, ending.fault, ending.message))

    # ── outputs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, seq: Sequence) -> None:
        """Append the delta of a sequence, if it has new text or ids."""
        delta = take_delta(seq)
        if delta is not None:
            self._deltas.append(delta)

    @property
    def has_output(self) -> bool:
        """Whether `take_output` would return anything."""
        return bool(self._deltas or self._finished)

    @property
    def doubtful(self) -> bool:
        """Whether a request failed, since the last `take_output`, for a reason that may be the engine's."""
        return any(last.fault is not None and last.fault.may_be_engine for last in self._finished)

    def take_output(self) -> StepOutput:
        """Return the deltas and final outputs since the last call."""
        output = StepOutput(tuple(self._deltas), tuple(self._finished))
        self._deltas.clear()
        self._finished.clear()
        return output
