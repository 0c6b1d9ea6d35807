"""Rotary frequencies are transformers', and depend on `max_model_len` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.models.families import fused_config
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


@pytest.mark.parametrize("factor", [0.5, 0.75])
def test_a_partial_rotation_is_phi3s_with_pairs_that_stand_still(factor: float) -> None:
    partial = Phi3Config(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "partial_rotary_factor": factor}
    )
    cos, sin = rotary_table(*inverse_frequencies(partial, 50), 50, 8)
    want = Phi3RotaryEmbedding(partial)(torch.zeros(1), torch.arange(50)[None])
    rotated = int(8 * factor)
    assert torch.equal(cos[:, :rotated], want[0][0, :, :rotated])
    assert torch.equal(sin[:, :rotated], want[1][0, :, :rotated])
    assert (cos[:, rotated:] == 1).all()
    assert (sin[:, rotated:] == 0).all()


def test_every_kind_of_layer_has_its_own_frequencies() -> None:
    """Gemma 3: five layers with a window and a short base, then one that sees everything."""
    local = {"rope_type": "default", "rope_theta": 1e4}
    whole = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    gemma = Gemma3TextConfig(
        head_dim=16,
        num_hidden_layers=12,
        sliding_window=512,
        rope_parameters={"sliding_attention": local, "full_attention": whole},
    )
    decoder = fused_config(gemma)
    assert decoder.windows == ((512,) * 5 + (None,)) * 2
    assert [decoder.ropes[i] for i in decoder.rotary if i is not None] == (
        (["sliding_attention"] * 5 + ["full_attention"]) * 2
    )
    theirs = Gemma3RotaryEmbedding(gemma)
    for kind in decoder.ropes:
        want = theirs(torch.zeros(1), torch.arange(50)[None], kind)
        for got, full in zip(rotary_table(*inverse_frequencies(gemma, 50, kind), 50), want, strict=True):
            assert torch.equal(got, full[0, :, :8])
    assert position_limit(gemma) == gemma.max_position_embeddings


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
