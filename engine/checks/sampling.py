"""Checks that the sampler of a GPU gives the ids and log-probabilities of the CPU's sampler."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine.checks.usage import Usage
from engine.outputs import TokenLogprobs
from engine.request import SamplingParams
from engine.sampling.device import DeviceSampler
from engine.sampling.row import PromptRows, Row, Sampled
from engine.sampling.sampler import Sampler

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.0, "min_tokens": 50, "logit_bias": ((5, 30.0), (6, -30.0))},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": 1},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1},
)
_MOST_UNEQUAL = 1
"""Number of drawn ids that may differ: where a random number is at the edge between two ids, the rounding of `exp`
decides."""
_LOGPROB = 1e-3
"""Largest difference of log-probabilities that is allowed."""


def check_sampler(usage: Usage) -> str | None:
    """Sample a row of each kind on the GPU and on the CPU; return what differs, or None."""
    generator = torch.Generator().manual_seed(6)
    rows = _rows(usage.num_ids)
    prompts = [PromptRows([3, 1 % usage.num_ids], 2)]
    count = len(rows) + len(prompts[0].tokens)
    logits = (4 * torch.randn(count, usage.vocab_size, generator=generator)).to(usage.dtype)
    last = torch.arange(count, dtype=torch.int32) % usage.num_ids
    want = Sampler(usage.num_ids).sample(logits.clone(), rows, last, prompts).result()
    sampler = DeviceSampler(usage.num_ids, usage.device, len(rows))
    got = sampler.sample(logits.to(usage.device), rows, last.to(usage.device), prompts).result()
    return _unequal_ids(rows, got, want) or _unequal_logprobs(got, want)


def _rows(num_ids: int) -> list[Row]:
    """Return one row of each kind; every second row has a pending id."""
    found = []
    for index, options in enumerate(_KINDS):
        params = SamplingParams(max_tokens=100, seed=index, **options)
        tokens = [(7 * index + i) % num_ids for i in range(5)]
        row = Row(-1 - index, params, 1000 + index, 0, 3, tokens, frozenset({0}))
        found.append(dataclasses.replace(row, pending=index % 2 == 1, place=index))
    return found


def _unequal_ids(rows: list[Row], got: Sampled, want: Sampled) -> str | None:
    unequal = [i for i, pair in enumerate(zip(got.token_ids, want.token_ids, strict=True)) if pair[0] != pair[1]]
    drawn = [i for i in unequal if rows[i].params.temperature > 0]
    if unequal == drawn and len(drawn) <= _MOST_UNEQUAL:
        return None
    first = unequal[0]
    kind = ", ".join(f"{name} {value}" for name, value in _KINDS[first].items())
    return f"id {got.token_ids[first]} instead of {want.token_ids[first]} with {kind}; {len(unequal)} of {len(rows)}"


def _unequal_logprobs(got: Sampled, want: Sampled) -> str | None:
    mine = [*got.logprobs, *(row for prompt in got.prompt_logprobs for row in prompt)]
    theirs = [*want.logprobs, *(row for prompt in want.prompt_logprobs for row in prompt)]
    if len(mine) != len(theirs):
        return f"{len(mine)} rows of log-probabilities instead of {len(theirs)}"
    for here, there in zip(mine, theirs, strict=True):
        if (here is None) != (there is None):
            return "log-probabilities are missing"
        if here is not None and there is not None and not _close(here, there):
            return f"log-probabilities {here} instead of {there}"
    return None


def _close(here: TokenLogprobs, there: TokenLogprobs) -> bool:
    if here.chosen.token_id != there.chosen.token_id:
        return True  # an unequal id is counted by `_unequal_ids`
    pairs = zip((here.chosen, *here.top), (there.chosen, *there.top), strict=True)
    return all(abs(a.logprob - b.logprob) <= _LOGPROB for a, b in pairs)
