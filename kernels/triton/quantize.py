"""Quantises the rows of a matrix to 8 bits in Triton, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_WIDTH = 4096
"""Columns that a program reads at a time."""


@triton.jit
def _round_e4m3(x):
    """Round fp32 to the values of e4m3, ties to even; the cast that follows is exact.

    Triton's interpreter (3.9) loses the carry of a cast that rounds up to a power of two.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 of the 23 bits of the mantissa are kept
    small = (x + 24576.0) - 24576.0  # multiples of 2^-9: 1.5 * 2^14 has a unit of 2^-9 in fp32
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _round_integer(x):
    """Round fp32 to integers, ties to even, for sizes up to 2^22: 1.5 * 2^23 has a unit of 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize(x, values, scales, x_stride, cols, WIDTH: tl.constexpr, FP8: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    LIMIT: tl.constexpr = 448.0 if FP8 else 127.0
    top = 0.0
    broken = 0
    for first in range(0, cols, WIDTH):
        at = first + tl.arange(0, WIDTH)
        size = tl.abs(tl.load(x + row * x_stride + at, mask=at < cols, other=0.0).to(tl.float32))
        broken += tl.sum(tl.where(size < float("inf"), 0, 1), 0)
        top = tl.maximum(top, tl.max(tl.where(size < float("inf"), size, 0.0), 0))
    top = tl.where(top > 1e-30, top, 0.0)  # `kernels.quantize.LEAST`
    inverse = tl.where(top > 0, tl.div_rn(LIMIT, tl.where(top > 0, top, 1.0)), 0.0)
    for first in range(0, cols, WIDTH):
        at = first + tl.arange(0, WIDTH)
        wide = tl.load(x + row * x_stride + at, mask=at < cols, other=0.0).to(tl.float32)
        scaled = tl.where(tl.abs(wide) < float("inf"), wide * inverse, 0.0)
        scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
        scaled = _round_e4m3(scaled) if FP8 else _round_integer(scaled)
        tl.store(values + row * cols + at, scaled.to(values.dtype.element_ty), mask=at < cols)
    tl.store(scales + row, tl.where(broken > 0, float("nan"), tl.div_rn(top, LIMIT)))


@triton.jit
def _rescale(sums, x_scales, scales, bias, out, sums_stride, cols, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Program (row, range of columns)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = col < cols
    total = tl.load(sums + row * sums_stride + col, mask=mask, other=0.0).to(tl.float32)
    total *= tl.load(scales + col, mask=mask, other=0.0) * tl.load(x_scales + row)
    if BIAS:
        total += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * cols + col, total.to(out.dtype.element_ty), mask=mask)


def quantize(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantise each row of `x` to `values` times a scale.

    Args:
        x: `[rows, cols]`; the elements of a row are adjacent.
        values: int8 or float8_e4m3fn, contiguous, at least `[rows, cols]`: set to values from -127 to 127, or from
            -448 to 448; further rows are left alone.
        scales: fp32, at least `[rows]`: set to the scale of each row, NaN for a row that is not finite.
    """
    rows, cols = x.shape
    width = min(_WIDTH, triton.next_power_of_2(cols))
    launch(
        _quantize, (rows,),
        x, values, scales, x.stride(0), cols,
        WIDTH=width, FP8=values.dtype == torch.float8_e4m3fn,
        num_warps=max(1, width // 512), enable_fp_fusion=False,
    )  # fmt: skip


def rescale(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `sums * x_scales[:, None] * scales + bias`, `[rows, out]` in `dtype`.

    Args:
        sums: int32 or fp32, at least `[rows, out]`; the elements of a row are adjacent.
        x_scales: fp32 `[rows]`.
        scales: fp32 `[out]`.
        bias: `[out]`.
        dtype: of the result.
    """
    rows, cols = x_scales.shape[0], scales.shape[0]
    out = torch.empty((rows, cols), dtype=dtype, device=sums.device)
    width = min(1024, triton.next_power_of_2(cols))
    launch(
        _rescale, (rows, triton.cdiv(cols, width)),
        sums, x_scales, scales, out if bias is None else bias, out, sums.stride(0), cols,
        WIDTH=width, BIAS=bias is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
