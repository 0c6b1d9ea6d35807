"""Variants of the kernels around 8-bit products."""

from __future__ import annotations

from functools import partial

import torch

from bench.triton_variants import DTYPES, Calls, meta
from bench.triton_variants.matmul import eight_bits
from kernels.triton import quantize


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes and widths."""
    f32 = torch.float32
    for dtype, short in DTYPES.items():
        for eight, name in eight_bits(capability).items():
            for cols in (576, 4096):
                x, values = meta(16, cols, dtype=dtype), meta(32, cols, dtype=eight)
                yield f"{short} {name} {cols}", partial(quantize.quantize, x, values, meta(32, dtype=f32))
        for sums, name in ((torch.int32, "int32"), (f32, "fp32")):
            args = meta(32, 4096, dtype=sums), meta(16, dtype=f32), meta(4096, dtype=f32), meta(4096, dtype=dtype)
            yield f"{short} {name}", partial(quantize.rescale, *args, dtype)
