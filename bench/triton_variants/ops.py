"""Variants of the small operations."""

from __future__ import annotations

from functools import partial

from bench.triton_variants import DTYPES, Calls, meta
from kernels.triton import ops


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes and widths."""
    for dtype, short in DTYPES.items():
        for cols in (576, 4096, 8192, 16384):
            x, weight = meta(4, cols, dtype=dtype), meta(cols, dtype=dtype)
            yield f"{short} add_rms_norm {cols}", partial(ops.add_rms_norm, x, x, weight, 1e-6)
        yield f"{short} rms_norm {cols}", partial(ops.rms_norm, x, weight, 1e-6)
        x = meta(4, 2 * 14336, dtype=dtype)
        yield f"{short} silu_mul", partial(ops.silu_mul, x)
        yield f"{short} gelu_mul", partial(ops.gelu_mul, x)
        yield f"{short} softcap", partial(ops.softcap, x, 30.0)
