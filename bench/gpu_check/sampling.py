"""Row 4: ids of the device's sampler beside those of the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_check.table import Line, Setup, check

_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k, top_p, min_p": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "bias, min_tokens": {"logit_bias": ((11, 4.0), (12, -3.0)), "min_tokens": 5, "stop_token_ids": frozenset({13})},
}
"""Kind of row → its sampling parameters."""
_UNEXPLAINED = 2.0**-21
"""Relative change of logits by which two correct ways to compute an exponential may differ."""
_TRIALS = 40


def sampler(setup: Setup) -> Iterator[Line]:
    """Yield how many of 10,000 draws give the CPU's ids, per dtype of the logits."""
    for name in setup.pick(("float32", "bfloat16"), ("float32",)):
        yield check(f"ids of the CPU, {name} logits", partial(_compare, setup, getattr(torch, name)))


def _compare(setup: Setup, dtype: torch.dtype) -> str:
    from engine.sampling.device import DeviceSampler
    from engine.sampling.sampler import Sampler

    count, steps, vocab = setup.pick((100, 50, 32000), (len(_KINDS), 2, 300))
    device, cpu = DeviceSampler(vocab, setup.device, count), Sampler(vocab)
    draw = torch.Generator().manual_seed(4)
    kinds = list(_KINDS)
    tokens: list[list[int]] = [[1 + (i * j) % 200 for j in range(10)] for i in range(count)]
    equal, explained, wrong = 0, 0, []
    for step in range(steps):
        logits = (3 * torch.randn(count, vocab, generator=draw)).to(dtype)
        ids = list(device.sample(logits.to(setup.device), _rows(tokens, kinds)).result().token_ids)
        want = list(cpu.sample(logits.clone(), _rows(tokens, kinds)).result().token_ids)
        for i, (ours, theirs) in enumerate(zip(ids, want, strict=True)):
            if ours == theirs:
                equal += 1
            elif ours in _neighbours(logits[i], tokens[i], i, kinds):
                explained += 1
            else:
                wrong.append(f"{kinds[i % len(kinds)]}: {ours}, not {theirs} (step {step}, row {i})")
            tokens[i].append(theirs or 0)
    if wrong:
        raise ValueError(f"{len(wrong)} of {count * steps} ids differ: {'; '.join(wrong[:5])}")
    return f"{equal} of {count * steps} draws equal, {explained} differ within the rounding of an exponential"


def _rows(tokens: list[list[int]], kinds: list[str], only: int | None = None) -> list[Any]:
    """Return the sampler's rows; `only`: those of one index alone."""
    from engine.request import SamplingParams
    from engine.sampling.sampler import Row

    def row(i: int) -> Row:
        params = SamplingParams(**{"max_tokens": 1000, "temperature": 0.9, "seed": i, **_KINDS[kinds[i % len(kinds)]]})
        return Row(i, params, i, 0, 5, list(tokens[i if only is None else 0]), frozenset({2}))

    return [row(i) for i in (range(len(tokens)) if only is None else [only])]


def _neighbours(logits: Tensor, tokens: list[int], index: int, kinds: list[str]) -> set[int | None]:
    """Return the ids that the CPU samples from logits that are off by about one rounding."""
    from engine.sampling.sampler import Sampler

    draw = torch.Generator().manual_seed(index)
    found: set[int | None] = set()
    for _ in range(_TRIALS):
        noise = torch.randn(logits.shape, generator=draw) * _UNEXPLAINED * logits.float().abs()
        near = (logits.float() + noise)[None]
        found |= set(Sampler(near.shape[1]).sample(near, _rows([tokens], kinds, index)).result().token_ids)
    return found
