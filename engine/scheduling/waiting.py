"""The waiting queue: who is next, who waits behind a prefix that another computes, who waits to be forked."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from engine.scheduling.block_pool import IntegrityError
from engine.sequence import Rank, Sequence, SequenceStatus


class WaitingQueue:
    """WAITING sequences in the order of `Sequence.rank`. Ended ones may leave entries behind, which are skipped.

    Parked sequences wait too, but are not offered: they wait behind a prefix block that a running sequence is about to
    compute (`will_compute`), rather than compute it as well, until it has (`computed`) or never will (`will_not`).
    Nothing here scans the queue.
    """

    def __init__(self) -> None:
        self.count = 0
        """Sequences that wait, parked ones included."""
        self._heap: list[tuple[Rank, Sequence]] = []
        self._computing: dict[bytes, Sequence] = {}
        """Hash of a prefix block → the running sequence that is about to compute it."""
        self._parked: dict[bytes, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return self.count > 0

    def push(self, seq: Sequence) -> None:
        """Add a sequence that was not waiting."""
        self.count += 1
        heapq.heappush(self._heap, (seq.rank, seq))

    def left(self) -> None:
        """A sequence that was counted here has ended or has been admitted."""
        self.count -= 1
        if len(self._heap) > 2 * self.count + 16 or not self.count:
            self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        """Who is next; None if nobody is on offer."""
        while self._heap and self._heap[0][1].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take away what `peek` showed; it still counts as waiting."""
        heapq.heappop(self._heap)

    def put_back(self, seq: Sequence) -> None:
        """Offer again what was popped or parked."""
        if seq.status is SequenceStatus.WAITING:
            heapq.heappush(self._heap, (seq.rank, seq))

    # ── prefixes being computed right now ─────────────────────────────────────────────────────────────────────────

    def will_compute(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """A running sequence is about to compute the prefix blocks of these hashes."""
        for digest in digests:
            self._computing.setdefault(digest, seq)

    def computed(self, digests: Iterable[bytes]) -> None:
        """These blocks can be found now."""
        for digest in digests:
            self._release(digest)

    def will_not(self, seq: Sequence) -> None:
        """This sequence does not run any more."""
        for digest in [digest for digest, owner in self._computing.items() if owner is seq]:
            self._release(digest)

    def park(self, digest: bytes) -> bool:
        """Let the sequence on offer wait for this block, if somebody is computing it."""
        seq = self.peek()
        if seq is None or digest not in self._computing:
            return False
        self.pop()
        self._parked.setdefault(digest, []).append(seq)
        return True

    def _release(self, digest: bytes) -> None:
        self._computing.pop(digest, None)
        for seq in self._parked.pop(digest, ()):
            self.put_back(seq)

    def check_integrity(self) -> None:
        """
        Raises:
            IntegrityError: somebody is counted wrongly, or waits for what nobody computes.
        """
        if self.count != len(list(self)):
            raise IntegrityError(f"{self.count} counted as waiting, {len(list(self))} are")
        if any(owner.status is not SequenceStatus.RUNNING for owner in self._computing.values()):
            raise IntegrityError("a prefix is waited for that nobody computes")
        if not set(self._parked) <= set(self._computing):
            raise IntegrityError("a sequence is parked behind a prefix that nobody computes")

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order (for self-checks)."""
        groups = [[seq for _, seq in self._heap], *self._parked.values()]
        return (seq for group in groups for seq in group if seq.status is SequenceStatus.WAITING)
