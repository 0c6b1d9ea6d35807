"""Deterministic workloads. They are token ids, so that no tokenizer differs between the systems compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

VOCAB = (1_000, 40_000)
"""Range of the ids: text of the demo model, no control tokens."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the exact number of tokens to generate."""

    prompt: tuple[int, ...]
    output_tokens: int


def mixed() -> list[Item]:
    """Return 128 unrelated prompts of 16 to 384 tokens, with 16 to 192 output tokens, as in a batch queue."""
    rng = random.Random(0)
    return [_item(rng, (), (16, 384), (16, 192)) for _ in range(128)]


def shared() -> list[Item]:
    """Return 128 prompts that begin with the same 512 tokens (a system prompt), followed by 16 to 64 tokens of their
    own, with 16 to 96 output tokens."""
    rng = random.Random(1)
    prefix = _ids(rng, 512)
    return [_item(rng, prefix, (16, 64), (16, 96)) for _ in range(128)]


def single() -> list[Item]:
    """Return one prompt of 32 tokens, with 256 output tokens: the latency of a single request."""
    return [Item(_ids(random.Random(2), 32), 256)]


WORKLOADS: dict[str, Callable[[], list[Item]]] = {"mixed": mixed, "shared": shared, "single": single}


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*VOCAB) for _ in range(count))


def _item(rng: random.Random, prefix: tuple[int, ...], own: tuple[int, int], out: tuple[int, int]) -> Item:
    prompt = prefix + _ids(rng, rng.randint(*own))
    return Item(prompt, rng.randint(*out))
