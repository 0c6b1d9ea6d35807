"""The scheduler's judgement, apart from its mechanics: who goes first, who gives way and how, who may come in."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.scheduling.block_pool import BlockPool
from engine.sequence import Sequence

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def victim(running: Seq[Sequence], device: BlockPool) -> Sequence:
    """Who loses its blocks: of the lowest lane, who loses the fewest computed tokens for each block that this frees.

    `running` is in the order of `Sequence.rank` and not empty; of equals the last gives way.
    """

    def cost(seq: Sequence) -> tuple[float, ...]:
        freed = sum(1 for block in seq.block_table if device.refs[block] == 1)
        return (-seq.request.priority, seq.num_computed_tokens / freed if freed else np.inf)

    return min(reversed(running), key=cost)


_RATES = {"cpu": (4e9, 2e11), "cuda": (1e10, 1e14)}
"""Bytes a second to and from the host tier, and floating-point operations a second of a prefill: orders of magnitude
of a small server CPU and of a current GPU on PCIe. Fixed, not measured at the start, so that decisions repeat."""


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What one block costs, in seconds, on the device at hand."""

    copy: float = 0.0
    """To copy it out and in again."""
    recompute: float = 1.0
    """To compute its tokens again."""

    @classmethod
    def on(cls, device: str, block_bytes: int, block_size: int, num_parameters: int) -> PreemptionCost:
        """For a model of that many parameters: about two operations a parameter and token."""
        bandwidth, compute = _RATES.get(device, _RATES["cuda"])
        return cls(2 * block_bytes / bandwidth, 2 * num_parameters * block_size / compute)

    @property
    def swaps(self) -> bool:
        return self.copy < self.recompute


class OutputLengths:
    """How long outputs tend to be, learned from those that finished."""

    _WINDOW = 512
    _ENOUGH = 16
    """Observations before they are trusted; until then everybody is expected to use all of `max_tokens`."""
    _QUANTILE = 0.5
    """Optimistic on purpose: being wrong costs a few copies, being careful leaves room unused."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=self._WINDOW)
        self._sorted: list[int] = []

    def learn(self, length: int) -> None:
        """An output ended by itself after `length` tokens."""
        if len(self._recent) == self._WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        bisect.insort(self._sorted, length)

    def remaining(self, done: Ints, limits: Ints) -> Ints:
        """How many more tokens outputs of `done` tokens are expected to take, each at most `limits - done`.

        The quantile of those recent outputs that were longer than `done`.
        """
        most = limits - done
        if len(self._sorted) < self._ENOUGH:
            return most
        known = np.asarray(self._sorted)
        first = np.searchsorted(known, done, side="right")
        longer = len(known) - first
        at = np.minimum(first + (self._QUANTILE * longer).astype(np.int64), len(known) - 1)
        return np.where(longer > 0, np.minimum(known[at] - done, most), most)


def peak(tokens: Ints, remaining: Ints, block_size: int) -> int:
    """The most blocks that sequences of `tokens` tokens hold at once, if each takes `remaining` more and then leaves.

    Sorted by what remains, longest first, the most is reached just before one of them leaves: when the i-th does, it
    and all before it have grown by its remainder, and all after it are gone (the admission rule of LightLLM).
    """
    order = np.argsort(-remaining, kind="stable")
    left, held = remaining[order], tokens[order]
    alive = np.arange(1, len(order) + 1)
    # Each holds a partial block: half of one on average.
    return int((np.cumsum(held) + alive * left + alive * (block_size // 2)).max() // block_size) if len(order) else 0
