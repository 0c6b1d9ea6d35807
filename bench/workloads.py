"""Deterministic workloads. They are token ids, so that no tokenizer differs between the systems compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

VOCAB = (1_000, 40_000)
"""Ids are drawn from here: ordinary text pieces of the demo model, no control tokens."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, and exactly how many tokens to generate for it."""

    prompt: tuple[int, ...]
    output_tokens: int


def mixed() -> list[Item]:
    """128 unrelated prompts of 16 to 384 tokens, 16 to 192 tokens out: what a batch queue carries."""
    rng = random.Random(0)
    return [_item(rng, (), (16, 384), (16, 192)) for _ in range(128)]


def shared() -> list[Item]:
    """128 prompts with 512 tokens in common and 16 to 64 of their own, 16 to 96 tokens out: one system prompt."""
    rng = random.Random(1)
    prefix = _ids(rng, 512)
    return [_item(rng, prefix, (16, 64), (16, 96)) for _ in range(128)]


def single() -> list[Item]:
    """One prompt of 32 tokens, 256 tokens out: the latency of a lone stream."""
    return [Item(_ids(random.Random(2), 32), 256)]


WORKLOADS: dict[str, Callable[[], list[Item]]] = {"mixed": mixed, "shared": shared, "single": single}


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*VOCAB) for _ in range(count))


def _item(rng: random.Random, prefix: tuple[int, ...], own: tuple[int, int], out: tuple[int, int]) -> Item:
    prompt = prefix + _ids(rng, rng.randint(*own))
    return Item(prompt, rng.randint(*out))
