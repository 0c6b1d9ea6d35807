"""Linear layers that give a row the same bits in every batch.

On CPUs with bf16 dot products, our own kernel (`csrc/gemm.h`) computes any number of rows. On other CPUs, oneDNN does,
with prepacked weights; it gives a row the same bits for every number of rows from 2 on (measured in fp32 and bf16).
Rows for oneDNN are padded to buckets, since oneDNN builds a primitive for each number of rows. On a GPU, see
`kernels.linear_cuda`.

int8 is W8A8: a scale for each output (weights) and for each row (inputs), both symmetric. Sums are integers and exact,
so every implementation gives the same bits (LLM.int8(), Dettmers et al. 2022, without the outliers).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native
from kernels.linear_cuda import CudaProduct
from kernels.ops import quantize, silu_mul

_FALLBACK_ROWS = 16
"""Minimum number of rows for `F.linear` on the CPU, which uses another kernel for fewer rows."""
_PANEL = 32
"""Number of outputs in a panel of weights; `PANEL` in csrc/native.h."""
_TEST_ROWS = (1, 2, 3, 7, 16, 33, 64)
"""Numbers of rows with which `rows_are_equal` calls a function."""
_MORE_ROWS = (65, 130, 200)
"""Further numbers of rows on a GPU, where they may choose a larger tile."""
_INT8_INPUTS = range(2, (1 << 16) + 1)
"""Numbers of inputs that int8 supports: `torch._int_mm` is wrong for a single input, and sums of more than 2^16
products may overflow 32 bits."""


def bucket(rows: int) -> int:
    """Return the number of rows to which oneDNN's input is padded: 2, 4, 8, 16, then multiples of 16."""
    if rows <= 16:
        return max(2, 1 << (rows - 1).bit_length()) if rows > 1 else 2
    return -(-rows // 16) * 16


def row_bucket(dtype: torch.dtype) -> Callable[[int], int]:
    """Return the function that rounds up a number of rows for a model on the CPU; our own kernel needs no rounding."""
    return (lambda rows: rows) if _native(dtype) is not None else bucket


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Return `x` (`[n, ...]`) with rows of zeros appended up to `rows`."""
    if x.shape[0] == rows:
        return x
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Check whether torch's private oneDNN operators exist and compute correctly in `dtype`."""
    weight = torch.arange(32 * 16, dtype=torch.float32).view(32, 16).remainder(7).sub(3).to(dtype)
    x = torch.arange(4 * 16, dtype=torch.float32).view(4, 16).remainder(5).sub(2).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(out.float(), x.float() @ weight.float().t())


@dataclass(frozen=True, slots=True)
class Precision:
    """How the products of a model are computed."""

    quantize: torch.dtype | None = None
    """Multiply 8-bit weights and inputs of this dtype: int8, or e4m3 on a GPU; without effect on weights whose number
    of inputs it does not support. None: multiply in the weight's dtype."""
    batch_invariant: bool = False
    """Give a row the same bits for every number of rows on a GPU too, at a price; products on the CPU always do."""


PLAIN = Precision()
"""Products in the weight's dtype."""


class _Product(Protocol):
    """An implementation of `x @ weight.T + bias`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Linear:
    """`y = x @ weight.T + bias`, for `x` of shape `[rows, in]`. Keeps a packed copy of the weight only.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
        gated: the first half of the outputs are gates, the second half the gated values: `y = silu(gate) * up`.
        precision: how to multiply.
    """

    __slots__ = ("_gate", "_product", "device", "dtype", "in_features", "out_features")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        precision: Precision = PLAIN,
    ) -> None:
        rows, self.in_features = weight.shape
        self.out_features = rows // 2 if gated else rows
        self.dtype, self.device = weight.dtype, weight.device
        int8 = precision.quantize == torch.int8 and self.in_features in _INT8_INPUTS
        packs = weight.device.type == "cpu" and self.in_features % (4 if int8 else 2) == 0
        native_gate = not gated or self.out_features % _PANEL == 0
        self._gate = gated
        self._product: _Product
        if weight.device.type != "cpu":
            self._product = CudaProduct(weight, bias, precision.quantize, batch_invariant=precision.batch_invariant)
        elif packs and native_gate and _native(weight.dtype) is not None:
            self._gate = False
            self._product = _Packed(weight, bias, gated, int8)
        elif int8:
            self._product = _Int8(weight, bias)
        else:
            self._product = (_OneDnn if can_prepack(weight.dtype) else _Plain)(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x)
        return silu_mul(y.contiguous()) if self._gate else y

    @property
    def invariant(self) -> bool:
        """Whether a row has the same bits for every number of rows, as a test run shows."""
        return rows_are_equal(self, self.in_features, self.dtype, self.device)


def rows_are_equal(function: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Check that a function of rows `[T, inputs]` gives a row the same bits for every number of rows."""
    numbers = _TEST_ROWS if device.type == "cpu" else _TEST_ROWS + _MORE_ROWS
    x = torch.randn(numbers[-1], inputs, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    whole = function(x)
    return all(torch.equal(function(x[:rows]), whole[:rows]) for rows in numbers[:-1])


class _OneDnn:
    """The product of oneDNN with a prepacked weight; rows are padded to buckets."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = pad_rows(x, bucket(rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out[:rows]


class _Plain:
    """`F.linear` on the CPU, with at least `_FALLBACK_ROWS` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return F.linear(pad_rows(x, max(rows, _FALLBACK_ROWS)), self._weight, self._bias)[:rows]


class _Int8:
    """W8A8 with operations of torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales = _quantized(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = quantize(x)
        sums = torch._int_mm(values.to(torch.int16).sub_(128).to(torch.int8), self._weight.t())
        y = sums.float() * (self._scales * scales[:, None])
        return (y if self._bias is None else y + self._bias).to(x.dtype)


class _Packed:
    """Our own kernel: bf16 or int8 weights in panels, any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool, int8: bool) -> None:
        outputs, self._inputs = weight.shape
        self._outputs = outputs // 2 if gated else outputs
        self._gated = gated
        if gated:
            bias = None if bias is None else _interleave(bias)
        else:
            weight = _padded(weight)
        self._int8 = int8
        self._scales = self._offsets = None
        if int8:
            weight, scales = _quantized(weight)
            offsets = weight.sum(1, dtype=torch.int32) * 128
            self._scales, self._offsets = (_interleave(x) if gated else x for x in (scales, offsets))
        self._weight = _panels(weight, gated)
        self._steps = self._weight.shape[1]
        self._bias = None if bias is None else _padded(bias.float())
        self._library: Any = native.library()
        self._pointers = tuple(
            None if x is None else x.data_ptr() for x in (self._weight, self._bias, self._scales, self._offsets)
        )

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.bfloat16)
        x_scales = None
        if self._int8:
            x, x_scales = quantize(x)
        weight, bias, scales, offsets = self._pointers
        product = native.Product(
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            out.data_ptr(),
            self._outputs,
            weight,
            bias,
            x.shape[0],
            self._outputs,
            self._steps,
            self._gated,
            scales,
            offsets,
            None if x_scales is None else x_scales.data_ptr(),
        )
        self._library.tm_matmul(ctypes.byref(product), torch.get_num_threads())
        return out


def _native(dtype: torch.dtype) -> Any | None:
    """Return the compiled kernels if they have matrix products of this dtype; else None."""
    library = native.library()
    return library if library is not None and dtype == torch.bfloat16 and library.tm_has_matmul() else None


def _panels(weight: Tensor, gated: bool) -> Tensor:
    """Pack a weight, bf16 or int8 `[out, in]`, into panels as the kernel reads it: int32 `[panels, in / lanes, PANEL]`,
    in which each int32 holds the `lanes` inputs of an output that one dot product takes."""
    words = weight.contiguous().view(torch.int32)  # [out, steps]
    count, steps = words.shape[0] // _PANEL, words.shape[1]
    panels = torch.empty((count, steps, _PANEL), dtype=torch.int32)
    native.huge_pages(panels)
    if gated:
        panels.view(-1, 2, steps, _PANEL).copy_(words.view(2, -1, _PANEL, steps).permute(1, 0, 3, 2))
    else:
        panels.copy_(words.view(-1, _PANEL, steps).transpose(1, 2))
    return panels


def _interleave(x: Tensor) -> Tensor:
    """Reorder `[2 * n, ...]`, all gates before all ups, to alternating panels of gates and of ups."""
    return x.view(2, -1, _PANEL, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def _padded(x: Tensor) -> Tensor:
    """Return `x` with rows of zeros appended up to a whole panel."""
    return pad_rows(x, -(-x.shape[0] // _PANEL) * _PANEL)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight to int8 `[out, in]` and scales, fp32 `[out]`, whose product is close to it."""
    wide = weight.float()
    scales = wide.abs().amax(1) / 127
    return torch.round(wide / scales.clamp(min=1e-30)[:, None]).to(torch.int8), scales
