"""Variants of the mixture of experts."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from bench.triton_variants import DTYPES, Calls, meta
from bench.triton_variants.matmul import eight_bits
from kernels.triton import moe
from kernels.triton.matmul import Tile

_PER_ROW = 8
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_KINDS = ((2048, True, "gather"), (2048, False, "scatter"), (2064, False, "masked"))
"""Inputs of a product, whether it reads rows or sorted pairs, and a name."""


def calls(capability: tuple[int, int]) -> Calls:
    """List numbers of experts; dtypes, tiles and directions of their products."""
    for experts in (8, 128, 512):
        scores = meta(16, experts, dtype=torch.bfloat16)
        yield f"{experts}", partial(moe.route, scores, min(_PER_ROW, experts - 1), normalise=True)
        chosen = meta(16, _PER_ROW, dtype=torch.int32)
        yield f"{experts}", partial(moe.plan, chosen, experts, Tile(16, 64, 64, 4, 4))
    for dtype, short in DTYPES.items():
        results = meta(16 * _PER_ROW, 2048, dtype=dtype)
        yield short, partial(moe.combine, results, meta(16, _PER_ROW, dtype=torch.float32))
    for dtype, short in (_DTYPES | eight_bits(capability)).items():
        for pairs, number in ((1024, "few"), (4096, "some"), (65536, "many")):
            for invariant in (False, True):
                for inputs, gather, kind in _KINDS:
                    options = {"invariant": invariant, "gather": gather}
                    name = f"{short} {number}{' invariant' * invariant} {kind}"
                    yield name, partial(_grouped, capability, dtype, pairs, inputs, **options)


def _grouped(
    capability: tuple[int, int], dtype: torch.dtype, pairs: int, inputs: int, *, invariant: bool, gather: bool
) -> None:
    experts, outputs = 128, 1536
    device = torch.device("meta")
    with mock.patch.object(moe, "capability", return_value=capability):
        tile = moe.tile_of(dtype, pairs, experts, inputs, device, invariant=invariant)
    order = meta(pairs, dtype=torch.int32)
    plan = moe.Plan(order, meta(pairs, 3, dtype=torch.int32), _PER_ROW, tile)
    x = meta(pairs // _PER_ROW if gather else pairs, inputs, dtype=dtype)
    scales = None
    if dtype.itemsize == 1:
        scales = meta(x.shape[0], dtype=torch.float32), meta(experts, outputs, dtype=torch.float32)
    weight = meta(experts, outputs, inputs, dtype=dtype)
    result = torch.bfloat16 if dtype.itemsize == 1 else dtype
    moe.grouped(x, weight, plan, gather=gather, scales=scales, dtype=result)
