"""The configs of the most used models of the fused families run in the fused decoder, or not for a reason that counts.

`published_configs.jsonl` has one model a line: its name, its `config.json`, and `not_fused`, the key that the fused
decoder does not compute. Long lists are written as what is repeated and their length; rope factors are stand-ins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from engine.config import ModelOptions
from engine.models.config import Unsupported
from engine.models.families import _NEUTRAL, fused_config
from engine.models.loading import load_model
from tests.models.driver import Driver
from tests.models.reference import Reference, near_ties
from tests.models.tiny import BOS, EOS, scatter, tokenizer

PUBLISHED: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
]
BY_NAME = {row["model"]: row for row in PUBLISHED}
WITH_QUIRKS = [
    "unsloth/Llama-3.2-1B-Instruct",
    "deepseek-ai/deepseek-coder-6.7b-instruct",
    "huggyllama/llama-7b",
    "tiiuae/Falcon3-7B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "Qwen/Qwen2.5-Math-1.5B",
    "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-3-medium-128k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "google/gemma-2-27b-it",
    "google/gemma-3-1b-it",
    "google/gemma-3-270m-it",
    "ibm-granite/granite-3.3-8b-instruct",
    "allenai/OLMo-2-0425-1B-Instruct",
]
"""One of each set of keys: their tiny versions are compared with transformers."""
NEW = 12


def expand(value: Any) -> Any:
    """A config as published: `{"repeat": […], "length": n}` becomes the list."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"repeat", "length"}:
        return [value["repeat"][i % len(value["repeat"])] for i in range(value["length"])]
    return {key: expand(item) for key, item in value.items()}


def read(folder: Path, config: dict[str, Any]) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(config))
    config_read: PretrainedConfig = AutoConfig.from_pretrained(str(folder))
    return config_read


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with small sizes, windows and lengths, for a model of some thousand parameters."""
    tiny = dict(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kept = {"num_attention_heads": 4, "num_key_value_heads": 4 if heads == kv_heads else min(kv_heads, 2)}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6 if "gemma3" in config["model_type"] else 4,
    }
    tiny |= kept | sizes | {"max_position_embeddings": 256, "vocab_size": len(tokenizer())}
    small = {"head_dim": 24, "sliding_window": 6, "sliding_window_size": 6, "original_max_position_embeddings": 16}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_window_layers": 2}
    for key, value in small.items():
        if config.get(key) is not None:
            tiny[key] = value
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            tiny[key] = {**config[key], "length": tiny["num_hidden_layers"]}
    rope = dict(config.get("rope_scaling") or {})
    rotated = int(16 * config.get("partial_rotary_factor", 1.0))
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = {**rope[key], "length": rotated // 2}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 32
    return expand(tiny | {"rope_scaling": rope or None, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0})


def write_tiny(folder: Path, config: dict[str, Any]) -> None:
    """A model with random weights and exactly this config.json."""
    model = AutoModelForCausalLM.from_config(read(folder, config), dtype=torch.float32)
    scatter(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    read(folder, config)


def test_the_published_configs_are_many_and_of_every_fused_family() -> None:
    assert len(BY_NAME) == len(PUBLISHED) >= 70
    families = {row["config"]["model_type"] for row in PUBLISHED}
    assert families == {
        *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
        *("phi3", "granite", "olmo2", "gemma2", "gemma3_text"),
    }


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_a_published_config_is_fused_or_names_the_key_that_is_not(tmp_path: Path, row: dict[str, Any]) -> None:
    config = read(tmp_path, expand(row["config"]))
    if "not_fused" in row:
        with pytest.raises(Unsupported, match=row["not_fused"]):
            fused_config(config)
    else:
        assert fused_config(config).num_layers == row["config"]["num_hidden_layers"]


@pytest.mark.parametrize("name", WITH_QUIRKS)
def test_a_tiny_model_with_a_published_config_equals_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    write_tiny(tmp_path, shrink(BY_NAME[name]["config"]))
    loaded = load_model(ModelOptions(str(tmp_path), device="cpu", dtype="float32"))
    assert (loaded.implementation, loaded.implementation_reason) == ("fused", "")
    # Longer than windows and original lengths, so that frequencies that follow the length are the long ones.
    prompt = [7 + i * 31 % (loaded.vocab_size - 7) for i in range(40)]
    want, logits = Reference(tmp_path).generate(prompt, NEW)
    got, ours = Driver(loaded).generate(prompt, NEW, [16, 24])
    near_ties(got, want, logits)
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), NEW - 1) + 1
    assert torch.allclose(ours[:same], logits[:same], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "rope_interleaved", True),
        ("Qwen/Qwen2.5-Math-1.5B", "use_mrope", True),
        ("google/gemma-2-9b-it", "sliding_window_size", 8),
        ("meta-llama/Llama-3.2-1B-Instruct", "partial_rotary_factor", 0.5),
        ("meta-llama/Llama-3.2-1B-Instruct", "layer_types", ["sliding_attention"] * 16),
        ("meta-llama/Llama-3.2-1B-Instruct", "logit_scale", 0.5),
        ("microsoft/Phi-4-mini-instruct", "full_attn_mod", 2),
        ("microsoft/Phi-4-mini-instruct", "lm_head_bias", True),
        ("microsoft/Phi-4-mini-instruct", "mlp_bias", True),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qkv_bias", True),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "use_qk_norm", False),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "shared_expert_intermediate_size", 64),
        ("mistralai/Mistral-7B-v0.1", "use_sliding_window", False),
        ("mistralai/Mistral-7B-v0.1", "attention_bias", True),
        ("mistralai/Mistral-7B-v0.1", "is_causal", False),
        ("Qwen/Qwen2.5-0.5B-Instruct", "attention_bias", False),
        ("Qwen/Qwen2.5-0.5B-Instruct", "num_nextn_predict_layers", 1),
    ],
)
def test_a_harmless_key_with_another_value_is_named(tmp_path: Path, name: str, key: str, value: Any) -> None:
    config = read(tmp_path, expand(BY_NAME[name]["config"]) | {key: value})
    with pytest.raises(Unsupported, match=f"{key}|partial rotary factor"):
        fused_config(config)


@pytest.mark.parametrize("key", sorted(_NEUTRAL))
def test_every_key_that_is_passed_over_at_one_value_is_documented(key: str) -> None:
    page = Path(__file__).parents[2] / "docs/models.md"
    section = page.read_text().partition("## Which models run fused")[2].partition("\n## ")[0]
    assert f"`{key}`" in section


@pytest.mark.parametrize("extra", [{"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"pretraining_tp": 4}])
def test_keys_of_sampling_and_training_in_a_config_change_no_logits(tmp_path: Path, extra: dict[str, Any]) -> None:
    config = expand(BY_NAME["meta-llama/Llama-2-7b-chat-hf"]["config"])
    assert fused_config(read(tmp_path, config | extra)) == fused_config(read(tmp_path, config))
