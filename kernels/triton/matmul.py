"""Matrix products in Triton whose sums have a fixed order: a row's bits depend on the row alone.

Each output is one sum over the inputs from the first to the last, never split between programs. cuBLAS chooses its
kernel, and with it the order of a sum, by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize import FP8
from kernels.triton.launch import launch


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a product that one program computes, and how."""

    rows: int
    cols: int
    inner: int
    """Inputs that are multiplied at a time."""
    warps: int
    stages: int


INNER = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64, torch.int8: 128, FP8: 128}
"""Dtype of the factors → inputs that are multiplied at a time; the same in all tiles."""


class Choice:
    """Settings of the choice of tiles, for the whole process."""

    varies = True
    """Whether a product with few rows may have another tile than a product with many rows."""


@triton.jit
def accumulate(
    x,
    weight,
    is_row,
    is_col,
    inner,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return the products of rows and outputs, `[ROWS, COLS]`: int32 if INTEGERS, else fp32.

    x: pointers to the first input of each row; is_row: bool, which of them are to be read.
    weight: pointers to the first weight of each output; is_col: bool, which of them are to be read.
    EVEN: `inner` is a multiple of INNER.
    EXACT: fp8 products whose sum may have less than fp32's precision, on GPUs of capability 9.0; None: fp32 always.
    """
    at = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLS), tl.int32 if INTEGERS else tl.float32)
    for start in range(0, inner, INNER):
        if EVEN:
            a = tl.load(x[:, None] + at[None, :], mask=is_row[:, None], other=0.0)
            b = tl.load(weight[None, :] + at[:, None], mask=is_col[None, :], other=0.0)
        else:
            left = at < inner - start
            a = tl.load(x[:, None] + at[None, :], mask=is_row[:, None] & left[None, :], other=0.0)
            b = tl.load(weight[None, :] + at[:, None], mask=is_col[None, :] & left[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee", max_num_imprecise_acc=EXACT, out_dtype=total.dtype)
        x += INNER
        weight += INNER
    return total


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x,
    weight,
    bias,
    out,
    x_scales,
    scales,
    rows,
    cols,
    inner,
    x_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (tile of rows, tile of outputs)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_row, is_col = row < rows, col < cols
    x_at, weight_at = x + row.to(tl.int64) * x_stride, weight + col.to(tl.int64) * inner
    total = accumulate(x_at, weight_at, is_row, is_col, inner, ROWS, COLS, INNER, EVEN, INTEGERS, EXACT)
    total = total.to(tl.float32)
    if SCALED:
        of_row = tl.load(x_scales + row, mask=is_row, other=0.0)
        of_col = tl.load(scales + col, mask=is_col, other=0.0)
        total *= of_row[:, None] * of_col[None, :]
    if BIAS:
        total += tl.load(bias + col, mask=is_col, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, `[rows, out]`; a row's bits depend on nothing but the row.

    Args:
        x: `[rows, in]` in fp32, fp16, bf16, int8 or e4m3; the elements of a row are adjacent.
        weight: `[out, in]` in the same dtype, contiguous.
        bias: `[out]`.
        scales: factors of the rows, fp32 `[rows]`, and of the outputs, fp32 `[out]`, for 8-bit factors.
        dtype: of the result; None: that of x.
    """
    rows, inner = x.shape
    cols = weight.shape[0]
    dtype = dtype or x.dtype
    out = torch.empty((rows, cols), dtype=dtype, device=x.device)
    tile = invariant_tile(x.dtype, rows, inner, capability(x.device))
    x_scales, w_scales = scales or (out, out)
    x_stride = inner if x.is_contiguous() else x.stride(0)  # torch may say anything of the stride of a single row
    if rows:
        launch(
            _matmul, (triton.cdiv(rows, tile.rows), triton.cdiv(cols, tile.cols)),
            x, weight, out if bias is None else bias, out, x_scales, w_scales, rows, cols, inner, x_stride,
            **constants(tile, x.dtype, inner), BIAS=bias is not None, SCALED=scales is not None,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def constants(tile: Tile, dtype: torch.dtype, inner: int) -> dict[str, object]:
    """Return the arguments of `accumulate` for factors in `dtype` and sums over `inner` inputs."""
    return {
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "INNER": tile.inner,
        "EVEN": inner % tile.inner == 0,
        "INTEGERS": dtype == torch.int8,
        "EXACT": tile.inner if dtype == FP8 else None,
    }


def invariant_tile(dtype: torch.dtype, rows: int, inner: int, capability: tuple[int, int]) -> Tile:
    """Return the tile for a product of `rows` rows over `inner` inputs.

    All tiles of a GPU give a row the same bits: before capability 9.0 the instruction has 16 rows whatever the tile;
    from 9.0 on, tiles of 64 rows have an instruction that smaller tiles do not have, so that none is smaller. In fp32
    a sum is a chain of fused products. `Choice.varies` is for GPUs where a test at start finds different bits.
    """
    least = 16 if capability < (9, 0) else 64
    if dtype == torch.float32:
        small, large = Tile(16, 32, INNER[dtype], 4, 3), Tile(64, 64, INNER[dtype], 8, 3)
    else:
        small, large = Tile(least, 32, INNER[dtype], 4, 5), Tile(64, wide(dtype, capability), INNER[dtype], 4, 3)
    if inner % 16:  # rows that are not aligned to 16 bytes pass through registers, of which a large tile has too few
        return small
    return small if Choice.varies and rows <= small.rows else large


def wide(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the outputs of a large tile; products of 8-bit factors take more registers before capability 9.0."""
    return 64 if dtype.itemsize == 1 and capability < (9, 0) else 128


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; that of an H100 for the CPU, on which kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
