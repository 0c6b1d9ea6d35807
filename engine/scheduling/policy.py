"""The scheduler's decisions, as functions: which sequence to preempt and how, and whether a sequence fits."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.scheduling.block_pool import BlockPool
from engine.sequence import Sequence

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def has_precedence(seq: Sequence, other: Sequence) -> bool:
    """Return whether `seq` may be served in place of `other`: its lane is higher, and `other` has not aged past it."""
    return seq.request.priority < other.request.priority and seq.rank < other.rank


def victim(running: Seq[Sequence], device: BlockPool) -> Sequence:
    """Return the sequence to preempt: the sequence of the lowest lane that loses the fewest computed tokens for each
    block that its preemption frees.

    Args:
        running: candidates in the order of `Sequence.rank`, at least one; among equals, the last candidate is returned.
        device: the pool that holds their blocks.
    """

    def cost(seq: Sequence) -> tuple[float, ...]:
        freed = sum(1 for block in seq.block_table if device.refs[block] == 1)
        return (-seq.request.priority, seq.num_computed_tokens / freed if freed else np.inf)

    return min(reversed(running), key=cost)


_RATES = {"cpu": (4e9, 2e11), "cuda": (1e10, 1e14)}
"""Device → bytes per second to and from the host tier, and floating-point operations per second of a prefill. Orders of
magnitude of a small server CPU and of a current GPU on PCIe; not measured at the start, so that decisions repeat."""


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Seconds that it costs to bring one block of a preempted sequence back."""

    copy: float = 0.0
    """To copy the block to the host tier and back."""
    recompute: float = 1.0
    """To compute the tokens of the block again."""

    @classmethod
    def on(cls, device: str, block_bytes: int, block_size: int, num_parameters: int) -> PreemptionCost:
        """Estimate the costs on a device, `cpu` or `cuda`.

        A forward pass takes about two floating-point operations for each parameter and token (Kaplan et al. 2020, 2.1).
        """
        bandwidth, compute = _RATES.get(device, _RATES["cuda"])
        return cls(2 * block_bytes / bandwidth, 2 * num_parameters * block_size / compute)

    @property
    def swaps(self) -> bool:
        """Whether a swap is cheaper than a recompute."""
        return self.copy < self.recompute


class OutputLengths:
    """Predicts the lengths of outputs from the lengths of the last `_WINDOW` outputs that finished."""

    _WINDOW = 512
    _ENOUGH = 16
    """Minimum number of finished outputs; with fewer, each output is expected to reach `max_tokens`."""
    _QUANTILE = 0.5
    """Optimistic: a prediction that is too short costs a preemption; if it is too long, blocks stay unused."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=self._WINDOW)
        self._sorted: list[int] = []

    def learn(self, length: int) -> None:
        """Record the length, in tokens, of an output that finished."""
        if len(self._recent) == self._WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        bisect.insort(self._sorted, length)

    def remaining(self, done: Ints, limits: Ints) -> Ints:
        """Return how many more tokens each output is expected to have, at most `limits - done`.

        It is the quantile of the recorded lengths above `done`, less `done`.

        Args:
            done: `[S]`, tokens that each output has.
            limits: `[S]`, `max_tokens` of each output.
        """
        most = limits - done
        if len(self._sorted) < self._ENOUGH:
            return most
        known = np.asarray(self._sorted)
        first = np.searchsorted(known, done, side="right")
        longer = len(known) - first
        at = np.minimum(first + (self._QUANTILE * longer).astype(np.int64), len(known) - 1)
        return np.where(longer > 0, np.minimum(known[at] - done, most), most)


def demand(sequences: Seq[Sequence], lengths: OutputLengths, block_size: int) -> int:
    """Return the maximum number of blocks that sequences hold at once until all have ended at their expected lengths.

    Args:
        sequences: running sequences and those that may run with them; a block that two of them share counts twice.
        lengths: predicts the lengths.
        block_size: tokens in a block.
    """
    tokens = np.fromiter((seq.num_tokens for seq in sequences), np.int64)
    prompts = np.fromiter((seq.num_prompt_tokens for seq in sequences), np.int64)
    limits = np.fromiter((seq.max_tokens for seq in sequences), np.int64)
    return peak(tokens, lengths.remaining(tokens - prompts, limits), block_size)


def peak(tokens: Ints, remaining: Ints, block_size: int) -> int:
    """Return the maximum number of blocks that sequences hold at once until all have ended.

    With the sequences sorted by their remaining tokens, most first, the maximum is reached just before one of them
    ends: when the i-th ends, it and all before it have grown by its remaining tokens, and all after it have ended (the
    admission rule of LightLLM's past-future scheduler, Gong et al. 2025).

    Args:
        tokens: `[S]`, tokens that each sequence has.
        remaining: `[S]`, tokens that each sequence still generates before it ends.
        block_size: tokens in a block.
    """
    order = np.argsort(-remaining, kind="stable")
    left, held = remaining[order], tokens[order]
    alive = np.arange(1, len(order) + 1)
    # The last block of a sequence is half full on average.
    return int((np.cumsum(held) + alive * left + alive * (block_size // 2)).max() // block_size) if len(order) else 0
