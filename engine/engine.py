"""The engine step: apply cancels and deadlines → schedule → launch → settle → return deltas and results.

With overlap one step stays in flight: a step is launched before the ids of the step before it are known, so that the
device computes while the host schedules. `Pipeline` launches and settles; without overlap each step is settled directly
after its launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from engine.canary import Canary
from engine.config import EngineConfig
from engine.limits import limit_tokens, validate
from engine.live import Ending, LiveRequests
from engine.outputs import EngineBroken, EngineStats, Outcome, StepOutput
from engine.pipeline import Pipeline
from engine.request import InvalidRequest, Request
from engine.runner import Runner
from engine.sampling.text import TextStream, TokenBytes
from engine.scheduling.integrity import check_idle, check_scheduler
from engine.scheduling.plan import Plan
from engine.scheduling.policy import PreemptionCost
from engine.scheduling.scheduler import Scheduler
from engine.sequence import RequestState, Sequence
from engine.suspects import Suspects


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
        self._clock = clock
        self._suspects = Suspects()
        self._live = LiveRequests(self.scheduler, runner)
        self._pipeline = Pipeline(self.scheduler, runner, self._live, self._suspects, eos_token_ids)
        self.overlap = bool(config.overlap)
        """Whether a step stays in flight while the next one is scheduled; may be changed between two steps."""
        self.waits = False
        """Whether the last step computed nothing because every request that could run is on hold."""
        self._canary = Canary(self.scheduler, runner, token_bytes, canary)
        self._plan_under_way = Plan()
        self._arrivals = 0
        self._furthest: dict[int, tuple[int, int]] = {}
        """Priority → the highest `Request.place` added so far."""

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
        if request.id in self._live.by_id:
            raise InvalidRequest(f"id: a request {request.id!r} is still being worked on")
        state = RequestState(request, self._arrivals, self._new_turn(request, turn))
        self._arrivals += 1
        params = request.params
        state.sequences = [
            Sequence(state, index, TextStream(self._token_bytes, params.stop, params.skip_special_tokens))
            for index in range(params.n)
        ]
        self._live.add(state)

    def turn(self, request_id: str) -> float | None:
        """Return the sort key of a request in the order of service, in seconds; None for an unknown id."""
        state = self._live.by_id.get(request_id)
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
        self._live.end_soon(request_id, Ending(Outcome.CANCELLED))

    def drop(self, request_id: str) -> None:
        """End a request without a `Finished`, for example since another worker runs it now. Ignore unknown ids."""
        self._live.end_soon(request_id, Ending(None))

    def hold(self, request_id: str) -> None:
        """Compute no token of a request until `release`; the gate calls this. Ignore unknown ids.

        The request keeps its place in the order of service, but is preempted before requests that are not on hold.
        """
        if request_id in self._live.by_id:
            self._live.by_id[request_id].on_hold = True

    def release(self, request_id: str) -> bool:
        """Let a request run that was on hold.

        Returns:
            False if the request is not on hold, has ended, or ends with the next step.
        """
        state = self._live.by_id.get(request_id)
        if state is None or not state.on_hold:
            return False
        state.on_hold = False
        return request_id not in self._live.endings

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step is in flight, or output waits for the next `step`."""
        return bool(self._live.by_id or self._pipeline.flights) or self._live.has_output

    @property
    def computing(self) -> frozenset[str]:
        """Ids of the requests in the current step and in those in flight; if a step raised, in the last ones. Any
        thread may read it."""
        plans = (self._plan_under_way, *(flight.plan for flight in self._pipeline.flights))
        return frozenset(piece.seq.request.id for plan in plans for piece in plan.slices)

    def check(self) -> None:
        """Settle the step in flight, then run the canary, a small fixed prompt, alone. If no block is free for it, the
        check counts as passed.

        Raises:
            EngineBroken: the canary failed.
            torch.AcceleratorError: the device is lost.
        """
        self._live.apply_drops()
        self._pipeline.settle()
        wrong = self._canary.run()
        if wrong is not None:
            raise EngineBroken(f"the engine fails for its own fixed test prompt: {wrong}")

    def step(self) -> StepOutput:
        """Run one step: apply cancels and deadlines, schedule, launch, and settle.

        With `overlap` the step before is settled, and the launched step stays in flight. A step that
        cannot launch anything settles what is in flight.

        Returns:
            The new text of each sequence, and the final output of each request that ended. Both may be empty.

        Raises:
            EngineBroken: a request failed, or ran alone in a step that raised, and the canary failed after it; or
                blocks could not be copied; or the results of a step are lost. The cause is this process, not a request:
                no `Finished` is returned.
            torch.AcceleratorError: the device is lost.
        """
        self._live.expire(self._clock())
        self._live.apply_drops()
        if self._pipeline.must_settle():
            self._pipeline.settle()
        self._live.apply_endings()
        plan = self._plan_under_way = self._plan()
        if plan.moves:
            self._move(plan)
        self.scheduler.moved()
        launched = bool(plan.slices) and self._pipeline.launch(plan)
        self._pipeline.settle(keep=1 if launched and self.overlap else 0)
        self._plan_under_way = Plan()
        if self._suspects.in_doubt or self._live.doubtful:
            self._suspects.in_doubt = False
            self.check()
        return self._live.take_output()

    def _move(self, plan: Plan) -> None:
        try:
            self.runner.move(plan)
        except torch.AcceleratorError:
            raise  # reported late for an earlier kernel: the device is lost
        except Exception as error:
            raise EngineBroken(f"blocks cannot be copied: {type(error).__name__}: {error}") from error

    def _plan(self) -> Plan:
        """Schedule a step, and pass the requests that are scheduled for the first time to the gate."""
        while True:
            suspect = self._suspects.next(self._live.by_id)
            plan = self.scheduler.schedule(only=suspect)
            if suspect and not plan.slices:
                self._suspects.skip()
                continue
            new = list(dict.fromkeys(seq.state for seq in plan.admitted if not seq.state.gated))
            if new and self.gate is not None:
                for state in new:
                    state.gated = True
                self.gate([state.request for state in new])
                self._live.apply_endings()
                plan = plan.runnable()
            idle = not (plan.slices or plan.preempted or plan.moves or self._pipeline.flights)
            self.waits = idle and any(state.on_hold for state in self._live.by_id.values())
            return plan

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
            steps=self._pipeline.steps,
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
        live = [seq for state in self._live.by_id.values() for seq in state.sequences if not seq.status.ended]
        check_scheduler(self.scheduler, live)
        self._pipeline.check_integrity(live)
