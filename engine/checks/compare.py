"""Random inputs of a check, and the comparison of what a GPU computed with an exact computation on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 2e-5
"""Relative error that every dtype may have: a GPU's `exp2` and `rsqrt` are right to a few units of fp32."""


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normally distributed numbers on the CPU; equal arguments give equal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def worst_error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a row: the root mean square of its errors over that of its values.

    Args:
        got: `[rows, …]`, on any device.
        want: the exact values.

    Returns:
        NaN if any value is not finite.
    """
    have, exact = got.detach().to("cpu", torch.float64).flatten(1), want.to(torch.float64).flatten(1)
    error = (have - exact).square().mean(1).sqrt()
    size = exact.square().mean(1).sqrt().clamp_min(1e-12)
    return float((error / size).max())


def limit(dtype: torch.dtype, roundings: float) -> float:
    """Return the relative error that a computation with so many roundings to `dtype` may have."""
    return max(_LEAST, roundings * torch.finfo(dtype).eps)


def differs(what: str, got: Tensor, want: Tensor, roundings: float, noise: float = 0.0) -> str | None:
    """Return how far `got` is from the exact values, as a message, if it is too far; else None.

    Args:
        what: names the case in the message.
        got: `[rows, …]`, rounded to its dtype.
        want: the exact values.
        roundings: number of roundings to the dtype that are expected, at most.
        noise: further relative error that is expected.
    """
    if got.shape != want.shape:
        return f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if not got.numel():
        return None
    error, allowed = worst_error(got, want), limit(got.dtype, roundings) + noise
    if error <= allowed:
        return None
    return f"{what}: relative error {error:.2g}, allowed is {allowed:.2g}"
