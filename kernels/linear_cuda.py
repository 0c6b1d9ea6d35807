"""Matrix products on a GPU: in the weight's dtype, or of 8-bit factors (W8A8) with a scale for each row and output.

int8 sums are integers and exact, so that a row has the same bits for every number of rows. fp8 (e4m3) is cuBLAS' or
CUTLASS' product of `torch._scaled_mm`. In a batch-invariant model, our Triton kernel computes all but int8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ops_reference as reference
from kernels import triton as gpu
from kernels.quantize import FP8, quantize_rows, quantize_weight

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for fp8 products."""
INT8_CAPABILITY = (7, 5)
"""Minimum compute capability for int8 products."""
_ALIGNED = 16
"""Inputs and outputs of 8-bit factors are multiples of this; outputs are padded."""
_MIN_ROWS = 32
"""Minimum number of rows of 8-bit factors: `torch._int_mm` needs more than 16, and is wrong for a single row;
for fewer than 17, cuBLAS has no fast fp8 product."""
_MAX_INT8_INPUTS = 1 << 16
"""Sums of more products may overflow 32 bits."""


def can_quantize(dtype: torch.dtype, inputs: int) -> bool:
    """Return whether a weight with this number of inputs can be quantised to `dtype`, int8 or e4m3."""
    return inputs % _ALIGNED == 0 and (dtype == FP8 or inputs <= _MAX_INT8_INPUTS)


class CudaProduct:
    """`x @ weight.T + bias` on a GPU.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
        quantize: int8 or e4m3; None: multiply in the weight's dtype. Without effect if `can_quantize` is false.
        batch_invariant: give a row the same bits for every number of rows, at a price.
    """

    __slots__ = ("_batch_invariant", "_bias", "_scales", "_weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, quantize: torch.dtype | None, *, batch_invariant: bool
    ) -> None:
        self._weight, self._bias, self._batch_invariant = weight, bias, batch_invariant
        self._scales: Tensor | None = None
        if quantize is not None and can_quantize(quantize, weight.shape[1]):
            self._weight, self._scales = quantized_weight(weight, quantize)
            if quantize == FP8:
                _scales_rows(weight.device, weight.dtype)  # now, since it waits for the device

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self._weight, self._scales, self._bias, batch_invariant=self._batch_invariant)


def quantized_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise a weight `[out, in]` for `multiply`: values, with outputs padded, and scales, fp32 `[out]`."""
    outputs, inputs = weight.shape
    values = weight.new_zeros((-(-outputs // _ALIGNED) * _ALIGNED, inputs), dtype=dtype)
    scales = quantize_weight(weight, values[:outputs])
    return values, scales


def multiply(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """Return `x @ (weight * scales).T + bias`, `[rows, out]` in the dtype of x, without waiting for the device.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]` in the dtype of x; or in int8 or e4m3, its outputs padded.
        scales: fp32 `[out]` of an 8-bit weight; otherwise None.
        bias: `[out]`.
        batch_invariant: give a row the same bits for every number of rows.
    """
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0] if scales is None else scales.shape[0]))
    exact = batch_invariant and weight.dtype != torch.int8
    triton = gpu.load("matmul") if exact else None
    if triton is not None:
        return _in_order(triton, x, weight, scales, bias)
    if scales is None:
        return F.linear(x, weight, bias)
    rows = max(_MIN_ROWS, -(-x.shape[0] // _ALIGNED) * _ALIGNED)
    values, x_scales = quantize_rows(x, weight.dtype, rows=rows)
    if weight.dtype == torch.int8:
        return _rescaled(torch._int_mm(values, weight.t()), x_scales, scales, bias, x)
    if scales.shape[0] == weight.shape[0] and _scales_rows(x.device, x.dtype):
        return _scaled(values, x_scales, weight, scales, bias, x.dtype)[: x.shape[0]]
    one = x_scales.new_ones(())
    sums = torch._scaled_mm(values, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return _rescaled(sums, x_scales, scales, bias, x)


def _in_order(triton: Any, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply by the kernel whose sums have a fixed order; arguments as of `multiply`."""
    if scales is None:
        result: Tensor = triton.matmul(x, weight, bias)
    else:
        values, x_scales = quantize_rows(x, weight.dtype)
        result = triton.matmul(values, weight[: scales.shape[0]], bias, scales=(x_scales, scales), dtype=x.dtype)
    return result


def _rescaled(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return `sums * x_scales[:, None] * scales + bias` for the rows and in the dtype of x, without the padding."""
    x_scales = x_scales[: x.shape[0]]
    triton = gpu.load("quantize")
    rescale = reference.rescale if triton is None else triton.rescale
    result: Tensor = rescale(sums, x_scales, scales, bias, x.dtype)
    return result


def _scaled(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply fp8 factors with a scale for each row and each output."""
    return torch._scaled_mm(
        values, weight.t(), scale_a=x_scales[:, None], scale_b=scales[None], bias=bias, out_dtype=dtype
    )


@cache
def _scales_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Check whether `torch._scaled_mm` scales rows on this device with results in `dtype`, and correctly.

    It depends on capability, dtype and version of torch, where CUTLASS' kernels came one capability after the other,
    at first for bf16 alone. Scales for whole tensors exist from capability 8.9 on; `multiply` then takes 1, and
    multiplies fp32 sums by the scales afterwards: a sum of 2^16 products of at most 448^2 is below 2^34.
    """
    x = torch.arange(48 * 32, dtype=torch.float32).view(48, 32).remainder(7).sub(3)
    w = torch.arange(64 * 32, dtype=torch.float32).view(64, 32).remainder(5).sub(2)
    x_scales, scales = torch.arange(1.0, 49.0), torch.arange(1.0, 65.0)
    bias = torch.arange(64.0)
    want = (x @ w.t()) * x_scales[:, None] * scales + bias
    try:
        got = _scaled(
            x.to(FP8).to(device), x_scales.to(device), w.to(FP8).to(device), scales.to(device),
            bias.to(dtype).to(device), dtype,
        ).cpu()  # fmt: skip
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return torch.allclose(got.float(), want, rtol=2 * torch.finfo(dtype).eps)
