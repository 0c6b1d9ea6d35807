"""GGUF files: written as llama.cpp would write a model, they load as that model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from engine.config import ModelOptions
from engine.models.config import Unsupported
from engine.models.gguf import GgufFile
from engine.models.loading import LoadedModel, LoadError, load_model
from engine.models.rope import inverse_frequencies
from tests.models.driver import Driver
from tests.models.reference import Reference
from tests.models.tiny import BOS, END, EOS, FUSED, SPECIALS, TEMPLATE, Case, build, tokenizer

PROMPT = [5, 90, 17, 200, 33, 8, 250]
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's `convert_hf_to_gguf.py` does: the inverse of our reordering."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def ggml_name(architecture: str, name: str) -> str:
    """Return a tensor's GGUF name, by the map of the library `gguf`."""
    stem, _, kind = name.rpartition(".")
    found = gguf.get_tensor_name_map(ARCHITECTURES[architecture], 8).get_name(stem)
    assert found is not None, name
    return f"{found}.{kind}"


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer in one tensor."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        if ".experts." in name:
            experts.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensors[name])
        else:
            out[name] = tensors[name]
    return out | {name: torch.stack(parts) for name, parts in experts.items()}


def convert(
    source: Path,
    target: Path,
    architecture: str,
    quantise: bool = False,
    factors: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write `source` as GGUF."""
    config = AutoConfig.from_pretrained(source)
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("qwen3", "qwen3moe", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        name = f"{architecture}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, kind, sub)
    add_tokenizer(writer)
    for name, values in (factors or {}).items():
        writer.add_tensor(name, values)
    names = architecture if architecture != "falcon" else "llama"
    for name, tensor in stacked(load_file(source / "model.safetensors")).items():
        values = tensor.numpy()
        if architecture in ("llama", "granite") and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if architecture in ("llama", "granite") and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        kind = gguf.GGMLQuantizationType.Q8_0 if quantise and values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(ggml_name(names, name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    made = tokenizer()
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(m) for m in json.loads(made.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(END)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(str(path), **{"device": "cpu", "dtype": "float32", **options}))


def logits(loaded: LoadedModel) -> torch.Tensor:
    driver = Driver(loaded)
    return driver.prefill(driver.add(PROMPT))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama-biases-tied", "qwen2", "qwen3"],
)
def test_a_file_gives_the_model_it_was_made_from(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    source = build(tmp_path / "hf", architecture, **config)
    if config.get("attention_bias"):
        with pytest.raises(LoadError, match=r"o_proj\.bias"):  # llama.cpp's graph has one, the format's names too
            load(convert(drop_out_bias(source), tmp_path / "model.gguf", architecture))
        source = build(tmp_path / "again", architecture, **config)
    loaded = load(convert(source, tmp_path / "model.gguf", architecture))
    assert (loaded.implementation, loaded.name, loaded.max_model_len) == ("fused", "model", 256)
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def metadata_of(case: Case) -> dict[str, Any]:
    """Return the metadata that the converter writes for this family only."""
    c = case.config
    if case.family == "phi3":
        rope, heads = c["rope_parameters"], 16
        scale = 256 / rope["original_max_position_embeddings"]
        return {
            "rope__dimension_count": int(rope["partial_rotary_factor"] * heads),
            "rope__scaling__original_context_length": rope["original_max_position_embeddings"],
            "rope__scaling__attn_factor": math.sqrt(1 + math.log(scale) / math.log(16)),
            "attention__sliding_window": 0,
        }
    if case.family == "granite":
        return {
            "embedding_scale": c["embedding_multiplier"],
            "attention__scale": c["attention_multiplier"],
            "residual_scale": c["residual_multiplier"],
            "logit_scale": c["logits_scaling"],
        }
    if case.family == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return {"attention__sliding_window": c["sliding_window"], **caps}
    if case.family == "gemma3_text":
        scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
        return {"attention__sliding_window": c["sliding_window"], "attention__sliding_window_pattern": 3, **scaling}
    if case.family == "qwen3_moe":
        names = {
            "num_experts": "count",
            "num_experts_per_tok": "used_count",
            "moe_intermediate_size": "feed_forward_length",
        }
        return {f"expert_{ours}": c[theirs] for theirs, ours in names.items()}
    return {}


@pytest.mark.parametrize("backend", ["fused", "transformers"])
@pytest.mark.parametrize(
    ("architecture", "name", "change"),
    [
        ("phi3", "phi3-partial-longrope", {}),
        ("granite", "granite", {"attention_bias": False, "mlp_bias": False}),
        ("olmo2", "olmo2", {"attention_bias": False}),
        ("gemma2", "gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", "gemma3", {"query_pre_attn_scalar": 32}),
        ("qwen3moe", "qwen3-moe", {"norm_topk_prob": True}),
    ],
)
def test_a_file_of_every_family_gives_the_model_it_was_made_from(
    tmp_path: Path, architecture: str, name: str, change: dict[str, Any], backend: str
) -> None:
    case = next(c for c in FUSED if c.name == name)
    source = build(tmp_path / "hf", case.family, **case.config | change)
    rope = case.config.get("rope_parameters", {})
    factors = {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32)
        for kind in ("short", "long")
        if f"{kind}_factor" in rope
    }
    path = convert(source, tmp_path / "model.gguf", architecture, factors=factors, **metadata_of(case))
    loaded = load(path, backend=backend)
    assert loaded.implementation == backend
    prompt = PROMPT * 4  # beyond every window, and the length at which the reference's longrope changes
    driver = Driver(loaded)
    assert torch.allclose(driver.prefill(driver.add(prompt)), Reference(source).logits(prompt), atol=1e-3)


def test_stacks_of_quantised_experts_are_read(tmp_path: Path) -> None:
    case = next(c for c in FUSED if c.name == "qwen3-moe")
    source = build(tmp_path / "hf", case.family, **case.config | {"norm_topk_prob": True, "num_experts_per_tok": 4})
    target = convert(
        source, tmp_path / "model.gguf", "qwen3moe", quantise=True, **metadata_of(case) | {"expert_used_count": 4}
    )
    got, want = logits(load(target)), Reference(source).logits(PROMPT)
    assert (got - want).abs().mean() < 0.05 * want.std()


def drop_out_bias(path: Path) -> Path:
    from safetensors.torch import save_file

    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith("o_proj.bias")}, path / "model.safetensors")
    return path


def test_quantised_weights_are_close(tmp_path: Path) -> None:
    source = build(tmp_path / "hf")
    got = logits(load(convert(source, tmp_path / "model.gguf", "llama", quantise=True)))
    want = Reference(source).logits(PROMPT)
    assert (got - want).abs().mean() < 0.05 * want.std()
    assert not torch.allclose(got, want, atol=1e-4)


def test_the_tokenizer_and_the_ends_come_from_the_file(tmp_path: Path) -> None:
    loaded = load(convert(build(tmp_path / "hf"), tmp_path / "model.gguf", "llama"))
    ours, made = loaded.tokenizer, tokenizer()
    assert loaded.generation.eos_token_ids == {EOS, END}
    assert ours.size == len(made)
    for text in ("the worker feeds the model", "Köln 世界 🔥", "<|user|>x<|end|>", "a <|endoftext|> b"):
        assert ours.encode(text) == made.encode(text)
        assert ours.decode(ours.encode(text)) == text.replace("<|user|>", "").replace("<|end|>", "")
    assert ours.render([{"role": "user", "content": "Hi"}]) == "<|user|>Hi<|end|><|assistant|>"


LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}


@pytest.mark.parametrize("backend", ["fused", "transformers"])
@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, LINEAR),
        ({"rope_type": "linear", "factor": 4.0}, {"rope__scaling__factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope__scale_linear": 4.0}),
        ({"rope_type": "default"}, {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, YARN),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
            {**YARN, "rope__scaling__yarn_beta_fast": 8.0},
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, rope: dict[str, Any], metadata: dict[str, Any], backend: str) -> None:
    """A factor without a type is linear scaling, as in llama.cpp."""
    source = build(tmp_path / "hf", rope_parameters={"rope_theta": 1e4, **rope})
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", **metadata), backend=backend)
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


@pytest.mark.parametrize("backend", ["fused", "transformers"])
def test_rope_factors_are_read(tmp_path: Path, backend: str) -> None:
    """A converter writes llama3 scaling as a tensor that the frequencies are divided by."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = build(tmp_path / "hf", rope_parameters={**rope, "original_max_position_embeddings": 32})
    config = AutoConfig.from_pretrained(source)
    scaled, _ = inverse_frequencies(config, 256)
    plain, _ = inverse_frequencies(AutoConfig.from_pretrained(build(tmp_path / "plain")), 256)
    assert not torch.equal(scaled, plain)
    factors = {"rope_freqs.weight": (plain / scaled).numpy()}
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", factors=factors), backend=backend)
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


@pytest.mark.parametrize("backend", ["fused", "transformers"])
def test_biases_are_read(tmp_path: Path, backend: str) -> None:
    source = build(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    loaded = load(convert(source, tmp_path / "model.gguf", "llama"), backend=backend)
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "fused", "transformers"])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "rope_factors_long.weight"),
        ("llama", "blk.1.attn_q_norm.weight"),
        ("llama", "blk.0.attn_sinks.weight"),
        ("qwen2", "blk.0.attn_output.bias"),
        ("llama", "output.bias"),
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, architecture: str, name: str, backend: str) -> None:
    source = build(tmp_path / "hf", architecture)
    target = convert(
        source, tmp_path / "model.gguf", architecture, factors={name: np.ones(16 if "norm" in name else 64, np.float32)}
    )
    stem = (
        name.split(".")[-2]
        .replace("attn_output", "o_proj")
        .replace("attn_q_norm", "q_norm")
        .replace("output", "lm_head")
    )
    with pytest.raises(LoadError, match=stem):
        load(target, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "fused", "transformers"])
@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {"expert_count": 8}, "llama.expert_count = 8"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ("llama", {"rope__scaling__attn_factor": 1.2}, "llama.rope.scaling.attn_factor = 1.2"),
        ("llama", {"rope__scaling__type": "dynamic", "rope__scaling__factor": 2.0}, "rope.scaling.type = 'dynamic'"),
        ("llama", {"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor"),
        ("llama", {"attention__causal": False}, "llama.attention.causal"),
        ("llama", {"attention__head_count_kv": [2, 1, 2]}, "llama.attention.head_count_kv"),
        ("falcon", {}, "falcon"),
    ],
)
def test_an_unknown_key_is_named_with_every_backend(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str, backend: str
) -> None:
    target = convert(build(tmp_path / "hf"), tmp_path / "model.gguf", architecture, **metadata)
    with pytest.raises(LoadError, match=re.escape(message)):
        load(target, backend=backend)


def test_keys_that_say_that_there_is_nothing_are_passed_over(tmp_path: Path) -> None:
    nothing = {"expert_count": 0, "logit_scale": 1.0, "attention__causal": True, "rope__scaling__attn_factor": 1.0}
    lists = {"attention__head_count": [4, 4, 4], "attention__head_count_kv": [2, 2, 2], "feed_forward_length": [96] * 3}
    source = build(tmp_path / "hf")
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", **nothing, **lists))
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def test_a_window_is_read(tmp_path: Path) -> None:
    source = build(tmp_path / "hf", "mistral", sliding_window=4)
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", attention__sliding_window=4))
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def test_an_unknown_key_is_not_ignored(tmp_path: Path) -> None:
    target = convert(build(tmp_path / "hf"), tmp_path / "model.gguf", "llama", expert_count=8)
    with pytest.raises(Unsupported, match=r"llama\.expert_count"):
        GgufFile(target).config()
    with pytest.raises(LoadError, match=r"llama\.expert_count"):
        load(target, backend="fused")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(LoadError, match="GGUF"):
        load(tmp_path / "x.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match="GGUF"):
        load(tmp_path / "empty.gguf")
