"""The small operations between the matrix products: compiled kernels that pass over memory once, or else torch.

On a CPU they are C++ (`kernels.native`), on a GPU Triton (`kernels.triton.ops`). Each computes every row independently
of the other rows, in a fixed order. They round where `kernels.ops_reference` rounds; only sums and `exp` differ in
their last bits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import native
from kernels import ops_reference as reference
from kernels import triton as gpu
from kernels.ops_reference import rotary

__all__ = ["add_rms_norm", "argmax", "gelu_mul", "quantize", "rms_norm", "rotary", "silu_mul", "softcap"]

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Operations(Protocol):
    """The functions that `kernels.ops_reference` and `kernels.triton.ops` both have."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...
    def softcap(self, x: Tensor, cap: float) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` over the last dimension, in fp32 before `weight` (Zhang and Sennrich 2019).

    A weight in x's dtype multiplies after the rounding to this dtype, a weight in fp32 before it.
    """
    library = _library(x, weight=weight)
    if library is None:
        return _other("norm", x, weight=weight).rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    _norm(library, None, x, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of `x + residual`, and the sum, which may overwrite `residual`."""
    library = _library(x, residual, weight=weight)
    if library is None:
        return _other("norm", x, residual, weight=weight).add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    _norm(library, x, residual, weight, out, eps)
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[T, intermediate]`, for `gate_up` of shape `[T, 2 * intermediate]`, gate first."""
    library = _library(gate_up)
    if library is None:
        return _other("gate", gate_up).silu_mul(gate_up)
    rows, cols = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, cols))
    bf16 = gate_up.dtype == torch.bfloat16
    library.tm_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, cols, bf16, torch.get_num_threads())
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, as `silu_mul`, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    library = _library(gate_up)
    if library is None:
        return _other("gate", gate_up).gelu_mul(gate_up)
    rows, cols = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, cols))
    bf16 = gate_up.dtype == torch.bfloat16
    library.tm_gelu_mul(gate_up.data_ptr(), out.data_ptr(), rows, cols, bf16, torch.get_num_threads())
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)` of `x` (`[rows, cols]`), computed in fp32. `x` may be overwritten."""
    library = _library(x)
    if library is None:
        return _other("gate", x).softcap(x, cap)
    library.tm_softcap(x.data_ptr(), *x.shape, cap, x.dtype == torch.bfloat16, torch.get_num_threads())
    return x


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's maximum (int64 `[rows]`), and whether all its values are finite (bool)."""
    library = native.library()
    if library is None or x.device.type != "cpu" or x.dtype not in native.DTYPES or x.stride(1) != 1:
        return reference.argmax(x)
    places, finite = torch.empty(x.shape[0], dtype=torch.int64), torch.empty(x.shape[0], dtype=torch.bool)
    library.tm_argmax(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        x.dtype == torch.bfloat16,
        places.data_ptr(),
        finite.data_ptr(),
        torch.get_num_threads(),
    )
    return places, finite


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to integers from -127 to 127, stored plus 128 (uint8 like `x`), and a step (fp32 `[rows]`)."""
    library = _library(x)
    if library is None:
        return reference.quantize(x)
    rows, cols = x.shape
    values, steps = torch.empty((rows, cols), dtype=torch.uint8), torch.empty(rows)
    bf16 = x.dtype == torch.bfloat16
    library.tm_quantize(x.data_ptr(), values.data_ptr(), steps.data_ptr(), rows, cols, bf16, torch.get_num_threads())
    return values, steps


def _norm(library: Any, x: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    cols = weight.shape[0]
    library.tm_add_rms_norm(
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        out.numel() // cols,
        cols,
        eps,
        out.dtype == torch.bfloat16,
        weight.dtype != out.dtype,
        torch.get_num_threads(),
    )


def _library(*tensors: Tensor, weight: Tensor | None = None) -> Any | None:
    """Return the compiled kernels if they support these tensors; the weight of a norm may be fp32."""
    dtype = tensors[0].dtype
    if dtype not in native.DTYPES:
        return None
    if weight is not None and (weight.dtype not in (dtype, torch.float32) or not weight.is_contiguous()):
        return None
    for x in tensors:
        if x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous():
            return None
    return native.library()


def _other(group: str, *tensors: Tensor, weight: Tensor | None = None) -> _Operations:
    """Return the module for tensors that the C++ kernels do not support: Triton on a GPU, otherwise the reference."""
    x = tensors[0]
    if x.device.type != "cuda" or x.dtype not in _GPU_DTYPES:
        return reference
    if weight is not None and not weight.is_contiguous():
        return reference
    if any(y.dtype != x.dtype or not y.is_contiguous() for y in tensors):
        return reference
    return gpu.load(group) or reference
