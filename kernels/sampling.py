"""Samples ids from logits on a device without waiting for it: the operations of `engine.sampling.device`.

On a GPU they are Triton kernels (`kernels.triton.sampler`), elsewhere plain torch (`kernels.sampling_reference`). Both
compute the same ids from equal weights: a weight, `exp((logit - highest) / temperature)` in fp32, is cut to a multiple
of 2^-44, so sums of weights are sums of integers, which are exact in every order. The thresholds of top_k and top_p are
found by bisection over the bits of the floats, without a sort.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels import sampling_reference as reference
from kernels import triton as gpu
from kernels.sampling_reference import DRAWN, SPARES, Choices

__all__ = ["DRAWN", "SPARES", "Choices", "highest", "logprobs", "sample"]

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Operations(Protocol):
    """The functions that `kernels.sampling_reference` and `kernels.triton.sampler` both have."""

    def highest(self, logits: Tensor, num_ids: int) -> Tensor: ...
    def sample(
        self, logits: Tensor, choices: Choices, num_ids: int, counts: Tensor, last: Tensor | None, scratch: Tensor
    ) -> Tensor: ...
    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, ids: Tensor, num_ids: int, top: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def highest(logits: Tensor, num_ids: int) -> Tensor:
    """Return the first id of each row's highest logit, int32 `[R]`; -1 for a row that is not finite.

    Args:
        logits: `[R, vocab]`.
        num_ids: number of columns that belong to ids.
    """
    return _operations(logits).highest(logits, num_ids)


def sample(
    logits: Tensor, choices: Choices, num_ids: int, counts: Tensor, last: Tensor | None, scratch: Tensor
) -> Tensor:
    """Sample one id for each row, and count it for the penalties; int32 `[R]`, -1 for a row that is not finite.

    Args:
        logits: `[R, vocab]`; not changed.
        choices: parameters of the R rows.
        num_ids: number of columns that belong to ids.
        counts: int32 `[slots, num_ids or more]`: twice the number of occurrences in the output, plus 1 if the id is in
            the prompt.
        last: int32: the ids that `Choices.places` refers to; None if no id is pending.
        scratch: fp32, of the width of `counts`, `[R or more, …]`; overwritten.
    """
    return _operations(logits).sample(logits, choices, num_ids, counts, last, scratch)


def logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, ids: Tensor, num_ids: int, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of W ids, and of the most likely ids in their rows.

    Args:
        logits: `[R, vocab]`.
        rows: int32 `[W]`: rows of `logits`.
        tokens: int32 `[W]`: the ids; -1: the sampled id of the row.
        ids: int32: the sampled ids of the first rows of `logits`.
        num_ids: number of columns that belong to ids.
        top: number of most likely ids, at most `num_ids`; of equal ones those with the lowest ids.

    Returns:
        Log-probabilities of the W ids, fp32 `[W]`; the most likely ids, int32 `[W, top]`, in any order, and their
            log-probabilities, fp32 `[W, top]`.
    """
    return _operations(logits).logprobs(logits, rows, tokens, ids, num_ids, top)


def _operations(logits: Tensor) -> _Operations:
    """Return the module for these logits: Triton on a GPU, otherwise the reference."""
    if logits.device.type != "cuda" or logits.dtype not in _GPU_DTYPES:
        return reference
    return gpu.load("sampler") or reference
