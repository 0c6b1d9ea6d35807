"""Variants of the sampler."""

from __future__ import annotations

from functools import partial

import torch

from bench.triton_variants import DTYPES, Calls, meta
from kernels.sampling import Choices
from kernels.triton import sampler

_ROWS = 4
_SIZES = {torch.bfloat16: ((128256, 128256), (151669, 151936)), torch.float32: ((262144, 262144),)}
"""Dtype → number of ids, and width of the logits."""


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes and vocabularies, with edits of the logits and without."""
    for dtype, short in DTYPES.items():
        for num_ids, width in _SIZES.get(dtype, ((128256, 128256),)):
            logits, name = meta(_ROWS, width, dtype=dtype), f"{short} {num_ids}"
            yield name, partial(sampler.highest, logits, num_ids)
            yield name, partial(_sample, logits, num_ids, edited=False)
            yield f"{name} edited", partial(_sample, logits, num_ids, edited=True)
            yield name, partial(_logprobs, logits, num_ids)


def _sample(logits: torch.Tensor, num_ids: int, edited: bool) -> None:
    def ints(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.int32)

    def floats(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.float32)

    rows, entries = (_ROWS,), (8,)
    choices = Choices(
        temperature=floats(*rows), top_p=floats(*rows), log_min_p=floats(*rows), repetition=floats(*rows),
        frequency=floats(*rows), presence=floats(*rows), top_k=ints(*rows), flags=ints(*rows),
        noise=meta(*rows, dtype=torch.float64), slots=ints(*rows), masks=ints(*rows), places=ints(*rows),
        bias_starts=ints(*rows), bias_rows=ints(*entries), bias_ids=ints(*entries), bias=floats(*entries),
        ban_starts=ints(*rows), ban_rows=ints(*entries), ban_ids=ints(*entries), ban_after=ints(*entries),
        bits=ints(_ROWS, -(-num_ids // 32)), drawn=True, edited=edited,
    )  # fmt: skip
    width = -(-num_ids // 16) * 16
    sampler.sample(logits, choices, num_ids, ints(_ROWS, width), ints(*rows), floats(_ROWS, width))


def _logprobs(logits: torch.Tensor, num_ids: int) -> None:
    rows = meta(_ROWS, dtype=torch.int32)
    sampler.logprobs(logits, rows, rows, rows, num_ids, 20)
