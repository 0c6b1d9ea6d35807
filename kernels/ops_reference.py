"""The small operations between the matrix products, in plain torch: used where the compiled kernels do not run, which
are tested against them. Each computes every row alone, in an order that does not depend on other rows.

`torch.nn.functional.silu` and `sigmoid` are not used: elements at the end of a thread's share go through a scalar `exp`
that rounds differently. `torch.exp` has one path for all elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GELU_INNER, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` over the last dimension, in fp32 before `weight` (Zhang and Sennrich 2019).

    Models differ in where they round: a weight in x's dtype multiplies after the rounding, a weight in fp32 before it.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of `x + residual`, and the sum."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of `x` (Su et al. 2021, in the layout of the Hugging Face checkpoints).

    Args:
        x: `[T, heads, head_dim]`.
        cos, sin: fp32 `[T, head_dim / 2]`.
    """
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half:].float()
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[T, intermediate]`, for `gate_up` of shape `[T, 2 * intermediate]`, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    wide.div_(torch.neg(wide).exp_().add_(1))
    return wide.to(gate_up.dtype) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, as `silu_mul`, with the tanh form of GELU (Hendrycks and Gimpel 2016).

    Written with `exp`: (1 + tanh(y)) / 2 = 1 / (1 + e^-2y).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    power = wide.square().mul_(-2 * GELU_INNER * GELU_CUBE).sub_(2 * GELU_INNER).mul_(wide)
    wide.div_(power.exp_().add_(1))
    return wide.to(gate_up.dtype) * up


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)`, computed in fp32. `x` may be overwritten."""
    wide = x.float() / cap
    return (1 - 2 / (torch.exp(2 * wide) + 1)).mul_(cap).to(x.dtype)


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's highest value (int64 `[rows]`), and whether all its values are finite."""
    lowest, highest = torch.aminmax(x, dim=-1)
    return x.argmax(-1), torch.isfinite(lowest) & torch.isfinite(highest)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to integers from -127 to 127, stored plus 128 (uint8 like `x`), and its step (fp32 `[rows]`).

    A row that is not finite has a step of NaN.
    """
    wide = x.float()
    top = wide.abs().amax(-1)
    # Not `127 / top`: torch would multiply by the reciprocal, which rounds twice.
    inverse = torch.where(top > 0, torch.full_like(top, 127) / top, 0)
    values = torch.round(wide * inverse[:, None]).clamp_(-127, 127).nan_to_num_(0) + 128
    return values.to(torch.uint8), torch.where(torch.isfinite(top), top / 127, torch.nan)


def rescale(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `sums * x_scales[:, None] * scales + bias`, `[rows, out]` in `dtype`.

    Args:
        sums: int32 or fp32, at least `[rows, out]`.
        x_scales: fp32 `[rows]`.
        scales: fp32 `[out]`.
        bias: `[out]`.
        dtype: of the result.
    """
    y = sums[: x_scales.shape[0], : scales.shape[0]].float() * (scales * x_scales[:, None])
    return (y if bias is None else y + bias.float()).to(dtype)
