"""Launches steps, and settles them: waits for the sampled ids, and appends them to their sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
import torch

from engine.choice import append
from engine.live import LiveRequests
from engine.outputs import EngineBroken, Fault, TokenLogprobs
from engine.runner import InFlight, Runner
from engine.scheduling.block_pool import IntegrityError
from engine.scheduling.plan import Plan
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.suspects import Suspects, is_out_of_memory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and is not settled yet."""

    plan: Plan
    sampling: tuple[Sequence, ...]
    """`plan.sampling`."""
    prompts: tuple[Sequence, ...]
    """The sequences of the slices that have `prompt_rows`."""
    computing: InFlight


class Pipeline:
    """The steps in flight: at most one between two steps of the engine, two after a launch.

    A sequence that ends when a step is settled may also be in the next step, which is in flight already. Its row there
    is ignored. Its blocks can be reused at once: the device writes that row before any step that is launched later.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        requests: LiveRequests,
        suspects: Suspects,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Create a pipeline without steps; `eos_token_ids` end a sequence unless `ignore_eos` is set."""
        self.flights: tuple[Flight, ...] = ()
        """Steps in flight, in the order of their launches. The tuple is replaced, so any thread may read it."""
        self.steps = 0
        """Number of launches, including those that raised."""
        self._scheduler = scheduler
        self._runner = runner
        self._requests = requests
        self._suspects = suspects
        self._eos = eos_token_ids

    def must_settle(self) -> bool:
        """Return whether the steps in flight must be settled before the next one is scheduled.

        That is so if a request in them ends now, since its output holds all ids that were computed; if a grammar
        decides which ids may follow; or if a request is to run alone because a step raised.
        """
        return bool(self._suspects) or any(
            self._requests.any_ends(flight.plan) or any(seq.matcher is not None for seq in flight.sampling)
            for flight in self.flights
        )

    def launch(self, plan: Plan) -> bool:
        """Launch the forward pass of a plan that has slices, and its sampling.

        If the launch raises, the plan is abandoned. After an out-of-memory error in a step of several tokens the next
        steps are smaller; after any other error the requests of the step are suspects.

        Returns:
            Whether the step was launched.

        Raises:
            torch.AcceleratorError: the device is lost.
        """
        self.steps += 1
        prompts = tuple(piece.seq for piece in plan.slices if piece.prompt_rows)
        try:
            computing = self._runner.launch(plan)
        except torch.AcceleratorError:
            raise  # the device is lost: the process must end before another request is blamed
        except Exception as error:  # any error must end at most one request, not all of them
            message = f"{type(error).__name__}: {error}"
            log.exception("step_failed", requests=len(plan.slices), tokens=plan.num_tokens, message=message)
            self._abandon(plan, error, message)
            return False
        self._suspects.clear(plan)
        self._scheduler.launched(plan)
        self.flights = (*self.flights, Flight(plan, plan.sampling, prompts, computing))
        return True

    def _abandon(self, plan: Plan, error: Exception, message: str) -> None:
        self._scheduler.abandon(plan)
        if is_out_of_memory(error) and plan.num_tokens > 1:
            self._scheduler.shrink(plan)
        elif (fault := self._suspects.blame(plan, error)) is not None:
            self._requests.fail_soon(plan.slices[0].seq.request.id, fault, message)
            self._requests.apply_endings()

    def settle(self, keep: int = 0) -> None:
        """Settle all steps in flight except the last `keep`, and end the requests that failed in them.

        Raises:
            EngineBroken: the results of a step are lost.
            torch.AcceleratorError: the device is lost.
        """
        while len(self.flights) > keep:
            self._settle(self.flights[0])
            self.flights = self.flights[1:]
            self._requests.apply_endings()

    def _settle(self, flight: Flight) -> None:
        try:
            sampled = flight.computing.result()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise EngineBroken(f"the results of a step are lost: {type(error).__name__}: {error}") from error
        self._scheduler.settled(flight.plan)
        for seq, found in zip(flight.prompts, sampled.prompt_logprobs, strict=True):
            seq.prompt_logprobs += found
        take = self._take
        for seq, token, logprobs in zip(flight.sampling, sampled.token_ids, sampled.logprobs, strict=True):
            if seq.finish_reason is None:
                take(seq, token, logprobs)

    def _take(self, seq: Sequence, token: int | None, logprobs: TokenLogprobs | None) -> None:
        """Append a sampled id to its sequence, send the new text, and end the sequence if its text ends."""
        request_id = seq.request.id
        if token is None:
            message = "the model returned logits that are not finite"
            self._requests.fail_soon(request_id, Fault.NON_FINITE_LOGITS, message)
            return
        if logprobs is not None:
            seq.logprobs.append(logprobs)
        try:
            append(seq, token, self._eos)
        except BaseException as error:  # a panic of the Rust tokenizer is not an Exception
            log.exception("text_failed", id=request_id)
            message = f"the text could not be decoded: {type(error).__name__}: {error}"
            self._requests.fail_soon(request_id, Fault.INTERNAL, message)
            return
        if seq.matcher is not None and seq.matcher.error is not None:
            self._requests.fail_soon(request_id, Fault.GRAMMAR, f"the grammar engine failed: {seq.matcher.error}")
            return
        self._requests.send(seq)
        if seq.finish_reason is not None:
            self._requests.finish(seq)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare the pending ids of all live sequences with the steps in flight.

        Raises:
            IntegrityError: a sequence counts too many or too few pending ids.
        """
        pending = Counter(seq.uid for flight in self.flights for seq in flight.sampling)
        for seq in live:
            if seq.num_pending != pending[seq.uid]:
                raise IntegrityError(f"{seq!r} counts {seq.num_pending} pending ids, not {pending[seq.uid]}")
