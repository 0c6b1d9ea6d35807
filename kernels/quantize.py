"""Quantises rows to 8 bits, with a scale for each row: int8, or fp8 (e4m3, Micikevicius et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import triton as gpu

FP8 = torch.float8_e4m3fn
LIMITS = {torch.int8: 127.0, FP8: 448.0}
"""Dtype → the highest value that a row is scaled to."""
LEAST = 1e-30
"""A row without a larger element counts as zeros: the inverse of its scale could overflow."""
_CHUNK = 1 << 24
"""Elements of a weight that are quantised at a time, so that their fp32 copies take little memory."""


def quantize_rows(x: Tensor, dtype: torch.dtype, *, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise each row, so that values times scale are close to it.

    An element's error is at most half a scale in int8; in fp8 at most 1/16 of the element, or 2^-10 scales if that is
    more. A row without an element above `LEAST` becomes zeros.

    Args:
        x: `[T, cols]`.
        dtype: int8 or float8_e4m3fn.
        rows: number of rows of the results, at least T; values and scales of the additional rows are undefined.

    Returns:
        Values, `[rows, cols]` in `dtype`, and scales, fp32 `[rows]`; the scale of a row that is not finite is NaN.
    """
    count = x.shape[0]
    values = x.new_empty((count if rows is None else rows, x.shape[1]), dtype=dtype)
    scales = x.new_empty(values.shape[0], dtype=torch.float32)
    kernels = gpu.load("quantize") if x.device.type == "cuda" else None
    if kernels is not None:
        kernels.quantize(x if x.stride(1) == 1 else x.contiguous(), values, scales)
    else:
        values[:count], scales[:count] = reference(x, dtype)
    return values, scales


def reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row with operations of torch; see `quantize_rows`."""
    wide, limit = x.float(), LIMITS[dtype]
    top = wide.abs().amax(-1)
    top = torch.where(top <= LEAST, 0, top)  # NaN stays
    # Not `limit / top`: torch would multiply by the reciprocal, which rounds twice.
    inverse = torch.where(top > 0, torch.full_like(top, limit) / top, 0)
    values = (wide * inverse[:, None]).clamp_(-limit, limit).nan_to_num_(0)
    if dtype == torch.int8:
        values.round_()
    scales = torch.where(torch.isfinite(top), top / torch.full_like(top, limit), torch.nan)
    return values.to(dtype), scales


def quantize_weight(weight: Tensor, values: Tensor) -> Tensor:
    """Quantise each output of a weight, a part at a time; see `quantize_rows`.

    Args:
        weight: `[out, in]`.
        values: int8 or float8_e4m3fn, `[out, in]`: set to the quantised values.

    Returns:
        Scales, fp32 `[out]`.
    """
    scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
    step = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        values[part], scales[part] = reference(weight[part], values.dtype)
    return scales
