"""Checks 8-bit and batch-invariant matrix products and mixtures of experts on a GPU against fp64 on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from engine.checks.compare import differs, random
from engine.checks.usage import Usage
from engine.models.feed_forward import Stack, StackedExperts
from kernels import ops
from kernels.linear import Precision
from kernels.linear_cuda import CudaProduct, can_quantize, quantized_weight
from kernels.quantize import quantize_rows

_ROWS = (1, 37)
_OUTPUTS = 272
_EXPERTS = 8
"""Maximum number of experts that are checked in the model's sizes."""
_SMALL = (64, 48)
"""Hidden size and inner size of the small experts, see `check_experts`."""
_NOISE: dict[torch.dtype | None, float] = {None: 0.0, torch.int8: 0.03, torch.float8_e4m3fn: 0.06}
"""Relative error that is allowed for the quantisation of inputs: half a step of the highest input."""


def check_quantize(usage: Usage) -> str | None:
    """Compare 8-bit products, and the quantisation of their inputs, with fp64; return what is wrong, or None."""
    quantize, inputs = usage.precision.quantize, usage.hidden_size
    if quantize is None or not can_quantize(quantize, inputs):
        return None
    x = random((_ROWS[-1], inputs), usage.dtype, 8)
    x[0], x[1, 0] = 0, 100 * inputs**0.5  # an outlier that leaves an error of 1 %
    values, scales = quantize_rows(x.to(usage.device), quantize)
    got = values.cpu().double() * scales.cpu().double()[:, None]
    wrong = differs(f"{inputs} quantised columns", got, x.double(), 0, _NOISE[quantize])
    # A batch-invariant model has products of its own, which `check_invariant_products` checks.
    plain = dataclasses.replace(usage.precision, batch_invariant=False)
    return wrong or _check_product(usage, plain)


def check_invariant_products(usage: Usage) -> str | None:
    """Compare batch-invariant products, of 8-bit and of other factors, with fp64; return what is wrong, or None."""
    plain = dataclasses.replace(usage.precision, quantize=None)
    return _check_product(usage, plain) or _check_product(usage, usage.precision)


def _check_product(usage: Usage, precision: Precision) -> str | None:
    """Return what is wrong with products of this precision, or None."""
    inputs = usage.hidden_size
    weight, bias = random((_OUTPUTS, inputs), usage.dtype, 1) * inputs**-0.5, random((_OUTPUTS,), usage.dtype, 2)
    product = CudaProduct(
        weight.to(usage.device), bias.to(usage.device), precision.quantize, batch_invariant=precision.batch_invariant
    )
    quantize = precision.quantize
    quantized = quantize if quantize is not None and can_quantize(quantize, inputs) else None
    for rows in _ROWS:
        x = random((rows, inputs), usage.dtype, 3)
        want = x.double() @ _exact(weight, quantized).T + bias.double()
        what = f"product of {rows} rows, {inputs} inputs"
        wrong = differs(what, product(x.to(usage.device)), want, 2, _NOISE[quantized])
        if wrong is not None:
            return wrong
    return None


def check_experts(usage: Usage) -> str | None:
    """Compare mixtures of experts with fp64; return what is wrong, or None.

    A few experts have the model's sizes. As many experts as the model has are checked in small sizes only, since their
    weights would take much memory.
    """
    config = usage.experts
    if config is None:
        return None
    few = min(config.count, _EXPERTS)
    wrong = _check_mixture(usage, few, min(config.per_row, few), usage.hidden_size, config.intermediate_size)
    if wrong is None and config.count > few:
        wrong = _check_mixture(usage, config.count, config.per_row, *_SMALL)
    return wrong


def _check_mixture(usage: Usage, count: int, per_row: int, hidden: int, inner: int) -> str | None:
    """Return what is wrong with a mixture of experts, or None.

    Args:
        usage: the model's.
        count: number of experts.
        per_row: number of experts that compute a row.
        hidden: inputs of an expert.
        inner: inputs of its second product.
    """
    assert usage.experts is not None
    quantize = usage.precision.quantize
    if quantize is not None and not (can_quantize(quantize, hidden) and can_quantize(quantize, inner)):
        quantize = None  # as `engine.models.parameters` does
    up = random((count, 2 * inner, hidden), usage.dtype, 4) * hidden**-0.5
    down = random((count, hidden, inner), usage.dtype, 5) * inner**-0.5
    x = random((_ROWS[-1], hidden), usage.dtype, 6)
    # No two scores of a row are close, so that rounding does not change which experts are chosen.
    generator = torch.Generator().manual_seed(7)
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(x.shape[0])])
    spread = 3 * max(1.0, count / 128)
    scores = torch.linspace(-spread, spread, count)[order].to(usage.dtype)
    silu = usage.gated[0][0] == "silu"
    mixture = StackedExperts(
        router=cast(Any, lambda _: scores.to(usage.device)),
        gate_up=_stack(usage, up, quantize),
        down=_stack(usage, down, quantize),
        per_row=per_row,
        normalise=usage.experts.normalise,
        act_mul=ops.silu_mul if silu else ops.gelu_mul,
        batch_invariant=usage.precision.batch_invariant,
    )
    shares, chosen = scores.double().softmax(-1).topk(per_row, -1)
    if usage.experts.normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for share, expert in zip(shares[row], chosen[row], strict=True):
            gate, value = (_exact(up[expert], quantize) @ x[row].double()).chunk(2)
            act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
            want[row] += share * (_exact(down[expert], quantize) @ (act * value))
    return differs(f"mixture of {count} experts", mixture(x.to(usage.device)), want, 6, 2.5 * _NOISE[quantize])


def _exact(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the weight that a product multiplies with, in fp64: dequantised if it is quantised."""
    if dtype is None:
        return weight.double()
    values, scales = quantized_weight(weight, dtype)
    return values[: weight.shape[0]].double() * scales[:, None].double()


def _stack(usage: Usage, weights: Tensor, quantize: torch.dtype | None) -> Stack:
    """Return the weights of all experts on the device."""
    if quantize is None:
        return Stack(weights.to(usage.device), None)
    values, scales = zip(*(quantized_weight(w, quantize) for w in weights), strict=True)
    return Stack(torch.stack(values).to(usage.device), torch.stack(scales).to(usage.device))
