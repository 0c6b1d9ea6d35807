"""Measures the loss of quality by int8: next-token distributions of fp32, bf16 and int8 over the same text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelOptions
from engine.models.loading import LoadedModel, load_model
from kernels.attention import get_backend
from kernels.attention.base import AttentionBatch

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of a variant from the fp32 model, over all positions."""

    name: str
    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from fp32 to the variant, in nats per token."""
    agreement: float
    """Share of positions at which both have the same most likely token."""


def report(model: str, windows: int, length: int) -> list[Distance]:
    """Measure each variant on `windows` pieces, of `length` tokens each, of the language reference in Python."""
    variants = {
        "fp32": ModelOptions(model, dtype="float32", backend="fused"),
        "bf16": ModelOptions(model, dtype="bfloat16", backend="fused"),
        "int8": ModelOptions(model, dtype="bfloat16", backend="fused", quantize="int8"),
    }
    loaded = {name: load_model(options) for name, options in variants.items()}
    ids = loaded["fp32"].tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    pieces = [ids[at : at + length] for at in range(0, len(ids) - length, max(length, (len(ids) - length) // windows))]
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in variants}
    tokens = 0
    for piece in pieces[:windows]:
        right = _logprobs(loaded["fp32"], piece)
        tokens += length - 1
        for name, variant in loaded.items():
            sums[name] += _compare(right, right if name == "fp32" else _logprobs(variant, piece), piece)
    found = []
    for name, (loss, divergence, equal) in sums.items():
        found.append(Distance(name, math.exp(loss / tokens), float(divergence / tokens), float(equal / tokens)))
        print(
            f"{name}: perplexity {found[-1].perplexity:.3f}, KL from fp32 {found[-1].divergence:.2e} nats a token, ",
            end="",
        )
        print(f"same likeliest token {found[-1].agreement:.2%} of {tokens} tokens")
    return found


def _compare(right: Tensor, other: Tensor, piece: list[int]) -> Tensor:
    """Return sums over all tokens but the first: loss and divergence of `other`, number of equal most likely tokens."""
    following = torch.tensor(piece[1:])
    loss = -other[:-1].gather(1, following[:, None]).sum()
    divergence = (right[:-1].exp() * (right[:-1] - other[:-1])).sum()
    equal = (right[:-1].argmax(1) == other[:-1].argmax(1)).sum()
    return torch.stack([loss.double(), divergence.double(), equal.double()])


def _logprobs(loaded: LoadedModel, piece: list[int]) -> Tensor:
    """Return the log-probabilities of a new sequence, fp32 `[tokens, vocab]`."""
    backend = get_backend("auto", loaded.cache_spec(_BLOCK))
    blocks = -(-len(piece) // _BLOCK)
    backend.bind(torch.empty((blocks, backend.block_bytes), dtype=torch.uint8))
    everything = torch.arange(len(piece))
    attention = AttentionBatch(everything, everything, (0, len(piece)), (len(piece),), (tuple(range(blocks)),))
    logits = loaded.bind(backend).forward(Batch(torch.tensor(piece), attention, everything))
    return logits.float().log_softmax(-1)
