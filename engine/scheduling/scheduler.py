"""Decides what each step computes: who runs, how many tokens, whose blocks are taken away.

One rule: a step moves every running sequence's `num_computed_tokens` towards its `num_tokens`, under one token budget.
Decoding, chunked prefill, prefix hits and recomputing after a preemption are all cases of it. In order:

    running sequences (decodes, then prefill chunks), preempting where there is no room
    → only if nothing was preempted: SWAPPED ones return, then WAITING ones come in

`schedule()` reserves blocks and changes statuses, nothing else, and returns an immutable `Plan`. Its copies are made
(`moved`), then it ends in exactly one `commit(plan)` or `abandon(plan)`.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from engine.config import EngineConfig
from engine.scheduling import policy
from engine.scheduling.block_manager import BlockManager, Hit, IntegrityError
from engine.scheduling.plan import Plan, Slice
from engine.scheduling.waiting import WaitingQueue
from engine.sequence import RequestState, Sequence, SequenceStatus

_LOOKAHEAD = 4
"""Blocked sequences that a step looks past."""
_PROMPT_LOGPROBS_CHUNK = 256
"""Tokens of a prompt whose logprobs are wanted that a step computes: each needs a row of logits."""
_rank = attrgetter("rank")


@dataclass
class _Draft:
    """A plan in the making."""

    budget: int
    only: RequestState | None
    counts: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    forks: dict[Sequence, tuple[Sequence, ...]] = field(default_factory=dict)
    entered: int = 0
    """How many came back or came in."""

    def concerns(self, seq: Sequence) -> bool:
        return self.only is None or seq.state is self.only


class Scheduler:
    """Owns the places of live sequences: each is waiting, held back for a fork, running or swapped, in one alone."""

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
        self.lengths = policy.OutputLengths()
        self.budget = config.max_num_batched_tokens
        """Tokens a step may compute; lower for a while after the device ran out of memory."""
        self.swaps = 0
        self.recomputes = 0
        self._children: dict[Sequence, list[Sequence]] = {}
        """First choice → the other choices of its request, held back until its prompt is computed."""
        self._lanes = Counter[int]()
        """How many of each lane run."""
        self._watermark = int(config.watermark * config.num_blocks)

    # ── places ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, state: RequestState) -> None:
        """Queue a request: its first choice waits, the others wait to be forked from it."""
        first, *others = state.sequences
        self.waiting.push(first)
        if others:
            self._children[first] = others

    @property
    def num_waiting(self) -> int:
        return self.waiting.count + sum(len(children) for children in self._children.values())

    def end(self, seq: Sequence, status: SequenceStatus) -> None:
        """Move a live sequence to FINISHED or CANCELLED and free its blocks in both tiers, whatever state it is in."""
        was = seq.status
        seq.move_to(status)
        self._free_children(seq)
        if was is SequenceStatus.WAITING:
            siblings = self._children.get(seq.state.sequences[0])
            if siblings is not None and seq in siblings:
                siblings.remove(seq)
            else:
                self.waiting.left()
        elif was is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif was is SequenceStatus.SWAPPED:
            _remove(self.swapped, seq)
        self.blocks.free(seq)

    def _join_running(self, seq: Sequence) -> None:
        seq.move_to(SequenceStatus.RUNNING)
        bisect.insort(self.running, seq, key=_rank)
        self._lanes[seq.request.priority] += 1

    def _leave_running(self, seq: Sequence) -> None:
        _remove(self.running, seq)
        self._lanes[seq.request.priority] -= 1
        self.waiting.will_not(seq)

    def _free_children(self, first: Sequence) -> None:
        """Those still held back wait like anybody else: the prompt's blocks will be a prefix hit for them."""
        for child in self._children.pop(first, ()):
            if child.status is SequenceStatus.WAITING:
                self.waiting.push(child)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, only: RequestState | None = None) -> Plan:
        """Plan a step; with `only`, for the sequences of that request alone."""
        draft = _Draft(self.budget, only)
        for seq in self._in_turn(draft):
            if draft.budget and seq.status is SequenceStatus.RUNNING:  # it may have been preempted meanwhile
                self._go_on(seq, draft)
        if not draft.preempted:
            self._let_in(draft)
        if self._children:
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

    def _in_turn(self, draft: _Draft) -> list[Sequence]:
        """Running sequences in order, those that decode before those that prefill. Not those on hold."""
        running = [seq for seq in self.running if not seq.state.on_hold and draft.concerns(seq)]
        decoding = [seq for seq in running if seq.num_uncomputed_tokens == 1]
        if len(decoding) == len(running):
            return decoding
        return decoding + [seq for seq in running if seq.num_uncomputed_tokens != 1]

    def _go_on(self, seq: Sequence, draft: _Draft) -> None:
        """Give a running sequence its next tokens, taking blocks from others or, at last, from itself."""
        count = self._chunk(seq, draft.budget)
        draft.counts[seq] = count
        draft.budget -= count
        allocate, end = self.blocks.allocate, seq.num_computed_tokens + count
        while seq.status is SequenceStatus.RUNNING and not allocate(seq, end):
            # The first in the order of service is spared unless it is alone, which is why every step makes progress.
            # What is on hold computes nothing, so it makes way first.
            idle = [other for other in self.running if other.state.on_hold]
            self._preempt(policy.victim(idle or self.running[1:] or self.running, self.blocks.device), draft)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        count = seq.num_uncomputed_tokens
        if count == 1:
            return 1
        count = min(count, budget)
        if seq.wants_prompt_logprobs:
            count = min(count, _PROMPT_LOGPROBS_CHUNK)
        return count

    def _preempt(self, seq: Sequence, draft: _Draft) -> None:
        """Take the device blocks of a running sequence: to the host tier if that pays and has room, else for good."""
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

    # ── coming in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_in(self, draft: _Draft) -> None:
        """SWAPPED and WAITING to RUNNING while sequences, tokens and blocks last.

        Swapped ones come first, except after waiting ones of a higher lane. A blocked sequence may be overtaken
        `max_overtakes` times; one of a higher lane than some that run takes their place.
        """
        blocked: list[Sequence] = []
        skipped: list[Sequence] = []
        while draft.budget and self._may_pass(blocked) and (seq := self._next(draft, skipped)) is not None:
            swapped = seq.status is SequenceStatus.SWAPPED
            if self._is_full and not self._runs_below(seq):
                break
            hits = self.blocks.swapped(seq) if swapped else self.blocks.match(seq)
            if not swapped and self._park(seq, len(hits)):
                continue
            if self._may_enter(seq, hits):
                self._enter(seq, hits, draft)
                for passed in blocked:
                    passed.overtaken += 1
                continue
            if swapped or self._take_place(seq, hits, draft) or len(blocked) == _LOOKAHEAD:
                break
            self.waiting.pop()
            blocked.append(seq)
        for seq in (*blocked, *skipped):
            self.waiting.put_back(seq)

    def _next(self, draft: _Draft, skipped: list[Sequence]) -> Sequence | None:
        """Who may come in next, if anybody; what `only` leaves out is skipped."""
        while (seq := self.waiting.peek()) is not None and not draft.concerns(seq):
            self.waiting.pop()
            skipped.append(seq)
        back = next((s for s in self.swapped if draft.concerns(s)), None)
        if back is None or (seq is not None and _goes_before(seq, back)):
            return seq
        return back

    def _may_enter(self, seq: Sequence, hits: list[Hit]) -> bool:
        """Whether there is room for all tokens of `seq` now, and for all that run to end as long as is expected."""
        if self._is_full:
            return False
        spare = self.blocks.room_for(seq.num_tokens, hits)
        if not self.running:
            return spare >= 0
        if spare < self._watermark:
            return False
        everybody = [*self.running, *(() if seq.status is SequenceStatus.SWAPPED else self.swapped), seq]
        tokens = np.fromiter((s.num_tokens for s in everybody), np.int64)
        done = np.fromiter((s.num_output_tokens for s in everybody), np.int64)
        limits = np.fromiter((s.max_tokens for s in everybody), np.int64)
        need = policy.peak(tokens, self.lengths.remaining(done, limits), self.config.block_size)
        refs = self.blocks.device.refs
        shared = sum(len(s.block_table) for s in self.running) - (self.config.num_blocks - self.blocks.num_free)
        shared += sum(1 for hit in hits if hit.block is not None and refs[hit.block])
        return need - shared <= self.config.num_blocks - self._watermark

    def _take_place(self, seq: Sequence, hits: list[Hit], draft: _Draft) -> bool:
        """Preempt one of a lower lane, if that can make room for `seq`; it comes in at a later step then."""
        if draft.entered or not self._runs_below(seq):
            return False
        lower = [s for s in self.running if _goes_before(seq, s)]
        room = self.blocks.room_for(seq.num_tokens, hits) + sum(len(s.block_table) for s in lower)
        if not lower or room < 0:
            return False
        self._preempt(policy.victim(lower, self.blocks.device), draft)
        return True

    def _may_pass(self, blocked: list[Sequence]) -> bool:
        """Whether others may come in before those for whom there is no room."""
        if not blocked:
            return True
        patient = all(seq.overtaken < self.config.max_overtakes for seq in blocked)
        return patient and not self.swapped and not self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.config.max_num_seqs

    def _runs_below(self, seq: Sequence) -> bool:
        """Whether a lane below that of `seq` has running sequences."""
        return any(count and lane > seq.request.priority for lane, count in self._lanes.items())

    def _enter(self, seq: Sequence, hits: list[Hit], draft: _Draft) -> None:
        """Give a waiting or swapped sequence its blocks and its first tokens of this step."""
        if seq.status is SequenceStatus.SWAPPED:
            _remove(self.swapped, seq)
            self.blocks.adopt(seq, hits, seq.num_computed_tokens)
        else:
            self.waiting.pop()
            draft.admitted.append(seq)
            self.blocks.adopt(seq, hits, len(hits) * self.config.block_size)
        count = self._chunk(seq, draft.budget)
        self.blocks.allocate(seq, seq.num_computed_tokens + count)
        waited = seq.status is SequenceStatus.WAITING
        self._join_running(seq)
        if waited:
            self.waiting.left()
        draft.counts[seq] = count
        draft.budget -= count
        draft.entered += 1
        if self.blocks.prefix_caching:
            size = self.config.block_size
            blocks = range(seq.num_computed_tokens // size, seq.num_tokens // size)
            self.waiting.will_compute(seq, (self.blocks.block_hash(seq, i) for i in blocks))

    def _plan_forks(self, draft: _Draft) -> None:
        """Where a prompt is complete after this step, its other choices start: as many as there is room for."""
        for seq, count in draft.counts.items():
            if seq in self._children and count == seq.num_uncomputed_tokens:
                # Each will soon need a block of its own: a copy of the partial last one, or the next.
                planned = sum(len(forks) for forks in draft.forks.values())
                places = self.config.max_num_seqs - len(self.running) - planned
                room = self.blocks.num_free - self._watermark - planned
                draft.forks[seq] = tuple(self._children[seq][: max(0, min(places, room))])

    def _park(self, seq: Sequence, hits: int) -> bool:
        """Whether `seq` had better wait, since the next block of its prefix is being computed by another."""
        shares = self.blocks.prefix_caching and not seq.wants_prompt_logprobs
        if not shares or hits >= (seq.num_tokens - 1) // self.config.block_size:
            return False
        return self.waiting.park(self.blocks.block_hash(seq, hits))

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────────────────────

    def moved(self) -> None:
        """The copies of the last plan have been made."""
        self.blocks.moved()

    def commit(self, plan: Plan) -> None:
        """The forward has run: what it computed counts, full blocks become findable, forks run."""
        size = self.config.block_size
        for piece in plan.slices:
            seq = piece.seq
            seq.num_computed_tokens = piece.start + piece.num_tokens
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = piece.start
            done, full = piece.start // size, seq.num_computed_tokens // size
            if full > done:
                self.blocks.register(seq, piece.start)
                self.waiting.computed(self.blocks.block_hash(seq, i) for i in range(done, full))
            if piece.samples and self._children and seq in self._children:
                self._fork(seq, piece.forks)
        self.budget = min(self.config.max_num_batched_tokens, self.budget + max(1, self.budget // 16))

    def _fork(self, seq: Sequence, children: Iterable[Sequence]) -> None:
        for child in children:
            self._children[seq].remove(child)
            child.num_cached_tokens = child.num_prompt_tokens
            self.blocks.fork(seq, child)
            self._join_running(child)
        self._free_children(seq)

    def abandon(self, plan: Plan) -> None:
        """The forward did not run: blocks return, the admitted go back to WAITING. Preempted ones stay so."""
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
        """The device ran out of memory over this plan: the next ones are half as large, and grow again step by step."""
        self.budget = max(1, plan.num_tokens // 2)

    # ── self-check ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare every book with every live sequence.

        Raises:
            IntegrityError: a sequence is in two places or in none, a block leaked, or something outlived its request.
        """
        sequences = list(live)
        self.blocks.check_integrity(sequences)
        held_back = [child for children in self._children.values() for child in children]
        places = {
            SequenceStatus.WAITING: [*self.waiting, *held_back],
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
        }
        found = [seq.uid for group in places.values() for seq in group]
        if sorted(found) != sorted(seq.uid for seq in sequences):
            raise IntegrityError("a sequence is in two places, in none, or outlived its request")
        for status, group in places.items():
            for seq in group:
                if seq.status is not status:
                    raise IntegrityError(f"{seq!r} is in the place of {status.name}")
                if (seq.block_table and status is not SequenceStatus.RUNNING) or (
                    seq.host_table and status is not SequenceStatus.SWAPPED
                ):
                    raise IntegrityError(f"{seq!r} holds blocks of another state")
        self.waiting.check_integrity()
        if +self._lanes != Counter(seq.request.priority for seq in self.running):
            raise IntegrityError("the lanes of what runs are counted wrongly")
        for group in (self.running, self.swapped):
            if [s.rank for s in group] != sorted(s.rank for s in group):
                raise IntegrityError("out of order")
        if any(first.status.ended for first in self._children):
            raise IntegrityError("a choice waits to be forked from one that has ended")


def _goes_before(seq: Sequence, other: Sequence) -> bool:
    """Whether a newcomer may take the place of `other`: its lane is higher, and `other` has not aged past it."""
    return seq.request.priority < other.request.priority and seq.rank < other.rank


def _remove(ordered: list[Sequence], seq: Sequence) -> None:
    del ordered[bisect.bisect_left(ordered, seq.rank, key=_rank)]
