"""Rotary frequencies are transformers', and depend on `max_model_len` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.rope import inverse_frequencies, position_limit, rotary_table
from tests.models.tiny import FUSED


def config(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope},
    )


@pytest.mark.parametrize("case", [c for c in FUSED if c.name.startswith("llama")], ids=lambda case: case.name)
def test_tables_equal_transformers_bit_for_bit(case: Any) -> None:
    rope = case.config.get("rope_parameters", {})
    theirs = LlamaRotaryEmbedding(config(**rope))
    positions = torch.arange(256)
    want = theirs(torch.zeros(1), positions[None])
    ours = rotary_table(*inverse_frequencies(config(**rope), 256), 256)
    for got, full in zip(ours, want, strict=True):
        assert torch.equal(got, full[0, :, : got.shape[1]])


def test_length_dependent_kinds_are_fixed_by_the_model_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert torch.equal(inverse_frequencies(config(**dynamic), 256)[0], inverse_frequencies(config(), 256)[0])
    assert not torch.equal(inverse_frequencies(config(**dynamic), 512)[0], inverse_frequencies(config(), 512)[0])
    longrope = next(c for c in FUSED if c.name == "llama-longrope").config["rope_parameters"]
    short, long = (inverse_frequencies(config(**longrope), n)[0] for n in (16, 17))
    assert torch.equal(short, inverse_frequencies(config(), 16)[0])
    assert not torch.equal(short, long)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_scaling_moves_the_limit(rope: dict[str, Any], limit: int) -> None:
    assert position_limit(config(**rope)) == limit
