"""Random inputs of a check, and the comparison of what a GPU computed with an exact computation on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 2e-5
"""Relative error that is allowed in every dtype: `exp2` and `rsqrt` of a GPU are off by a few fp32 roundings."""


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normally distributed numbers on the CPU; equal arguments give equal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def worst_error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of all rows: a row's root mean square of errors over that of its exact values.

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
    """Return the relative error that is allowed for a computation with this number of roundings to `dtype`."""
    return max(_LEAST, roundings * torch.finfo(dtype).eps)


def differs(what: str, got: Tensor, want: Tensor, roundings: float, noise: float = 0.0) -> str | None:
    """Compare with exact values; return a message if the error is larger than allowed, else None.

    Args:
        what: name of the case, for the message.
        got: `[rows, …]`, rounded to its dtype.
        want: the exact values.
        roundings: maximum number of roundings to the dtype that are expected.
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
