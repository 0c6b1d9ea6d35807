"""GGUF files: written as llama.cpp would write a model, they load as that model."""

from __future__ import annotations

import json
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
from engine.models.gguf import _BLOCK, _TOP, GgufFile
from engine.models.loading import LoadedModel, LoadError, load_model
from engine.models.rope import inverse_frequencies
from tests.models.driver import Driver
from tests.models.reference import Reference
from tests.models.tiny import BOS, END, EOS, SPECIALS, TEMPLATE, build, tokenizer

PROMPT = [5, 90, 17, 200, 33, 8, 250]
NAMES = {hf: ggml for ggml, hf in {**_TOP, **_BLOCK}.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own words (`convert_hf_to_gguf.py`): the other way round than ours."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def ggml_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def convert(
    source: Path,
    target: Path,
    architecture: str,
    quantise: bool = False,
    factors: np.ndarray | None = None,
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in metadata.items():
        writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantise and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ggml_name(name), gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
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


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    source = build(tmp_path / "hf", rope_parameters=rope)
    target = tmp_path / "model.gguf"
    loaded = load(convert(source, target, "llama", rope__scaling__type="linear", rope__scaling__factor=4.0))
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def test_rope_factors_are_read(tmp_path: Path) -> None:
    """A converter writes llama3 scaling as a tensor that the frequencies are divided by."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = build(tmp_path / "hf", rope_parameters={**rope, "original_max_position_embeddings": 32})
    config = AutoConfig.from_pretrained(source)
    scaled, _ = inverse_frequencies(config, 256)
    plain, _ = inverse_frequencies(AutoConfig.from_pretrained(build(tmp_path / "plain")), 256)
    assert not torch.equal(scaled, plain)
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", factors=(plain / scaled).numpy()))
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def test_a_window_is_read(tmp_path: Path) -> None:
    source = build(tmp_path / "hf", "mistral", sliding_window=4)
    loaded = load(convert(source, tmp_path / "model.gguf", "llama", attention__sliding_window=4))
    assert torch.allclose(logits(loaded), Reference(source).logits(PROMPT), atol=1e-3)


def test_a_key_it_does_not_know_is_not_ignored(tmp_path: Path) -> None:
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
