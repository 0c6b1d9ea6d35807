"""Variants of the normalised and rotated store of K and V."""

from __future__ import annotations

from functools import partial

import torch

from bench.triton_variants import DTYPES, Calls, meta
from kernels.triton.write import write_rotated


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes and head sizes, with norms and without."""
    for dtype, short in DTYPES.items():
        for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 80), (8, 8, 96), (32, 8, 128), (8, 4, 256)):
            if dtype == torch.bfloat16 or dim == 128:
                for norm in (False, True):
                    name = f"{short} {heads}/{kv_heads}x{dim}{' norm' if norm else ''}"
                    yield name, partial(_write, dtype, heads, kv_heads, dim, norm)


def _write(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    pool, qkv = meta(8, 2, 2, 16, kv_heads, dim, dtype=dtype), meta(4, heads + 2 * kv_heads, dim, dtype=dtype)
    angles, weight = meta(4, dim // 2, dtype=torch.float32), meta(dim, dtype=dtype)
    norms = (weight, weight, 1e-6) if norm else None
    slots = meta(4, dtype=torch.int64)
    write_rotated(qkv, pool[:, 0, 0], pool[:, 0, 1], slots, norms=norms, rotation=(angles, angles))
