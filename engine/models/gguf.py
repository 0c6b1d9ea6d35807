"""GGUF files: config from the metadata, weights dequantised, tokenizer.

Key and tensor names are llama.cpp's (gguf-py `constants.py`, `tensor_mapping.py`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from engine.models.gguf_config import read_config
from engine.models.gguf_tokenizer import GgufTokenizer, Vocabulary
from engine.models.weights import LoadError

_PERMUTED = {"llama", "smollm3", "granite"}
"""Architectures whose q and k rows llama.cpp stores with the two halves of a head interleaved."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_DIFFERENT: dict[str, dict[str, str]] = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "olmo2": _AFTER,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}
"""What an architecture has besides `_BLOCK`, or in its place."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""One tensor for all experts of a layer."""
_ROPE_FACTORS = "rope_freqs.weight"
"""Divides the rotary frequencies (llama3 scaling, evaluated by the converter)."""
_ROPE_FACTOR_LISTS = ("rope_factors_short.weight", "rope_factors_long.weight")


class GgufFile:
    """A GGUF file read as a checkpoint.

    Raises:
        LoadError: the file is missing or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise LoadError(f"{path} can't be read as GGUF: {error}") from error
        self._fields = reader.fields
        self.architecture = str(self.field("general.architecture"))
        self._tensors: dict[str, tuple[Any, int | None]] = {}
        """By Hugging Face name: a tensor, and which of its slices, if it is a stack of experts."""
        for tensor in reader.tensors:
            self._tensors.update(_entries(tensor, self.architecture))

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python objects."""
        return self._fields[key].contents() if key in self._fields else default

    def names(self) -> set[str]:
        return set(self._tensors) - {_ROPE_FACTORS, *_ROPE_FACTOR_LISTS}

    def load(self, name: str) -> Tensor:
        tensor, part = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data if part is None else tensor.data[part], tensor.tensor_type)
        except NotImplementedError as error:
            raise LoadError(
                f"tensor {name!r} is quantised as {tensor.tensor_type.name}, which can't be read"
            ) from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if self.architecture in _PERMUTED and ".self_attn.q_proj." in name:
            return _unpermute(weight, self.hyper("attention.head_count"))
        if self.architecture in _PERMUTED and ".self_attn.k_proj." in name:
            return _unpermute(weight, self.kv_heads)
        if self.architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            return weight - 1  # the format holds what Gemma's norms multiply with, a checkpoint that less 1
        return weight

    def rope_factors(self) -> Tensor | None:
        """fp32 `[head_dim / 2]` to divide the rotary frequencies by, where the file has them."""
        return self.load(_ROPE_FACTORS) if _ROPE_FACTORS in self._tensors else None

    def eos_token_ids(self) -> set[int]:
        """The ids that end a turn: of the text, the turn and the message."""
        return self.vocabulary.end_ids()

    def rope_factor_lists(self) -> tuple[list[float], list[float]]:
        """The divisors for short and for long sequences (longrope), each empty if the file has none."""
        short, long = (self.load(name).tolist() if name in self._tensors else [] for name in _ROPE_FACTOR_LISTS)
        return short, long

    def config(self) -> PretrainedConfig:
        """See `read_config`."""
        return read_config(self)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens."""
        return Vocabulary(self)

    def tokenizer(self) -> GgufTokenizer:
        """What stands for a transformers tokenizer.

        Raises:
            LoadError: it is of a kind that is not known.
        """
        return GgufTokenizer(self)

    def metadata_keys(self) -> list[str]:
        """Of all metadata."""
        return list(self._fields)

    def hyper(self, key: str, default: Any = None) -> Any:
        """A number of the model.

        Raises:
            LoadError: it is not there and has no default.
        """
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise LoadError(f"{self.path} has no {self.architecture}.{key}")
        return value

    @property
    def kv_heads(self) -> int:
        return int(self.hyper("attention.head_count_kv", self.hyper("attention.head_count")))

    @property
    def vocab_size(self) -> int:
        return int(self._tensors["model.embed_tokens.weight"][0].shape[1])


def _entries(tensor: Any, architecture: str) -> dict[str, tuple[Any, int | None]]:
    """A tensor under its Hugging Face name, or each slice of a stack of experts under its own."""
    parts = tensor.name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _EXPERTS:
        prefix, suffix = f"model.layers.{parts[1]}.mlp.experts", f"{_EXPERTS[parts[2]]}.{parts[3]}"
        return {f"{prefix}.{i}.{suffix}": (tensor, i) for i in range(int(tensor.shape[2]))}
    return {_hf_name(tensor.name, architecture): (tensor, None)}


def _hf_name(name: str, architecture: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".", 2)
    block = _BLOCK | _DIFFERENT.get(architecture, {})
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in block:
        return f"model.layers.{parts[1]}.{block[parts[2]]}.{kind}"
    return name


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order (`convert_hf_to_gguf.py`, `LlamaModel.permute`): rows (i, half) back to (half, i)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
