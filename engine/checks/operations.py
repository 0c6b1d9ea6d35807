"""Checks norms and gated activations on a GPU against fp64 on the CPU, in the sizes of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checks.compare import differs, random
from engine.checks.usage import Usage
from kernels import ops

_ROWS = 37


def check_norms(usage: Usage) -> str | None:
    """Compare the norms with fp64; return what is wrong, or None."""
    if not usage.hidden_size:
        return None
    x, residual = (random((_ROWS, usage.hidden_size), usage.dtype, seed) for seed in (1, 2))
    weight = random((usage.hidden_size,), usage.dtype, 3)
    weight = weight.float() if usage.wide_norms else weight
    got = ops.rms_norm(x.to(usage.device), weight.to(usage.device), usage.eps)
    wrong = differs(f"rms_norm of {usage.hidden_size} columns", got, _norm(x.double(), weight, usage.eps), 2)
    if wrong is not None:
        return wrong
    total = (x.float() + residual.float()).to(usage.dtype)
    there = [y.to(usage.device) for y in (x, residual, weight)]
    normed, added = ops.add_rms_norm(there[0], there[1], there[2], usage.eps)
    return differs("add_rms_norm, the sum", added, total.double(), 1) or differs(
        "add_rms_norm", normed, _norm(total.double(), weight, usage.eps), 2
    )


def check_gates(usage: Usage) -> str | None:
    """Compare the gated activations and the soft-cap of logits with fp64; return what is wrong, or None."""
    for activation, columns in usage.gated:
        x = random((_ROWS, 2 * columns), usage.dtype, 4)
        gate, up = x.double().chunk(2, dim=-1)
        if activation == "silu":
            got, want = ops.silu_mul(x.to(usage.device)), torch.nn.functional.silu(gate)
        else:
            got, want = ops.gelu_mul(x.to(usage.device)), torch.nn.functional.gelu(gate, approximate="tanh")
        wrong = differs(f"{activation} of {columns} columns", got, want * up, 3)
        if wrong is not None:
            return wrong
    cap = usage.logit_softcap
    if cap is None:
        return None
    logits = 20 * random((3, usage.vocab_size), usage.dtype, 5)
    want = cap * torch.tanh(logits.double() / cap)
    return differs(f"soft-cap of {usage.vocab_size} logits", ops.softcap(logits.to(usage.device), cap), want, 2)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
