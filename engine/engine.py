"""The engine step: apply cancels and deadlines → schedule → forward → sample → commit → return deltas and results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import structlog
import torch

from engine.canary import Canary
from engine.choice import append, final_output, take_delta
from engine.config import EngineConfig
from engine.limits import limit_tokens, validate
from engine.outputs import Delta, EngineBroken, EngineStats, Fault, Finished, Outcome, StepOutput
from engine.request import InvalidRequest, Request
from engine.runner import Runner
from engine.sampling.sampler import Sampled
from engine.sampling.text import TextStream, TokenBytes
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.integrity import check_idle, check_scheduler
from engine.scheduling.plan import Plan
from engine.scheduling.policy import PreemptionCost
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, RequestState, Sequence, SequenceStatus
from engine.suspects import Suspects, is_out_of_memory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of a request that was cancelled, dropped, expired or failed; applied once no forward pass uses it."""

    outcome: Outcome | None
    """None: the request ends without a `Finished`."""
    fault: Fault | None = None
    message: str | None = None


_FORCED = {
    Outcome.CANCELLED: (SequenceStatus.CANCELLED, FinishReason.CANCELLED),
    Outcome.EXPIRED: (SequenceStatus.FINISHED, FinishReason.EXPIRED),
    Outcome.FAILED: (SequenceStatus.FINISHED, FinishReason.ERROR),
}


class Engine:
    """Continuous batching over one model.

    Only one thread may call the engine, except for `limit_tokens` and `validate`: these read no state that changes, so
    any thread may call them.

    For each accepted request that is not dropped, `step` returns exactly one `Finished`. By then the request's blocks
    are free and the engine holds no reference to it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        cost: PreemptionCost | None = None,
        token_bytes: TokenBytes,
        num_ids: int,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        canary: Seq[int] = (0,),
    ) -> None:
        """Create an engine without requests.

        Args:
            config: limits of scheduling and memory.
            runner: executes the plans; it owns the model, the sampler and the KV pool.
            cost: decides between swap and recompute at a preemption; None: swap while the host tier has room.
            token_bytes: maps (id, skip special tokens) to the bytes of the id.
            num_ids: size of the tokenizer's vocabulary; valid ids are `[0, num_ids)`.
            eos_token_ids: ids that end a sequence unless `ignore_eos` is set.
            clock: returns the current time in seconds, on the scale of `Request.deadline`.
            canary: token ids of the prompt that `check` runs.
        """
        self.config = config
        self.scheduler = Scheduler(config, cost)
        self.gate: Callable[[list[Request]], None] | None = None
        """Called before the forward pass with the requests that are scheduled for the first time. It may `cancel`,
        `drop` or `hold` each of them; such a request leaves the plan, and none of its tokens is computed."""
        self.runner = runner
        self._token_bytes = token_bytes
        self._num_ids = num_ids
        self._eos = eos_token_ids
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._endings: dict[str, _Ending] = {}
        self._deadlines = Deadlines()
        self.waits = False
        """Whether the last step computed nothing because every request that could run is on hold."""
        self._canary = Canary(self.scheduler, runner, token_bytes, canary)
        self._plan_under_way = Plan()
        self._suspects = Suspects()
        self._arrivals = 0
        self._furthest: dict[int, tuple[int, int]] = {}
        """Priority → the highest `Request.place` added so far."""
        self._steps = 0

    # ── adding and ending requests ────────────────────────────────────────────────────────────────────────────────

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Return the `max_tokens` of a request: the requested number, limited to the tokens that fit after the prompt.

        Args:
            prompt_tokens: length of the prompt.
            asked: requested number of output tokens; None: as many as fit.

        Raises:
            PromptTooLong: prompt and one output token exceed `EngineConfig.capacity`.
        """
        return limit_tokens(prompt_tokens, asked, self.config.capacity)

    def validate(self, request: Request) -> None:
        """Check a request against the model's vocabulary and the engine's capacity.

        Raises:
            InvalidRequest: a token id is outside the vocabulary, or min_tokens exceeds max_tokens.
            PromptTooLong: prompt and max_tokens together exceed `EngineConfig.capacity`.
        """
        validate(request, self._num_ids, self.config.capacity)

    def add(self, request: Request, turn: float | None = None) -> None:
        """Validate a request, create one WAITING sequence for each of its choices and queue them.

        Args:
            request: the request; its id must not be that of a live request.
            turn: for a request that was dropped and is added again: its `turn` before the drop, so that it keeps its
                place in the order of service; None: the request arrives now.

        Raises:
            InvalidRequest, PromptTooLong: as in `validate`.
            InvalidRequest: a request with the same id has not ended yet.
        """
        self.validate(request)
        if request.id in self._requests:
            raise InvalidRequest(f"id: a request {request.id!r} is still being worked on")
        state = RequestState(request, self._arrivals, self._new_turn(request, turn))
        self._arrivals += 1
        self._requests[request.id] = state
        params = request.params
        state.sequences = [
            Sequence(state, index, TextStream(self._token_bytes, params.stop, params.skip_special_tokens))
            for index in range(params.n)
        ]
        self.scheduler.add(state)
        self._deadlines.add(state)

    def turn(self, request_id: str) -> float | None:
        """Return the sort key of a request in the order of service, in seconds; None for an unknown id."""
        state = self._requests.get(request_id)
        return None if state is None else state.turn

    def _new_turn(self, request: Request, earlier: float | None) -> float:
        """Return the request's sort key in seconds: its arrival time plus `aging_seconds` for each lower lane.

        A request that comes late (for example after a retry) must not wait behind requests with a higher `place` in its
        lane, so its key is at most the lowest of theirs.
        """
        turn = self._clock() + request.priority * self.config.aging_seconds if earlier is None else earlier
        if request.place >= self._furthest.get(request.priority, (0, 0)):
            self._furthest[request.priority] = request.place
            return turn
        lane = (seq for seq in self.scheduler.waiting if seq.request.priority == request.priority)
        return min([turn, *(seq.state.turn for seq in lane if seq.request.place > request.place)])

    def cancel(self, request_id: str) -> None:
        """End a request and keep its partial output; the next `step` returns its `Finished`. Ignore unknown ids."""
        self._end_soon(request_id, _Ending(Outcome.CANCELLED))

    def drop(self, request_id: str) -> None:
        """End a request without a `Finished`, for example since another worker runs it now. Ignore unknown ids."""
        self._end_soon(request_id, _Ending(None))

    def hold(self, request_id: str) -> None:
        """Compute no token of a request until `release`; the gate calls this. Ignore unknown ids.

        The request keeps its place in the order of service, but is preempted before requests that are not on hold.
        """
        if request_id in self._requests:
            self._requests[request_id].on_hold = True

    def release(self, request_id: str) -> bool:
        """Let a request run that was on hold.

        Returns:
            False if the request is not on hold, has ended, or ends with the next step.
        """
        state = self._requests.get(request_id)
        if state is None or not state.on_hold:
            return False
        state.on_hold = False
        return request_id not in self._endings

    def _end_soon(self, request_id: str, ending: _Ending) -> None:
        if request_id in self._requests and (ending.outcome is None or request_id not in self._endings):
            self._endings[request_id] = ending

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended yet."""
        return bool(self._requests)

    @property
    def computing(self) -> frozenset[str]:
        """Ids of the requests in the current step, or in the last step if that one raised. Any thread may read it."""
        return frozenset(piece.seq.request.id for piece in self._plan_under_way.slices)

    def check(self) -> None:
        """Run the canary, a small fixed prompt, alone. If no block is free for it, the check counts as passed.

        Raises:
            EngineBroken: the canary failed.
        """
        wrong = self._canary.run()
        if wrong is not None:
            raise EngineBroken(f"the engine fails for its own fixed test prompt: {wrong}")

    def step(self) -> StepOutput:
        """Run one step: apply cancels and deadlines, schedule, run the forward pass, sample and commit.

        Returns:
            The new text of each sequence, and the final output of each request that ended. Both may be empty.

        Raises:
            EngineBroken: a request failed, or ran alone in a step that raised, and the canary failed after it; or
                blocks could not be copied. The cause is this process, not a request: no `Finished` is returned.
            torch.AcceleratorError: the device is lost.
        """
        deltas: list[Delta] = []
        finished: list[Finished] = []
        for request_id in self._deadlines.due(self._clock(), self._requests):
            self._end_soon(request_id, _Ending(Outcome.EXPIRED))
        self._apply_endings(deltas, finished)
        plan = self._plan_under_way = self._plan(deltas, finished)
        if plan.moves:
            self._move(plan)
        self.scheduler.moved()
        if plan.slices:
            self._steps += 1
            sampled = self._execute(plan)
            if sampled is not None:
                self._commit(plan, sampled, deltas, finished)
            self._apply_endings(deltas, finished)
        self._plan_under_way = Plan()
        if self._suspects.in_doubt or any(last.fault is not None and last.fault.may_be_engine for last in finished):
            self._suspects.in_doubt = False
            self.check()
        return StepOutput(tuple(deltas), tuple(finished))

    def _move(self, plan: Plan) -> None:
        try:
            self.runner.move(plan)
        except torch.AcceleratorError:
            raise  # reported late for an earlier kernel: the device is lost
        except Exception as error:
            raise EngineBroken(f"blocks cannot be copied: {type(error).__name__}: {error}") from error

    def _plan(self, deltas: list[Delta], finished: list[Finished]) -> Plan:
        """Schedule a step, and pass the requests that are scheduled for the first time to the gate."""
        while True:
            suspect = self._suspects.next(self._requests)
            plan = self.scheduler.schedule(only=suspect)
            if suspect and not plan.slices:
                self._suspects.skip()
                continue
            new = list(dict.fromkeys(seq.state for seq in plan.admitted if not seq.state.gated))
            if new and self.gate is not None:
                for state in new:
                    state.gated = True
                self.gate([state.request for state in new])
                self._apply_endings(deltas, finished)
                plan = plan.runnable()
            idle = not (plan.slices or plan.preempted or plan.moves)
            self.waits = idle and any(state.on_hold for state in self._requests.values())
            return plan

    def _execute(self, plan: Plan) -> Sampled | None:
        """Run the forward pass and sample.

        If it raises, abandon the plan and return None. With several tokens, out of memory makes the next steps smaller;
        any other error makes the requests suspects.
        """
        try:
            sampled = self.runner.launch(plan).result()
        except torch.AcceleratorError:
            raise  # the device is lost: this process must stop, so that no further request is blamed for it
        except Exception as error:  # any error must end at most one request, not all of them
            message = f"{type(error).__name__}: {error}"
            log.exception("step_failed", requests=len(plan.slices), tokens=plan.num_tokens, message=message)
            self.scheduler.abandon(plan)
            if is_out_of_memory(error) and plan.num_tokens > 1:
                self.scheduler.shrink(plan)
            elif (fault := self._suspects.blame(plan, error)) is not None:
                self._end_soon(plan.slices[0].seq.request.id, _Ending(Outcome.FAILED, fault, message))
            return None
        self._suspects.clear(plan)
        return sampled

    def _commit(self, plan: Plan, sampled: Sampled, deltas: list[Delta], finished: list[Finished]) -> None:
        asked = [piece.seq for piece in plan.slices if piece.prompt_rows]
        for seq, found in zip(asked, sampled.prompt_logprobs, strict=True):
            seq.prompt_logprobs += found
        self.scheduler.launched(plan)
        self.scheduler.settled(plan)
        for seq, token, logprobs in zip(plan.sampling, sampled.token_ids, sampled.logprobs, strict=True):
            if token is None:
                message = "the model returned logits that are not finite"
                self._end_soon(seq.request.id, _Ending(Outcome.FAILED, Fault.NON_FINITE_LOGITS, message))
                continue
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            try:
                append(seq, token, self._eos)
            except BaseException as error:  # a panic of the Rust tokenizer is not an Exception
                log.exception("text_failed", id=seq.request.id)
                message = f"the text could not be decoded: {type(error).__name__}: {error}"
                self._end_soon(seq.request.id, _Ending(Outcome.FAILED, Fault.INTERNAL, message))
                continue
            if seq.matcher is not None and seq.matcher.error is not None:
                ending = _Ending(Outcome.FAILED, Fault.GRAMMAR, f"the grammar engine failed: {seq.matcher.error}")
                self._end_soon(seq.request.id, ending)
                continue
            self._send(seq, deltas)
            if seq.finish_reason is not None:
                self.scheduler.lengths.learn(seq.num_output_tokens)
                self._retire(seq, SequenceStatus.FINISHED)
                self._close(seq.state, Outcome.SUCCEEDED, None, None, finished)

    # ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply_endings(self, deltas: list[Delta], finished: list[Finished]) -> None:
        """End the requests that were cancelled, dropped, expired or failed since the last call."""
        while self._endings:
            request_id, ending = self._endings.popitem()
            state = self._requests.get(request_id)
            if state is None:
                continue
            status, reason = _FORCED.get(ending.outcome or Outcome.CANCELLED, _FORCED[Outcome.CANCELLED])
            for seq in state.sequences:
                if not seq.status.ended:
                    seq.finish_reason = reason
                    with contextlib.suppress(BaseException):  # text that cannot be decoded is left out
                        seq.text.finish()
                    self._send(seq, deltas)
                    self._retire(seq, status)
            self._close(state, ending.outcome, ending.fault, ending.message, finished)

    def _send(self, seq: Sequence, deltas: list[Delta]) -> None:
        """Append the delta of a sequence, if it has new text or ids."""
        delta = take_delta(seq)
        if delta is not None:
            deltas.append(delta)

    def _retire(self, seq: Sequence, status: SequenceStatus) -> None:
        """Free the blocks and the sampler state of a sequence that ends."""
        self.scheduler.end(seq, status)
        self.runner.forget(seq)

    def _close(
        self,
        state: RequestState,
        outcome: Outcome | None,
        fault: Fault | None,
        message: str | None,
        finished: list[Finished],
    ) -> None:
        """If all choices of a request have ended, forget the request and append its `Finished`."""
        if not all(seq.status.ended for seq in state.sequences):
            return
        request = state.request
        del self._requests[request.id]
        self._endings.pop(request.id, None)
        if not self._requests:
            self._deadlines.clear()
        if outcome is not None:
            finished.append(final_output(state, outcome, fault, message))

    # ── statistics and self-check ─────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> EngineStats:
        """Return a snapshot of queue lengths, blocks and counters."""
        blocks = self.scheduler.blocks
        return EngineStats(
            waiting=self.scheduler.num_waiting,
            running=len(self.scheduler.running),
            swapped=len(self.scheduler.swapped),
            total_blocks=blocks.device.size,
            free_blocks=blocks.device.num_free,
            cached_blocks=blocks.device.num_cached,
            host_slots=blocks.host.size,
            free_host_slots=blocks.host.num_free,
            steps=self._steps,
            preemptions_recompute=self.scheduler.recomputes,
            preemptions_swap=self.scheduler.swaps,
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
        )

    def check_idle(self) -> str | None:
        """Check an engine without requests for leftovers of ended requests. Takes constant time: each call checks a
        part of the KV pool.

        Returns:
            A message about leaked blocks, without which the engine still works; None if no leak was found.

        Raises:
            engine.scheduling.block_pool.IntegrityError: the engine could give wrong text, or requests could wait
                forever.
        """
        return check_idle(self.scheduler)

    def check_integrity(self) -> None:
        """Check that requests, sequences and blocks are consistent with each other. Takes time linear in the pool.

        Raises:
            engine.scheduling.block_pool.IntegrityError: a block leaked, or a sequence is in the wrong queue.
        """
        live = (seq for state in self._requests.values() for seq in state.sequences if not seq.status.ended)
        check_scheduler(self.scheduler, live)
