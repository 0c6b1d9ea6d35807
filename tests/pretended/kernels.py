"""Triton kernels in torch, for processes without Triton's interpreter: tests of what surrounds them take less time.

Each takes the arguments of the kernel of its name, by name, and writes what the kernel writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import ops_reference as reference
from kernels import sampling_reference as reference_sampler
from kernels.sampling_reference import Choices
from tests.pretended.tensor import GpuTensor

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu


def write(
    *, qkv: Tensor, queries: Tensor, k: Tensor, v: Tensor, slots: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, eps: float, BLOCK: int, HEADS: int, KV_HEADS: int, NORM: bool, ROTATE: bool, **_: Any,
) -> None:  # fmt: skip
    """Play `_write` of `kernels/triton/write.py`."""
    q, keys, values = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    if NORM:
        q, keys = reference.rms_norm(q, q_weight, eps), reference.rms_norm(keys, k_weight, eps)
    if ROTATE:
        q, keys = reference.rotary(q, cos, sin), reference.rotary(keys, cos, sin)
    queries.copy_(q)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k[slot // BLOCK, slot % BLOCK] = keys[row]
            v[slot // BLOCK, slot % BLOCK] = values[row]


def attend(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, tables: Tensor, places: Tensor, contexts: Tensor,
    starts: Tensor, work: Tensor, window: int, splits: int, scale: float, cap: float, BLOCK: int, KV_HEADS: int,
    GROUP: int, TOKENS: int, ROWS: int, DIM: int, WINDOW: bool, SOFTCAP: bool, SPLIT: bool, **_: Any,
) -> None:  # fmt: skip
    """Play `_attend` of `kernels/triton/attention.py`. Split, the first segment gets all, the others nothing."""
    place_of, context_of, start_of = places.tolist(), contexts.tolist(), starts.tolist()
    if SPLIT:
        parts = out.view(-1, KV_HEADS, splits, ROWS, DIM)
        lines = stats.view(-1, KV_HEADS, splits, 2, ROWS)
    for item, (sequence, first) in enumerate(work.tolist()):
        if sequence < 0:
            continue
        begin, count = start_of[sequence], start_of[sequence + 1] - start_of[sequence]
        context, tokens = context_of[sequence], min(TOKENS, count - first)
        if tokens <= 0:
            continue
        blocks = tables[max(place_of[sequence], 0), : -(-context // BLOCK)].long()
        keys, values = (x[blocks].flatten(0, 1)[:context].float().transpose(0, 1) for x in (k, v))  # [K, context, D]
        rows = slice(begin + first, begin + first + tokens)
        query = q[rows].float().view(tokens, KV_HEADS, GROUP, DIM).transpose(0, 1).reshape(KV_HEADS, -1, DIM)
        scores = query @ keys.transpose(1, 2) * scale
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (torch.exp2(scores) + 1.0))
        at = torch.arange(context)
        own = torch.arange(context - count + first, context - count + first + tokens).repeat_interleave(GROUP)
        hidden = at[None] > own[:, None]
        if WINDOW:
            hidden |= at[None] <= own[:, None] - window
        scores = scores.masked_fill(hidden, -math.inf)
        highest = scores.amax(-1)
        weights = torch.exp2(scores - highest[..., None])
        total, result = weights.sum(-1), weights.to(q.dtype).float() @ values
        if SPLIT:
            real = slice(0, tokens * GROUP)
            parts[item, :, :, real], lines[item, :, :, 1, real] = 0.0, 0.0
            lines[item, :, :, 0, real] = -math.inf
            parts[item, :, 0, real] = result
            lines[item, :, 0, 0, real], lines[item, :, 0, 1, real] = highest, total
        else:
            done = (result / total[..., None]).view(KV_HEADS, tokens, GROUP, DIM).transpose(0, 1)
            out[rows] = done.reshape(tokens, -1, DIM).to(out.dtype)


def combine(
    *, partial: Tensor, stats: Tensor, out: Tensor, starts: Tensor, work: Tensor, splits: int, KV_HEADS: int,
    GROUP: int, TOKENS: int, ROWS: int, DIM: int, **_: Any,
) -> None:  # fmt: skip
    """Play `_combine` of `kernels/triton/attention.py`."""
    parts = partial.view(-1, KV_HEADS, splits, ROWS, DIM)
    lines = stats.view(-1, KV_HEADS, splits, 2, ROWS)
    start_of = starts.tolist()
    for item, (sequence, first) in enumerate(work.tolist()):
        tokens = 0 if sequence < 0 else min(TOKENS, start_of[sequence + 1] - start_of[sequence] - first)
        if tokens <= 0:
            continue
        real, begin = slice(0, tokens * GROUP), start_of[sequence] + first
        highest, total = lines[item, :, :, 0, real], lines[item, :, :, 1, real]
        factors = torch.exp2(highest - highest.amax(1, keepdim=True))
        done = (parts[item, :, :, real] * factors[..., None]).sum(1) / (total * factors).sum(1)[..., None]
        done = done.view(KV_HEADS, tokens, GROUP, DIM).transpose(0, 1).reshape(tokens, -1, DIM)
        out[begin : begin + tokens] = done.to(out.dtype)


def norm(*, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, ADD: bool, **_: Any) -> None:
    """Play `_norm` of `kernels/triton/ops.py`."""
    if ADD:
        residual.copy_((residual.float() + x.float()).to(residual.dtype))
    out.copy_(reference.rms_norm(residual, weight, eps))


def gated(*, gate_up: Tensor, out: Tensor, GELU: bool, **_: Any) -> None:
    """Play `_gated` of `kernels/triton/ops.py`."""
    out.copy_(reference.gelu_mul(gate_up) if GELU else reference.silu_mul(gate_up))


def softcap(*, x: Tensor, out: Tensor, cap: float, **_: Any) -> None:
    """Play `_softcap` of `kernels/triton/ops.py`."""
    out.copy_(reference.softcap(x, cap))


STAND_INS: dict[str, Callable[..., None]] = {
    "_write": write,
    "_attend": attend,
    "_combine": combine,
    "_norm": norm,
    "_gated": gated,
    "_softcap": softcap,
}
"""Name of a kernel → what plays it."""
GROUPS = ("attention", "write", "norm", "gate", "sampler")
"""Groups of `kernels.triton` that are played; the others are disabled."""


class SamplerOf:
    """Plays `kernels.triton.sampler`: each function is one kernel, computed by the reference."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def highest(self, logits: Tensor, num_ids: int) -> Tensor:
        """Play `highest`."""
        return self._launched("highest", reference_sampler.highest, logits, num_ids, ids=logits.shape[0])[0]

    def sample(
        self, logits: Tensor, choices: Choices, num_ids: int, counts: Tensor, last: Tensor | None, scratch: Tensor
    ) -> Tensor:
        """Play `sample`."""
        args = (logits, choices, num_ids, counts, last, scratch)
        return self._launched("sample", reference_sampler.sample, *args, ids=logits.shape[0])[0]

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, ids: Tensor, num_ids: int, top: int
    ) -> tuple[Tensor, ...]:
        """Play `logprobs`."""
        args = (logits, rows, tokens, ids, num_ids, top)
        return self._launched("logprobs", reference_sampler.logprobs, *args, top=(rows.shape[0], top))

    def _launched(
        self,
        name: str,
        compute: Callable[..., Any],
        *args: Any,
        ids: int | None = None,
        top: tuple[int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        device = args[0].device
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((ids or 0,), torch.int32)]
        if top is not None:
            shapes = [(top[:1], torch.float32), (top, torch.int32), (top, torch.float32)]
        out = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        tensors, raw = [], []
        for arg in args:
            parts = vars_of(arg) if isinstance(arg, Choices) else {"": arg}
            tensors += [x for x in parts.values() if isinstance(x, Tensor)]
            plain = {key: x.raw if isinstance(x, GpuTensor) else x for key, x in parts.items()}
            raw.append(dataclasses.replace(arg, **plain) if isinstance(arg, Choices) else plain[""])
        assert all(isinstance(x, GpuTensor) for x in tensors), f"{name} gets a tensor of the host"

        def run() -> None:
            made = compute(*raw)
            for target, value in zip(out, made if isinstance(made, tuple) else (made,), strict=True):
                target.raw.copy_(value)  # type: ignore[attr-defined]

        self._gpu.launch(name, run, tensors, [*out])  # type: ignore[arg-type,list-item]
        return out


def vars_of(choices: Choices) -> dict[str, Any]:
    """Return the fields of parameters."""
    return {field.name: getattr(choices, field.name) for field in dataclasses.fields(choices)}
