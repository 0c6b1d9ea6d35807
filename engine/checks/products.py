"""Checks 8-bit and batch-invariant matrix products and mixtures of experts on a GPU against fp64 on the CPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from engine.checks.compare import differs
from engine.checks.usage import Usage
from engine.models.feed_forward import Stack, StackedExperts
from kernels import ops
from kernels.linear_cuda import CudaProduct, can_quantize, quantized_weight

_ROWS = (1, 37)
_OUTPUTS = 272
_EXPERTS = 8
"""Number of experts of the check, at most."""
_NOISE: dict[torch.dtype | None, float] = {None: 0.0, torch.int8: 0.03, torch.float8_e4m3fn: 0.06}
"""Relative error that quantised inputs add to a product of random factors: half a step of the highest of them."""


def check_products(usage: Usage) -> str | None:
    """Return what is wrong with products of the model's precision, or None."""
    precision, inputs = usage.precision, usage.hidden_size
    weight, bias = _random((_OUTPUTS, inputs), usage.dtype, 1) * inputs**-0.5, _random((_OUTPUTS,), usage.dtype, 2)
    product = CudaProduct(
        weight.to(usage.device), bias.to(usage.device), precision.quantize, batch_invariant=precision.batch_invariant
    )
    quantized = precision.quantize if _quantizes(usage, inputs) else None
    for rows in _ROWS:
        x = _random((rows, inputs), usage.dtype, 3)
        want = x.double() @ _exact(weight, quantized).T + bias.double()
        what = f"product of {rows} rows, {inputs} inputs"
        wrong = differs(what, product(x.to(usage.device)), want, 2, _NOISE[quantized])
        if wrong is not None:
            return wrong
    return None


def check_experts(usage: Usage) -> str | None:
    """Return what is wrong with mixtures of experts, or None."""
    config = usage.experts
    if config is None:
        return None
    count, inner, hidden = min(config.count, _EXPERTS), config.intermediate_size, usage.hidden_size
    per_row = min(config.per_row, count)
    up = _random((count, 2 * inner, hidden), usage.dtype, 4) * hidden**-0.5
    down = _random((count, hidden, inner), usage.dtype, 5) * inner**-0.5
    x = _random((_ROWS[-1], hidden), usage.dtype, 6)
    # No two scores are close, so that rounding does not decide which experts a row has.
    generator = torch.Generator().manual_seed(7)
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(x.shape[0])])
    scores = torch.linspace(-3, 3, count)[order].to(usage.dtype)
    silu = usage.gated[0][0] == "silu"
    mixture = StackedExperts(
        router=cast(Any, lambda _: scores.to(usage.device)),
        gate_up=_stack(usage, up),
        down=_stack(usage, down),
        per_row=per_row,
        normalise=config.normalise,
        act_mul=ops.silu_mul if silu else ops.gelu_mul,
        batch_invariant=usage.precision.batch_invariant,
    )
    quantized = usage.precision.quantize if _quantizes(usage, hidden) and _quantizes(usage, inner) else None
    shares, chosen = scores.double().softmax(-1).topk(per_row, -1)
    if config.normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for share, expert in zip(shares[row], chosen[row], strict=True):
            gate, value = (_exact(up[expert], quantized) @ x[row].double()).chunk(2)
            act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
            want[row] += share * (_exact(down[expert], quantized) @ (act * value))
    return differs(f"mixture of {count} experts", mixture(x.to(usage.device)), want, 6, 2.5 * _NOISE[quantized])


def _quantizes(usage: Usage, inputs: int) -> bool:
    return usage.precision.quantize is not None and can_quantize(usage.precision.quantize, inputs)


def _exact(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the weight that a product multiplies with, in fp64: dequantised if it is quantised."""
    if dtype is None:
        return weight.double()
    values, scales = quantized_weight(weight, dtype)
    return values[: weight.shape[0]].double() * scales[:, None].double()


def _stack(usage: Usage, weights: Tensor) -> Stack:
    """Return the weights of all experts on the device."""
    if not _quantizes(usage, weights.shape[2]):
        return Stack(weights.to(usage.device), None)
    assert usage.precision.quantize is not None
    values, scales = zip(*(quantized_weight(w, usage.precision.quantize) for w in weights), strict=True)
    return Stack(torch.stack(values).to(usage.device), torch.stack(scales).to(usage.device))


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
