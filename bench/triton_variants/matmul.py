"""Variants of the matrix product of fixed order."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from bench.triton_variants import DTYPES, Calls, meta
from kernels.triton import matmul

FP8 = torch.float8_e4m3fn
_INPUTS = {4096: "", 4112: " masked", 4104: " unaligned"}
"""Inputs of a product: a multiple of what a tile takes at a time, of 16, and of 8 alone."""


def eight_bits(capability: tuple[int, int]) -> dict[torch.dtype, str]:
    """Return the 8-bit dtypes that a GPU multiplies, and their names."""
    return {torch.int8: "int8", **({FP8: "fp8"} if capability >= (8, 9) else {})}


def calls(capability: tuple[int, int]) -> Calls:
    """List dtypes, tiles for few and for many rows, and numbers of inputs."""
    kinds = DTYPES | eight_bits(capability)
    for dtype, short in kinds.items():
        for rows, kind in ((4, "few"), (2048, "many")):
            for inputs, suffix in _INPUTS.items():
                if suffix != " unaligned" or (kind == "few" and dtype.itemsize > 1):  # 8 bits are aligned
                    yield f"{short} {kind}{suffix}", partial(_matmul, capability, dtype, rows, inputs)


def _matmul(capability: tuple[int, int], dtype: torch.dtype, rows: int, inputs: int) -> None:
    x, weight = meta(rows, inputs, dtype=dtype), meta(4096, inputs, dtype=dtype)
    scales = None
    if dtype.itemsize == 1:
        scales = meta(rows, dtype=torch.float32), meta(4096, dtype=torch.float32)
    result = torch.bfloat16 if dtype.itemsize == 1 else dtype
    with mock.patch.object(matmul, "capability", return_value=capability):
        matmul.matmul(x, weight, meta(4096, dtype=result), scales=scales, dtype=result)
