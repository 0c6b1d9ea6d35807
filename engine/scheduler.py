"""Decides what each step computes: who runs, how many tokens, whose blocks are taken away.

One rule: a step moves every running sequence's `num_computed_tokens` towards its `num_tokens`, under one token budget.
Decoding, chunked prefill, prefix hits and recomputing after a preemption are all cases of it.

`schedule()` reserves blocks and changes statuses, nothing else, and returns an immutable `Plan` that ends in exactly
one `commit(plan)` or `abandon(plan)`.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator

from engine import policy
from engine.block_manager import BlockManager, IntegrityError
from engine.config import EngineConfig
from engine.plan import Plan, Slice
from engine.request import Request
from engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """Owns the places of live sequences: each is waiting, parked behind a prefix, or running, and nowhere else."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_caching)
        self.running: list[Sequence] = []
        """In the order of `policy.rank`."""
        self.num_waiting = 0
        """Sequences in WAITING, parked ones included."""
        self.preemptions = 0
        self._waiting: list[tuple[policy.Rank, Sequence]] = []
        """A heap; entries whose sequence has ended are skipped when they surface."""
        self._computing: dict[bytes, Sequence] = {}
        """Hash of a prefix block → the running sequence that is about to compute it."""
        self._parked: dict[bytes, list[Sequence]] = {}
        """Who waits for that block rather than compute it as well."""
        self._watermark = int(config.watermark * config.num_blocks)

    # ── places ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, seq: Sequence) -> None:
        """Queue a WAITING sequence."""
        self.num_waiting += 1
        heapq.heappush(self._waiting, (policy.rank(seq), seq))

    def end(self, seq: Sequence, status: SequenceStatus) -> None:
        """Move a live sequence to FINISHED or CANCELLED and free its blocks, whatever state it is in."""
        was = seq.status
        seq.move_to(status)
        if was is SequenceStatus.WAITING:
            self.num_waiting -= 1
            self._compact()
        elif was is SequenceStatus.RUNNING:
            self._leave_running(seq)
        self.blocks.free(seq)

    def _leave_running(self, seq: Sequence) -> None:
        del self.running[bisect.bisect_left(self.running, policy.rank(seq), key=policy.rank)]
        for digest in [d for d, owner in self._computing.items() if owner is seq]:
            self._release(digest)

    def _compact(self) -> None:
        """Forget ended entries before they outnumber the live ones."""
        if len(self._waiting) > 2 * self.num_waiting + 16 or not self.num_waiting:
            self._waiting = [e for e in self._waiting if e[1].status is SequenceStatus.WAITING]
            heapq.heapify(self._waiting)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, only: Request | None = None) -> Plan:
        """Plan a step; with `only`, for the sequences of that request alone."""
        budget = self.config.max_num_batched_tokens
        planned: dict[Sequence, int] = {}
        admitted: list[Sequence] = []
        preempted: list[Sequence] = []
        for seq in self._in_turn(only):
            if budget and seq.status is SequenceStatus.RUNNING:
                planned[seq] = count = min(seq.num_uncomputed_tokens, budget)
                budget -= count
                for loser in self._make_room(seq, count):
                    budget += planned.pop(loser, 0)
                    preempted.append(loser)
        if not preempted:
            self._admit(budget, planned, admitted, only)
        slices = tuple(
            Slice(seq, seq.num_computed_tokens, count, samples=count == seq.num_uncomputed_tokens)
            for seq, count in planned.items()
        )
        return Plan(slices, admitted=tuple(admitted), preempted=tuple(preempted))

    def _in_turn(self, only: Request | None) -> Iterator[Sequence]:
        """Running sequences in order, those that decode before those that prefill; safe against preemption."""
        running = [s for s in self.running if only is None or s.request is only]
        yield from (s for s in running if s.num_uncomputed_tokens == 1)
        yield from (s for s in running if s.num_uncomputed_tokens != 1)

    def _make_room(self, seq: Sequence, count: int) -> list[Sequence]:
        """Reserve blocks for `count` more tokens of `seq`; returns who was preempted for it, at last `seq` itself."""
        losers: list[Sequence] = []
        while seq not in losers and not self.blocks.allocate(seq, seq.num_computed_tokens + count):
            losers.append(policy.victim(self.running))
            self._preempt(losers[-1])
        return losers

    def _preempt(self, seq: Sequence) -> None:
        """Back to WAITING; its tokens stay, their KV will be recomputed (or found in the prefix cache)."""
        self._leave_running(seq)
        self.blocks.free(seq)
        seq.move_to(SequenceStatus.WAITING)
        self.preemptions += 1
        self.add(seq)

    def _admit(self, budget: int, planned: dict[Sequence, int], admitted: list[Sequence], only: Request | None) -> None:
        """WAITING to RUNNING, in order, while sequences, tokens and blocks last; the head is never overtaken."""
        skipped: list[tuple[policy.Rank, Sequence]] = []
        while self._waiting and budget and len(self.running) < self.config.max_num_seqs:
            seq = self._waiting[0][1]
            if seq.status is not SequenceStatus.WAITING:
                heapq.heappop(self._waiting)
            elif only is not None and seq.request is not only:
                skipped.append(heapq.heappop(self._waiting))
            else:
                hits = self.blocks.match(seq)
                if self._park(seq, len(hits)):
                    heapq.heappop(self._waiting)
                    continue
                spare = self.blocks.room_for(seq.num_tokens, hits)
                if spare < (self._watermark if self.running else 0):
                    break
                heapq.heappop(self._waiting)
                count = self._start(seq, hits, budget)
                budget -= count
                planned[seq] = count
                admitted.append(seq)
        for entry in skipped:
            heapq.heappush(self._waiting, entry)

    def _start(self, seq: Sequence, hits: list[int], budget: int) -> int:
        """Give a waiting sequence its first blocks; returns how many tokens it computes in this step."""
        self.blocks.adopt(seq, hits)
        count = min(seq.num_uncomputed_tokens, budget)
        self.blocks.allocate(seq, seq.num_computed_tokens + count)
        seq.move_to(SequenceStatus.RUNNING)
        self.num_waiting -= 1
        self._compact()
        bisect.insort(self.running, seq, key=policy.rank)
        if self.blocks.prefix_caching:
            for i in range(len(hits), seq.num_tokens // self.config.block_size):
                self._computing.setdefault(self.blocks.block_hash(seq, i), seq)
        return count

    # ── prefixes being computed right now ─────────────────────────────────────────────────────────────────────────

    def _park(self, seq: Sequence, hits: int) -> bool:
        """Whether `seq` had better wait, since the next block of its prefix is being computed by another."""
        if not self.blocks.prefix_caching or hits >= (seq.num_tokens - 1) // self.config.block_size:
            return False
        digest = self.blocks.block_hash(seq, hits)
        if digest not in self._computing:
            return False
        self._parked.setdefault(digest, []).append(seq)
        return True

    def _release(self, digest: bytes) -> None:
        """The block is computed, or will not be: who waited for it is back in the queue."""
        self._computing.pop(digest, None)
        for seq in self._parked.pop(digest, ()):
            if seq.status is SequenceStatus.WAITING:
                heapq.heappush(self._waiting, (policy.rank(seq), seq))

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────────────────────

    def commit(self, plan: Plan) -> None:
        """The forward has run: what it computed counts, and full blocks become findable."""
        size = self.config.block_size
        for piece in plan.slices:
            seq = piece.seq
            seq.num_computed_tokens = piece.start + piece.count
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = piece.start
            self.blocks.register(seq, piece.start)
            if self._computing:
                for i in range(piece.start // size, seq.num_computed_tokens // size):
                    self._release(self.blocks.block_hash(seq, i))

    def abandon(self, plan: Plan) -> None:
        """The forward did not run: blocks return, the admitted go back to WAITING. Preempted ones stay so."""
        for seq in plan.admitted:
            if seq.status is SequenceStatus.RUNNING:
                self._leave_running(seq)
                self.blocks.free(seq)
                seq.move_to(SequenceStatus.WAITING)
                self.add(seq)
        for piece in plan.slices:
            if piece.seq.status is SequenceStatus.RUNNING:
                self.blocks.trim(piece.seq)

    # ── self-check ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self, live: Callable[[], Iterator[Sequence]]) -> None:
        """Compare every book with every live sequence.

        Raises:
            IntegrityError: a sequence is in two places or in none, a block leaked, or something outlived its request.
        """
        sequences = list(live())
        self.blocks.check_integrity(sequences)
        running = {s.uid for s in self.running}
        parked = [s.uid for group in self._parked.values() for s in group if s.status is SequenceStatus.WAITING]
        queued = [s.uid for _, s in self._waiting if s.status is SequenceStatus.WAITING]
        places = [*running, *parked, *queued]
        if len(places) != len(set(places)) or len(running) != len(self.running):
            raise IntegrityError("a sequence is in two places")
        for seq in sequences:
            if (seq.status is SequenceStatus.RUNNING) != (seq.uid in running):
                raise IntegrityError(f"{seq!r} is in the wrong place")
            if seq.status is not SequenceStatus.RUNNING and seq.block_table:
                raise IntegrityError(f"{seq!r} holds blocks without running")
        if set(places) != {s.uid for s in sequences}:
            raise IntegrityError("the scheduler and the engine know different sequences")
        if self.num_waiting != len(parked) + len(queued):
            raise IntegrityError(f"{self.num_waiting} counted as waiting, {len(parked) + len(queued)} are")
        if [policy.rank(s) for s in self.running] != sorted(policy.rank(s) for s in self.running):
            raise IntegrityError("running is out of order")
        if any(owner.status is not SequenceStatus.RUNNING for owner in self._computing.values()):
            raise IntegrityError("a prefix is waited for that nobody computes")
        if not set(self._parked) <= set(self._computing):
            raise IntegrityError("a sequence is parked behind a prefix that nobody computes")
