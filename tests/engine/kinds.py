"""Requests of every kind that the sampler tells apart."""

from __future__ import annotations

from typing import Any

from engine.models.loading import LoadedModel
from engine.request import Bans, Request, SamplingParams
from tests.engine.test_model import prompts

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 7},
    "top-k": {"temperature": 1.3, "seed": 8, "top_k": 20},
    "top-p": {"temperature": 1.3, "seed": 9, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "seed": 10, "min_p": 0.02},
    "top-k, top-p and min-p": {"temperature": 1.3, "seed": 11, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "seed": 12, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
                  "presence_penalty": 0.1},
    "penalties, greedy": {"repetition_penalty": 1.4, "frequency_penalty": 0.6},
    "bias": {"logit_bias": ((11, 4.0), (12, -3.0))},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False, "logit_bias": ((2, 100.0),)},
    "bans": {"bans": Bans(frozenset(range(40, 80)), frozenset(range(80, 90)), tuple((a, a ^ 1) for a in range(300)))},
    "logprobs": {"logprobs": 3},
    "logprobs of drawn ids": {"logprobs": 0, "temperature": 0.9, "seed": 13},
    "prompt logprobs": {"prompt_logprobs": 2},
    "choices": {"temperature": 0.7, "seed": 14, "n": 3},
    "stop ids": {"ignore_eos": False, "stop_token_ids": frozenset(range(100, 140))},
    "grammar": {"temperature": 0.9, "seed": 15},
    "grammar, greedy": {},
    "grammar and penalties": {"temperature": 0.9, "seed": 16, "n": 2, "repetition_penalty": 1.3, "logprobs": 2},
    "everything": {"temperature": 0.8, "seed": 17, "n": 2, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
                   "repetition_penalty": 1.1, "frequency_penalty": 0.1, "min_tokens": 2, "logprobs": 20,
                   "prompt_logprobs": 20, "logit_bias": tuple((i, i % 7 - 3.0) for i in range(300)),
                   "bans": Bans(frozenset(range(40, 80)), frozenset(), ((5, 6),)),
                   "ignore_eos": False, "stop_token_ids": frozenset({7, 8})},
}  # fmt: skip
"""Name → parameters. A name that begins with `grammar` gets a grammar, see `requests`."""


def requests(kind: str, loaded: LoadedModel, lengths: tuple[int, ...] = (12, 5), count: int = 6) -> list[Request]:
    """Return requests of a kind, one for each length of a prompt."""
    grammar = loaded.grammars.compile("regex", "[a-c]{2,9}") if kind.startswith("grammar") else None
    params = {"temperature": 0.0, "ignore_eos": grammar is None, "max_tokens": count, **KINDS[kind]}
    return [
        Request(f"{kind} {i}", prompt, SamplingParams(**params), grammar=grammar)
        for i, prompt in enumerate(prompts(300, list(lengths), seed=len(kind)))
    ]
