"""The step: cancels and expiries → schedule → forward → sample → commit, and a snapshot of what came out of it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import structlog
import torch

from engine.canary import Canary
from engine.config import EngineConfig
from engine.outputs import ChoiceResult, Delta, EngineBroken, EngineStats, Fault, Finished, Outcome, StepOutput
from engine.request import InvalidRequest, PromptTooLong, Request
from engine.runner import Runner
from engine.sampling.sampler import Sampled
from engine.sampling.text import TextStream, TokenBytes
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.plan import Plan
from engine.scheduling.policy import PreemptionCost
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Ending:
    """A request that is to end at the next safe point; None as outcome: without a word."""

    outcome: Outcome | None
    fault: Fault | None = None
    message: str | None = None


_FORCED = {
    Outcome.CANCELLED: (SequenceStatus.CANCELLED, FinishReason.CANCELLED),
    Outcome.EXPIRED: (SequenceStatus.FINISHED, FinishReason.EXPIRED),
    Outcome.FAILED: (SequenceStatus.FINISHED, FinishReason.ERROR),
}


class Engine:
    """Continuous batching over one model. One thread calls it; `limit_tokens` and `validate` are pure, any thread may.

    Every accepted request comes out of `step` exactly once as a `Finished`, unless it was dropped; when it does, its
    blocks are free and nothing of it is left in here.
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
        """`num_ids`: how many ids the tokenizer knows, from 0. `clock`: what deadlines are measured by, in seconds.

        `canary`: the prompt that `check` runs.
        """
        self.config = config
        self.scheduler = Scheduler(config, cost)
        self.gate: Callable[[list[Request]], None] | None = None
        """Called before the forward with requests that run for the first time. It may `cancel`, `drop` or `hold` them;
        they then leave the plan, and no token is computed for them."""
        self.runner = runner
        self._token_bytes = token_bytes
        self._num_ids = num_ids
        self._eos = eos_token_ids
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._endings: dict[str, _Ending] = {}
        self._deadlines = Deadlines()
        self._gated: set[str] = set()
        """Requests that the gate has seen."""
        self._on_hold: set[str] = set()
        self.waits = False
        """Whether the last step computed nothing since all that could run is on hold."""
        self._canary = Canary(self.scheduler, runner, token_bytes, canary)
        self._plan_under_way = Plan()
        self._suspects: deque[str] = deque()
        """Requests of a step that raised: each next step runs one of them alone, to find which one it was."""
        self._failed_alone: set[str] = set()
        """Requests whose step raised once while they were alone in it. The second time they are to blame."""
        self._in_doubt = False
        """Whether the canary is to run at the end of this step."""
        self._arrivals = 0
        self._furthest: dict[int, tuple[int, int]] = {}
        """For each lane the last place that has come so far."""
        self._steps = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────────

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """The `max_tokens` that a prompt of this length gets: what was asked for, at most what can ever fit.

        Raises:
            PromptTooLong: not even one token fits behind the prompt, however empty the pool.
        """
        room = self.config.capacity - prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens; with at least one token of output this worker holds "
                f"{self.config.capacity}"
            )
        return room if asked is None else min(asked, room)

    def validate(self, request: Request) -> None:
        """Refuse what would hurt later.

        Raises:
            InvalidRequest: a token id is out of range, or min_tokens exceeds max_tokens.
            PromptTooLong: prompt and max_tokens can never fit.
        """
        params = request.params
        for what, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            wrong = next((i for i in ids if not 0 <= i < self._num_ids), None)
            if wrong is not None:
                raise InvalidRequest(f"{what}: token id {wrong} is not in [0, {self._num_ids})")
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(f"min_tokens: {params.min_tokens} is more than max_tokens, {params.max_tokens}")
        if params.max_tokens > self.limit_tokens(len(request.prompt), None):
            raise PromptTooLong(
                f"{len(request.prompt)} prompt tokens and max_tokens {params.max_tokens} exceed {self.config.capacity}"
            )

    def add(self, request: Request) -> None:
        """Accept a request: its choices are WAITING.

        Raises:
            InvalidRequest, PromptTooLong: as `validate`; or the id is that of a live request.
        """
        self.validate(request)
        if request.id in self._requests:
            raise InvalidRequest(f"id: {request.id!r} is being worked on")
        request.arrival = self._arrivals
        request.turn = self._turn(request)
        self._arrivals += 1
        self._requests[request.id] = request
        params = request.params
        request.sequences = [
            Sequence(request, index, TextStream(self._token_bytes, params.stop, params.skip_special_tokens))
            for index in range(params.n)
        ]
        self.scheduler.add(request)
        self._deadlines.add(request)

    def _turn(self, request: Request) -> float:
        """When it is the request's turn: no later than that of any waiting one that stands behind it in its lane."""
        now = self._clock() + request.priority * self.config.aging_seconds
        turn = now if request.turn is None else request.turn
        if request.place >= self._furthest.get(request.priority, (0, 0)):
            self._furthest[request.priority] = request.place
            return turn
        lane = (seq.request for seq in self.scheduler.waiting if seq.request.priority == request.priority)
        return min([turn, *(other.turn or turn for other in lane if other.place > request.place)])

    def cancel(self, request_id: str) -> None:
        """End a request with what it has so far; it comes out of the next `step`. Unknown ids are ignored."""
        self._end_soon(request_id, _Ending(Outcome.CANCELLED))

    def drop(self, request_id: str) -> None:
        """End a request without a word: somebody else works on it now. Unknown ids are ignored."""
        self._end_soon(request_id, _Ending(None))

    def hold(self, request_id: str) -> None:
        """Compute nothing for a request until `release`; it keeps its place. Called by the gate."""
        if request_id in self._requests:
            self._requests[request_id].on_hold = True
            self._on_hold.add(request_id)

    def release(self, request_id: str) -> bool:
        """Let a request run that was on hold; False where it has ended meanwhile or is about to."""
        if request_id not in self._on_hold:
            return False
        self._on_hold.discard(request_id)
        self._requests[request_id].on_hold = False
        return request_id not in self._endings

    def _end_soon(self, request_id: str, ending: _Ending) -> None:
        if request_id in self._requests and (ending.outcome is None or request_id not in self._endings):
            self._endings[request_id] = ending

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def computing(self) -> frozenset[str]:
        """The requests of the step under way, or of the one that raised; from any thread."""
        return frozenset(piece.seq.request.id for piece in self._plan_under_way.slices)

    def check(self) -> None:
        """Run the canary: a small fixed prompt, alone.

        Raises:
            EngineBroken: it failed. That no block was free to run it is no failure.
        """
        wrong = self._canary.run()
        if wrong is not None:
            raise EngineBroken(f"the engine fails for a fixed prompt of its own: {wrong}")

    def step(self) -> StepOutput:
        """One step. Deltas and last words of everything that moved; an empty output is legal.

        Raises:
            EngineBroken: a request failed, and so does the canary; or blocks cannot be copied. No request is to blame,
                and no ending is reported for the failed one.
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
        if self._in_doubt or any(last.fault is not None and last.fault.doubtful for last in finished):
            self._in_doubt = False
            self.check()
        return StepOutput(tuple(deltas), tuple(finished))

    def _move(self, plan: Plan) -> None:
        try:
            self.runner.move(plan)
        except torch.AcceleratorError:
            raise  # of a kernel before: the device is lost
        except Exception as error:
            raise EngineBroken(f"blocks cannot be copied: {type(error).__name__}: {error}") from error

    def _plan(self, deltas: list[Delta], finished: list[Finished]) -> Plan:
        """Schedule, and ask the gate about those who run for the first time."""
        while True:
            suspect = self._next_suspect()
            plan = self.scheduler.schedule(only=suspect)
            if suspect and not plan.slices:
                self._suspects.popleft()  # it waits for blocks that others hold, so the others must move
                continue
            new = {s.request.id: s.request for s in plan.admitted if s.request.id not in self._gated}
            if new and self.gate is not None:
                self._gated.update(new)
                self.gate(list(new.values()))
                self._apply_endings(deltas, finished)
                plan = plan.runnable()
            self.waits = bool(self._on_hold) and not (plan.slices or plan.preempted or plan.moves)
            return plan

    def _next_suspect(self) -> Request | None:
        while self._suspects and self._suspects[0] not in self._requests:
            self._suspects.popleft()
        return self._requests[self._suspects[0]] if self._suspects else None

    def _execute(self, plan: Plan) -> Sampled | None:
        """The forward. If it raises, the plan is abandoned and who caused it is found by running each one alone."""
        try:
            sampled = self.runner.execute(plan)
        except torch.AcceleratorError:
            raise  # the device is lost: this process computes nothing more, so that nobody else is blamed
        except Exception as error:  # whatever it is, it must end one request, not all of them
            message = f"{type(error).__name__}: {error}"
            log.exception("step_failed", requests=len(plan.slices), tokens=plan.num_tokens, message=message)
            self.scheduler.abandon(plan)
            self._blame(plan, error)
            return None
        if self._suspects:
            self._failed_alone.discard(self._suspects.popleft())
        return sampled

    def _blame(self, plan: Plan, error: Exception) -> None:
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        requests = list(dict.fromkeys(piece.seq.request.id for piece in plan.slices))
        if memory and plan.num_tokens > 1:
            self.scheduler.shrink(plan)
            return
        if len(requests) > 1:
            self._suspects.extend(r for r in requests if r not in self._suspects)
            return
        if requests[0] not in self._failed_alone:  # a fault that comes and goes is not this request's
            self._failed_alone.add(requests[0])
            self._in_doubt = True
            if requests[0] not in self._suspects:
                self._suspects.appendleft(requests[0])
            return
        fault = Fault.OUT_OF_MEMORY if memory else Fault.INTERNAL
        self._end_soon(requests[0], _Ending(Outcome.FAILED, fault, f"{type(error).__name__}: {error}"))

    def _commit(self, plan: Plan, sampled: Sampled, deltas: list[Delta], finished: list[Finished]) -> None:
        for piece in plan.slices:
            if piece.seq.num_cached_tokens is None:
                self._prefix_queries += piece.seq.num_prompt_tokens
                self._prefix_hits += piece.start
        asked = [piece.seq for piece in plan.slices if piece.prompt_rows]
        for seq, found in zip(asked, sampled.prompt_logprobs, strict=True):
            seq.prompt_logprobs += found
        self.scheduler.commit(plan)
        for seq, token, logprobs in zip(plan.sampling, sampled.token_ids, sampled.logprobs, strict=True):
            if token is None:
                ending = _Ending(Outcome.FAILED, Fault.NON_FINITE_LOGITS, "the model gave logits that are not finite")
                self._end_soon(seq.request.id, ending)
                continue
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            try:
                self._append(seq, token)
            except BaseException as error:  # a panic of the Rust tokenizer is no Exception
                log.exception("text_failed", id=seq.request.id)
                message = f"the text could not be decoded: {type(error).__name__}: {error}"
                self._end_soon(seq.request.id, _Ending(Outcome.FAILED, Fault.INTERNAL, message))
                continue
            if seq.matcher is not None and seq.matcher.error is not None:
                ending = _Ending(Outcome.FAILED, Fault.GRAMMAR, f"the grammar gave up: {seq.matcher.error}")
                self._end_soon(seq.request.id, ending)
                continue
            self._flush(seq, deltas)
            if seq.finish_reason is not None:
                self.scheduler.lengths.learn(seq.num_output_tokens)
                self._retire(seq, SequenceStatus.FINISHED)
                self._close(seq.request, Outcome.SUCCEEDED, None, None, finished)

    # ── one token ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, seq: Sequence, token: int) -> None:
        """Add a sampled id to a sequence and see whether it ends there."""
        params = seq.request.params
        seq.tokens.append(token)
        complete = seq.matcher is not None and seq.matcher.accept(token) and seq.matcher.complete
        if token in params.stop_token_ids:
            seq.stop, seq.finish_reason = token, FinishReason.STOP
            seq.text.add_silent()
        elif token in self._eos and (not params.ignore_eos or complete):
            seq.finish_reason = FinishReason.STOP
            seq.text.add_silent()
        else:
            active = seq.num_output_tokens >= params.min_tokens
            seq.stop = seq.text.push(token, active)
            if seq.stop is not None:
                seq.finish_reason = FinishReason.STOP
                return
            if complete:
                seq.finish_reason = FinishReason.STOP
            elif seq.num_output_tokens >= params.max_tokens:
                seq.finish_reason = FinishReason.LENGTH
        if seq.finish_reason is not None:
            seq.text.finish()

    def _flush(self, seq: Sequence, deltas: list[Delta]) -> None:
        """Say what is new of a sequence: when there is text, and at its end, so that every id is counted once."""
        text, count = seq.text.take()
        if text or count:
            start = seq.num_sent_tokens
            seq.num_sent_tokens += count
            ids = tuple(seq.tokens[seq.num_prompt_tokens + start : seq.num_prompt_tokens + start + count])
            logprobs = tuple(seq.logprobs[start : start + count]) if _asked(seq) else None
            deltas.append(Delta(seq.request.id, seq.index, text, ids, logprobs))

    # ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply_endings(self, deltas: list[Delta], finished: list[Finished]) -> None:
        while self._endings:
            request_id, ending = self._endings.popitem()
            request = self._requests.get(request_id)
            if request is None:
                continue
            status, reason = _FORCED.get(ending.outcome or Outcome.CANCELLED, _FORCED[Outcome.CANCELLED])
            for seq in request.sequences:
                if not seq.status.ended:
                    seq.finish_reason = reason
                    with contextlib.suppress(BaseException):  # what cannot be decoded is not part of the text
                        seq.text.finish()
                    self._flush(seq, deltas)
                    self._retire(seq, status)
            self._close(request, ending.outcome, ending.fault, ending.message, finished)

    def _retire(self, seq: Sequence, status: SequenceStatus) -> None:
        self.scheduler.end(seq, status)
        self.runner.forget(seq)

    def _close(
        self,
        request: Request,
        outcome: Outcome | None,
        fault: Fault | None,
        message: str | None,
        finished: list[Finished],
    ) -> None:
        """Once the last choice has ended: forget the request and give its last word."""
        if not all(seq.status.ended for seq in request.sequences):
            return
        del self._requests[request.id]
        self._endings.pop(request.id, None)
        self._gated.discard(request.id)
        self._on_hold.discard(request.id)
        self._failed_alone.discard(request.id)
        if not self._requests:
            self._deadlines.clear()
        if outcome is not None:
            finished.append(
                Finished(
                    request_id=request.id,
                    outcome=outcome,
                    choices=tuple(_result(seq) for seq in request.sequences),
                    prompt_tokens=len(request.prompt),
                    completion_tokens=sum(seq.num_output_tokens for seq in request.sequences),
                    cached_tokens=request.sequences[0].num_cached_tokens or 0,
                    fault=fault,
                    message=message,
                )
            )

    # ── what others may see ───────────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> EngineStats:
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
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def check_integrity(self) -> None:
        """Compare all books with each other.

        Raises:
            engine.scheduling.block_pool.IntegrityError: something leaked or is in the wrong place.
        """
        live = (seq for request in self._requests.values() for seq in request.sequences if not seq.status.ended)
        self.scheduler.check_integrity(live)


def _result(seq: Sequence) -> ChoiceResult:
    sent = seq.num_sent_tokens
    prompt = seq.request.sequences[0].prompt_logprobs
    return ChoiceResult(
        index=seq.index,
        text=seq.text.text,
        finish_reason=seq.finish_reason if seq.finish_reason is not None else FinishReason.ERROR,
        stop=seq.stop,
        token_ids=tuple(seq.output_tokens[:sent]),
        logprobs=tuple(seq.logprobs[:sent]) if _asked(seq) else None,
        prompt_logprobs=tuple(prompt) if seq.request.params.prompt_logprobs is not None else None,
    )


def _asked(seq: Sequence) -> bool:
    return seq.request.params.logprobs is not None
