"""The arrays that a model's forward gets: no Sequence, no scheduler state, so that another rank could get the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.attention.base import AttentionBatch


@dataclass(frozen=True)
class Batch:
    """One mixed varlen batch: T rows (padding included), R of them sample."""

    token_ids: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    sample_rows: Tensor
    """int64 [R]: the rows whose logits are wanted, in any order; one may be wanted more than once."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return self.attention.positions


class Model(Protocol):
    """What the runner needs of a model."""

    vocab_size: int
    """Columns of the logits; at least the tokenizer's size."""

    def forward(self, batch: Batch) -> Tensor:
        """Write KV, and return the logits of `batch.sample_rows`, `[R, vocab_size]` in fp32 or in the model's dtype."""
        ...
