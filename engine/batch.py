"""The arrays that a model's forward pass gets. They hold no engine state, so they could be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.attention.base import AttentionBatch


@dataclass(frozen=True)
class Batch:
    """One batch of prefill chunks and decodes: T rows, padding included; the logits of R rows are returned."""

    token_ids: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    sample_rows: Tensor
    """int64 [R]: rows whose logits to return, in any order; a row may be there several times."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return self.attention.positions


class Model(Protocol):
    """The interface of a model to the runner."""

    vocab_size: int
    """Number of columns of the logits; at least the size of the tokenizer."""

    def forward(self, batch: Batch) -> Tensor:
        """Write K and V into the pool, and return logits.

        Returns:
            `[R, vocab_size]`: the logits of `batch.sample_rows`, in fp32 or in the model's dtype.
        """
        ...
