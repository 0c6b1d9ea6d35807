"""Decides what each step computes: which sequences run, how many tokens of each, and which sequence is preempted.

A step moves the `num_computed_tokens` of each running sequence towards its `num_tokens`, under one token budget.
Decoding, chunked prefill, prefix hits and recomputing after a preemption are all cases of this rule. The order:

    1. running sequences: decodes, then prefill chunks; preempt a sequence where no block is free
    2. only if nothing was preempted: resume SWAPPED sequences, then admit WAITING ones

`schedule()` reserves blocks, changes statuses and returns an immutable `Plan`. The caller makes the copies of the plan,
calls `moved` and launches the forward pass; then it calls `launched(plan)`, or `abandon(plan)` if the launch raised.
Once the sampled ids are known it calls `settled(plan)`, in the order of the launches, and appends them. Until then they
count as `Sequence.num_pending`, and the next step may be scheduled.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from engine.config import EngineConfig
from engine.scheduling import policy
from engine.scheduling.block_manager import BlockManager, Hit
from engine.scheduling.plan import Draft, Plan, Slice
from engine.scheduling.waiting import WaitingQueue
from engine.sequence import RequestState, Sequence, SequenceStatus

_LOOKAHEAD = 4
"""A step tries to admit sequences behind at most this many for which there is no room."""
_PROMPT_LOGPROBS_CHUNK = 256
"""A step computes at most this many tokens of a prompt whose logprobs are requested: each needs a row of logits."""
_rank = attrgetter("rank")


class Scheduler:
    """Holds each live sequence in exactly one place: waiting, waiting to be forked, running or swapped."""

    def __init__(self, config: EngineConfig, cost: policy.PreemptionCost | None = None) -> None:
        self.config = config
        self.cost = cost or policy.PreemptionCost()
        self.blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            host_slots=config.host_slots,
            prefix_caching=config.prefix_caching,
        )
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In the order of `Sequence.rank`."""
        self.swapped: list[Sequence] = []
        """In the order of `Sequence.rank`."""
        self.children: dict[Sequence, list[Sequence]] = {}
        """First choice → the other choices of its request, which wait to be forked when its prompt is computed."""
        self.running_by_lane = Counter[int]()
        """Priority → number of running sequences."""
        self.lengths = policy.OutputLengths()
        self.budget = config.max_num_batched_tokens
        """Tokens that a step may compute; lower for some steps after the device ran out of memory."""
        self.swaps = 0
        self.recomputes = 0
        self.prefix_queries = self.prefix_hits = 0
        """Number of prompt tokens looked up, and found, in the prefix cache."""
        self._watermark = int(config.watermark * config.num_blocks)

    # ── adding and ending sequences ───────────────────────────────────────────────────────────────────────────────

    def add(self, state: RequestState) -> None:
        """Queue a request: its first choice waits for admission, its other choices wait to be forked from the first."""
        first, *others = state.sequences
        self.waiting.push(first)
        if others:
            self.children[first] = others

    @property
    def num_waiting(self) -> int:
        """Number of WAITING sequences, those included that wait to be forked."""
        return self.waiting.count + sum(len(children) for children in self.children.values())

    def end(self, seq: Sequence, status: SequenceStatus) -> None:
        """Move a live sequence to FINISHED or CANCELLED, from any status, and free its blocks in both tiers."""
        was = seq.status
        seq.move_to(status)
        self._queue_children(seq)
        if was is SequenceStatus.WAITING:
            siblings = self.children.get(seq.state.sequences[0])
            if siblings is not None and seq in siblings:
                siblings.remove(seq)
            else:
                self.waiting.note_left()
        elif was is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif was is SequenceStatus.SWAPPED:
            _remove(self.swapped, seq)
        self.blocks.free(seq)

    def _join_running(self, seq: Sequence) -> None:
        seq.move_to(SequenceStatus.RUNNING)
        bisect.insort(self.running, seq, key=_rank)
        self.running_by_lane[seq.request.priority] += 1

    def _leave_running(self, seq: Sequence) -> None:
        _remove(self.running, seq)
        self.running_by_lane[seq.request.priority] -= 1
        self.waiting.stops_computing(seq)

    def _queue_children(self, first: Sequence) -> None:
        """Queue the choices that were not forked from `first`; they will find the blocks of its prompt by hash."""
        for child in self.children.pop(first, ()):
            if child.status is SequenceStatus.WAITING:
                self.waiting.push(child)

    # ── planning a step ───────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, only: RequestState | None = None) -> Plan:
        """Plan a step; with `only`, for the sequences of this request alone."""
        draft = Draft(self.budget, only)
        for seq in self._decodes_first(draft):
            if draft.budget and seq.status is SequenceStatus.RUNNING:  # an earlier sequence may have preempted it
                self._continue(seq, draft)
        if not draft.preempted:
            self._admit(draft)
        if self.children:
            self._plan_forks(draft)
        moves = self.blocks.moves
        slices = tuple(
            Slice(seq, seq.num_computed_tokens, count, count == seq.num_uncomputed_tokens, draft.forks.get(seq, ()))
            for seq, count in draft.counts.items()
            if not seq.state.on_hold
        )
        return Plan(
            slices,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            swap_out=tuple(moves.out),
            swap_in=tuple(moves.into),
            copies=tuple((read, write) for write, read in moves.copies.items()),
        )

    def _decodes_first(self, draft: Draft) -> list[Sequence]:
        """Return the running sequences that decode, then those that prefill; not those that are on hold or end with
        their pending id."""
        running = [seq for seq in self.running if not (seq.state.on_hold or (seq.num_pending and seq.ends_by_length))]
        if draft.only is not None:
            running = [seq for seq in running if seq.state is draft.only]
        decoding = [seq for seq in running if seq.num_uncomputed_tokens == 1]
        if len(decoding) == len(running):
            return decoding
        return decoding + [seq for seq in running if seq.num_uncomputed_tokens != 1]

    def _continue(self, seq: Sequence, draft: Draft) -> None:
        """Plan the next tokens of a running sequence, preempting sequences (at last itself) until its blocks fit."""
        count = self._chunk(seq, draft.budget)
        draft.counts[seq] = count
        draft.budget -= count
        allocate, end = self.blocks.allocate, seq.num_computed_tokens + count
        while seq.status is SequenceStatus.RUNNING and not allocate(seq, end):
            if self._free_ending():
                continue
            # The first sequence in the order of service is preempted only if it runs alone, so each step makes
            # progress. Sequences on hold compute nothing and are preempted before all others.
            on_hold = [other for other in self.running if other.state.on_hold]
            self._preempt(policy.victim(on_hold or self.running[1:] or self.running, self.blocks.device), draft)

    def _free_ending(self) -> bool:
        """Free the blocks of a sequence that ends with its pending id, if there is one: no step reads them again."""
        for seq in self.running:
            if seq.num_pending and seq.block_table and seq.ends_by_length:
                self.blocks.free(seq)
                return True
        return False

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Return how many tokens of a sequence the step computes, within `budget`."""
        count = seq.num_uncomputed_tokens
        if count == 1:
            return 1
        return min(count, budget, _PROMPT_LOGPROBS_CHUNK) if seq.wants_prompt_logprobs else min(count, budget)

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        """Free the device blocks of a running sequence: swap it to the host tier if that is cheaper than recomputing
        and the tier has room; otherwise it waits to be recomputed."""
        draft.budget += draft.counts.pop(seq, 0)
        draft.preempted.append(seq)
        self._leave_running(seq)
        if self.cost.swaps and not seq.state.on_hold and self.blocks.swap_out(seq):
            seq.move_to(SequenceStatus.SWAPPED)
            bisect.insort(self.swapped, seq, key=_rank)
            self.swaps += 1
        else:
            self.blocks.free(seq)
            seq.move_to(SequenceStatus.WAITING)
            self.waiting.push(seq)
            self.recomputes += 1

    # ── admission ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, draft: Draft) -> None:
        """Move SWAPPED and WAITING sequences to RUNNING within the limits of sequences, tokens and blocks.

        A swapped sequence comes before waiting ones, except those of a higher lane. A sequence for which there is no
        room may be overtaken `max_overtakes` times. A sequence may preempt sequences of lower lanes.
        """
        blocked: list[Sequence] = []
        skipped: list[Sequence] = []
        while draft.budget and self._may_overtake(blocked) and (seq := self._next(draft, skipped)) is not None:
            swapped = seq.status is SequenceStatus.SWAPPED
            if self._is_full and not self._lower_lane_runs(seq):
                break
            hits = self.blocks.swapped(seq) if swapped else self.blocks.match(seq)
            if not swapped and self._wait_for_prefix(seq, len(hits)):
                continue
            if self._has_room(seq, hits):
                self._start(seq, hits, draft)
                for overtaken in blocked:
                    overtaken.overtaken += 1
                continue
            if swapped or self._preempt_lower_lane(seq, hits, draft) or len(blocked) == _LOOKAHEAD:
                break
            self.waiting.pop()
            blocked.append(seq)
        for seq in (*blocked, *skipped):
            self.waiting.put_back(seq)

    def _next(self, draft: Draft, skipped: list[Sequence]) -> Sequence | None:
        """Return the next candidate for admission, which stays in its queue; None if there is none.

        Waiting sequences that the draft does not include are moved to `skipped`.
        """
        while (waiting := self.waiting.peek()) is not None and not draft.includes(waiting):
            self.waiting.pop()
            skipped.append(waiting)
        swapped = next((seq for seq in self.swapped if draft.includes(seq)), None)
        if swapped is None or (waiting is not None and policy.has_precedence(waiting, swapped)):
            return waiting
        return swapped

    def _has_room(self, seq: Sequence, hits: list[Hit]) -> bool:
        """Return whether all tokens of `seq` fit into free blocks now, and whether the outputs of all running and
        swapped sequences and of `seq`, at their expected lengths, will fit into the pool."""
        if self._is_full:
            return False
        free = self.blocks.room_for(seq.num_tokens, hits)
        if not self.running:
            return free >= 0
        if free < self._watermark:
            return False
        together = [*self.running, *(() if seq.status is SequenceStatus.SWAPPED else self.swapped), seq]
        need = policy.demand(together, self.lengths, self.config.block_size)
        refs = self.blocks.device.refs
        shared = sum(len(s.block_table) for s in self.running) - (self.config.num_blocks - self.blocks.num_free)
        shared += sum(1 for hit in hits if hit.block is not None and refs[hit.block])
        return need - shared <= self.config.num_blocks - self._watermark

    def _preempt_lower_lane(self, seq: Sequence, hits: list[Hit], draft: Draft) -> bool:
        """Preempt a running sequence of a lower lane, if preempting such sequences can make room for `seq`.

        Returns:
            Whether a sequence was preempted; a later step then admits `seq`.
        """
        if draft.num_started or not self._lower_lane_runs(seq):
            return False
        lower = [running for running in self.running if policy.has_precedence(seq, running)]
        room = self.blocks.room_for(seq.num_tokens, hits) + sum(len(running.block_table) for running in lower)
        if not lower or room < 0:
            return False
        self._preempt(policy.victim(lower, self.blocks.device), draft)
        return True

    def _may_overtake(self, blocked: list[Sequence]) -> bool:
        """Return whether other sequences may be admitted before those in `blocked`, for which there is no room."""
        if not blocked:
            return True
        allowed = all(seq.overtaken < self.config.max_overtakes for seq in blocked)
        return allowed and not self.swapped and not self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.config.max_num_seqs

    def _lower_lane_runs(self, seq: Sequence) -> bool:
        """Return whether a sequence of a lower lane than that of `seq` is running."""
        return any(count and lane > seq.request.priority for lane, count in self.running_by_lane.items())

    def _start(self, seq: Sequence, hits: list[Hit], draft: Draft) -> None:
        """Move a waiting or swapped sequence to RUNNING, with its blocks and its first tokens of this step."""
        waited = seq.status is SequenceStatus.WAITING
        if waited:
            self.waiting.pop()
            draft.admitted.append(seq)
            self.blocks.adopt(seq, hits, len(hits) * self.config.block_size)
        else:
            _remove(self.swapped, seq)
            self.blocks.adopt(seq, hits, seq.num_computed_tokens)
        count = self._chunk(seq, draft.budget)
        self.blocks.allocate(seq, seq.num_computed_tokens + count)
        self._join_running(seq)
        if waited:
            self.waiting.note_left()
        draft.counts[seq] = count
        draft.budget -= count
        draft.num_started += 1
        if self.blocks.prefix_caching:
            size = self.config.block_size
            blocks = range(seq.num_computed_tokens // size, seq.num_tokens // size)
            self.waiting.will_compute(seq, (self.blocks.block_hash(seq, i) for i in blocks))

    def _plan_forks(self, draft: Draft) -> None:
        """Plan forks of each first choice whose prompt is complete after this step, as many as there is room for."""
        for seq, count in draft.counts.items():
            if seq in self.children and count == seq.num_uncomputed_tokens:
                # Each fork soon needs a block of its own: a copy of the partial last block, or the next block.
                planned = sum(len(forks) for forks in draft.forks.values())
                places = self.config.max_num_seqs - len(self.running) - planned
                room = self.blocks.num_free - self._watermark - planned
                draft.forks[seq] = tuple(self.children[seq][: max(0, min(places, room))])

    def _wait_for_prefix(self, seq: Sequence, hits: int) -> bool:
        """Park the waiting sequence `seq` if a running sequence is computing the next block of its prefix.

        Args:
            hits: number of blocks of its prefix that were found.

        Returns:
            Whether it was parked.
        """
        shares = self.blocks.prefix_caching and not seq.wants_prompt_logprobs
        if not shares or hits >= (seq.num_tokens - 1) // self.config.block_size:
            return False
        return self.waiting.park(self.blocks.block_hash(seq, hits))

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────────────────────

    def moved(self) -> None:
        """Record that the copies of the last plan were made."""
        self.blocks.moved()

    def launched(self, plan: Plan) -> None:
        """Record that the forward pass was launched: tokens count as computed, sampled ids are pending, forks run."""
        for seq, start, count, samples, forks in plan.slices:
            seq.num_computed_tokens = start + count
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = start
                self.prefix_queries += seq.num_prompt_tokens
                self.prefix_hits += start
            if samples:
                seq.num_pending += 1
                if self.children and seq in self.children:
                    self._fork(seq, forks)
        self.budget = min(self.config.max_num_batched_tokens, self.budget + max(1, self.budget // 16))

    def settled(self, plan: Plan) -> None:
        """Record that the sampled ids are known, before they are appended; full blocks become findable."""
        size = self.config.block_size
        for seq, start, count, samples, forks in plan.slices:
            if samples:
                seq.num_pending -= 1
                for fork in forks:
                    fork.num_pending -= 1
            done, full = start // size, (start + count) // size
            if done < full <= len(seq.block_table):  # a sequence that has ended or was preempted has no blocks
                self.blocks.register(seq, done, full)
                self.waiting.computed(self.blocks.block_hash(seq, i) for i in range(done, full))

    def _fork(self, seq: Sequence, children: Iterable[Sequence]) -> None:
        for child in children:
            self.children[seq].remove(child)
            child.num_cached_tokens = child.num_prompt_tokens
            child.num_pending = 1
            self.blocks.fork(seq, child)
            self._join_running(child)
        self._queue_children(seq)

    def abandon(self, plan: Plan) -> None:
        """Undo a plan whose forward pass did not run: free its blocks, move admitted sequences back to WAITING.

        Preempted sequences stay preempted.
        """
        for seq in plan.admitted:
            if seq.status is SequenceStatus.RUNNING:
                self._leave_running(seq)
                self.blocks.free(seq)
                seq.move_to(SequenceStatus.WAITING)
                self.waiting.push(seq)
        for piece in plan.slices:
            if piece.seq.status is SequenceStatus.RUNNING:
                self.blocks.trim(piece.seq)

    def shrink(self, plan: Plan) -> None:
        """Halve the token budget after the device ran out of memory over this plan; each step raises it by 1/16."""
        self.budget = max(1, plan.num_tokens // 2)


def _remove(ordered: list[Sequence], seq: Sequence) -> None:
    del ordered[bisect.bisect_left(ordered, seq.rank, key=_rank)]
