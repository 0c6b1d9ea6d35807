"""Variants of paged attention."""

from __future__ import annotations

from functools import partial

import torch

from bench.triton_variants import DTYPES, Calls, meta
from kernels.triton.attention import Lengths, Tile, attend, tiles

_BLOCK = 16
_OPTIONS = {"window": 4096, "softcap": 50.0}
_SHAPES = {
    torch.bfloat16: ((3, 3, 64), (4, 8, 80), (1, 8, 96), (4, 8, 128), (8, 8, 128), (2, 4, 256)),
    torch.float16: ((4, 8, 128),),
    torch.float32: ((3, 3, 64), (4, 8, 128), (2, 4, 256)),
}
"""Dtype → query heads that share a KV head, KV heads, head size."""


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes, head sizes and tiles, with a window and a soft-cap and without."""
    for dtype, shapes in _SHAPES.items():
        for shape in shapes:
            group, _, dim = shape
            short, long = tiles(dtype, dim, group, capability=capability)
            common = (dtype, dim, group) == (torch.bfloat16, 128, 4)
            for tile, splits, kind in ((short, 4, "split"), (short, 1, "whole"), (long, 1, "long")):
                if kind == "long" and long == short:
                    continue
                for options in (_OPTIONS, {}):
                    if options or common or kind != "whole":
                        name = " ".join((DTYPES[dtype], f"{dim}x{group}", kind, *options))
                        yield name, partial(_attend, dtype, shape, tile, splits, options)


def _attend(
    dtype: torch.dtype, shape: tuple[int, int, int], tile: Tile, splits: int, options: dict[str, float]
) -> None:
    group, kv_heads, dim = shape
    pool = meta(8, 2, 2, _BLOCK, kv_heads, dim, dtype=dtype)
    q = meta(8, group * kv_heads, dim, dtype=dtype)
    tables, places, contexts = (meta(*size, dtype=torch.int32) for size in ((8, 64), (8,), (8,)))
    lengths = Lengths(tables, places, contexts, meta(9, dtype=torch.int32))
    work = meta(8, 2, dtype=torch.int32)
    attend(q, pool[:, 0, 0], pool[:, 0, 1], q, lengths, work, tile, scale=0.125, splits=splits, **options)  # type: ignore[arg-type]
