"""Runs a model over hand-made batches, so that its numbers can be tested without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import Batch
from engine.models.loading import LoadedModel
from kernels.attention import get_backend
from kernels.attention.base import AttentionBatch
from kernels.linear import bucket


@dataclass(eq=False)
class Row:
    """A sequence under test."""

    tokens: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)


class Driver:
    """A model on a pool full of NaN, whose blocks are handed out in random order."""

    def __init__(
        self, loaded: LoadedModel, block_size: int = 16, num_blocks: int = 256, seed: int = 0, backend: str = "auto"
    ) -> None:
        self.block_size = block_size
        self.backend = get_backend(backend, loaded.cache_spec(block_size))
        self.device = loaded.device
        self.pool = torch.full((num_blocks, self.backend.block_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        self.backend.bind(self.pool)
        self.model = loaded.bind(self.backend)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def add(self, tokens: Sequence[int], prefix_of: Row | None = None, cached: int = 0) -> Row:
        """A new sequence; with `prefix_of`, its first `cached` tokens (whole blocks) are that sequence's blocks."""
        row = Row(list(tokens))
        if prefix_of is not None:
            row.table = prefix_of.table[: cached // self.block_size]
            row.computed = len(row.table) * self.block_size
        return row

    def step(self, work: Sequence[tuple[Row, int]], every_row: bool = False, pad: bool = True) -> list[Tensor]:
        """Compute the next `count` tokens of each sequence.

        Returns:
            A sequence's logits, `[count, vocab]` with `every_row`, else `[1, vocab]` of its last row.
        """
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        cu = [0]
        for row, count in work:
            end = row.computed + count
            while len(row.table) * self.block_size < end:
                row.table.append(self.free.pop())
            for p in range(row.computed, end):
                slots.append(row.table[p // self.block_size] * self.block_size + p % self.block_size)
                positions.append(p)
            ids += row.tokens[row.computed : end]
            row.computed = end
            cu.append(len(ids))
        extra = bucket(len(ids)) - len(ids) if pad else 0
        attention = AttentionBatch(
            torch.tensor(slots + [-1] * extra, device=self.device),
            torch.tensor(positions + [0] * extra, device=self.device),
            tuple(cu),
            tuple(row.computed for row, _ in work),
            tuple(tuple(row.table) for row, _ in work),
        )
        rows = list(range(len(ids))) if every_row else [end - 1 for end in cu[1:]]
        token_ids = torch.tensor(ids + [0] * extra, device=self.device)
        batch = Batch(token_ids, attention, torch.tensor(rows, device=self.device))
        logits = self.model.forward(batch).float()
        if not every_row:
            return list(logits.split(1))
        return list(logits.split([count for _, count in work]))

    def prefill(self, row: Row, chunks: Sequence[int] | None = None) -> Tensor:
        """Logits `[tokens, vocab]` of everything not yet computed, chunk by chunk."""
        chunks = chunks or [len(row.tokens) - row.computed]
        return torch.cat([self.step([(row, count)], every_row=True)[0] for count in chunks])

    def generate(
        self, prompt: Sequence[int], count: int, chunks: Sequence[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """Greedy ids, and the logits `[count, vocab]` that each was taken from."""
        row = self.add(prompt)
        last = self.prefill(row, chunks)[-1:]
        logits = [last]
        row.tokens.append(int(last.argmax()))
        while len(logits) < count:
            last = self.step([(row, 1)])[0]
            logits.append(last)
            row.tokens.append(int(last.argmax()))
        return row.tokens[len(prompt) :], torch.cat(logits)
