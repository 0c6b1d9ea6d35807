"""The small operations between the matrix products in Triton, one launch each.

They round where `kernels.ops_reference` rounds; only sums, `exp` and `rsqrt` differ in their last bits. Each row is
computed alone, in an order that depends on nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops_reference import GELU_CUBE, GELU_INNER
from kernels.triton.launch import launch

_GELU_LINEAR: tl.constexpr = tl.constexpr(-2 * GELU_INNER)
_GELU_CUBIC: tl.constexpr = tl.constexpr(-2 * GELU_INNER * GELU_CUBE)
_COLUMNS = 1024
"""Columns of a program of an operation on single elements."""


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    eps,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Program (row). NARROW: round to the dtype of the input before the product with `weight`."""
    start = tl.program_id(0).to(tl.int64) * COLS
    cols = tl.arange(0, WIDTH)
    mask = cols < COLS
    row = tl.load(residual + start + cols, mask=mask, other=0.0)
    if ADD:
        added = tl.load(x + start + cols, mask=mask, other=0.0)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(row.dtype)
        tl.store(residual + start + cols, row, mask=mask)
    wide = row.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLS + eps)
    factor = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if NARROW:
        normed = normed.to(row.dtype).to(tl.float32)
    tl.store(out + start + cols, (normed * factor).to(row.dtype), mask=mask)


@triton.jit
def _gated(gate_up, out, COLS: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr):
    """Program (row, range of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = cols < COLS
    gate = tl.load(gate_up + row * (2 * COLS) + cols, mask=mask, other=0.0)
    up = tl.load(gate_up + row * (2 * COLS) + COLS + cols, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    power = (wide * wide * _GELU_CUBIC + _GELU_LINEAR) * wide if GELU else -wide
    wide = (wide / (tl.exp(power) + 1.0)).to(gate.dtype)
    tl.store(out + row * COLS + cols, (wide.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _softcap(x, out, count, cap, WIDTH: tl.constexpr):
    """Program (range of elements)."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = at < count
    value = tl.load(x + at, mask=mask, other=0.0)
    capped = (1.0 - 2.0 / (tl.exp(2.0 * (value.to(tl.float32) / cap)) + 1.0)) * cap
    tl.store(out + at, capped.to(value.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` over the last dimension of `x`, which must be contiguous."""
    out = x.new_empty(x.shape)
    _launch_norm(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to `residual` in place; return the norm of the sum, and the sum."""
    out = x.new_empty(x.shape)
    _launch_norm(x, residual, weight, out, eps, add=True)
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[T, intermediate]`, for `gate_up` of shape `[T, 2 * intermediate]`, gate first."""
    return _launch_gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, as `silu_mul`, with the tanh form of GELU."""
    return _launch_gated(gate_up, gelu=True)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)` of a contiguous `x`, in its place."""
    count = x.numel()
    launch(
        _softcap, (triton.cdiv(count, _COLUMNS),),
        x, x, count, cap,
        WIDTH=_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return x


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    cols = weight.shape[0]
    width = triton.next_power_of_2(cols)
    warps = min(16, max(1, width // 512))
    launch(
        _norm, (x.numel() // cols,),
        x, residual, weight, out, eps,
        COLS=cols, WIDTH=width, ADD=add, NARROW=weight.dtype == x.dtype, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, cols = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, cols))
    width = min(_COLUMNS, triton.next_power_of_2(cols))
    launch(
        _gated,
        (rows, triton.cdiv(cols, width)),
        gate_up,
        out,
        COLS=cols,
        WIDTH=width,
        GELU=gelu,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
