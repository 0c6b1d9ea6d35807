"""GGUF files: config from the metadata, weights dequantised, tokenizer.

Key and tensor names are llama.cpp's (gguf-py `constants.py`, `tensor_mapping.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from engine.models.config import Unsupported
from engine.models.weights import LoadError

_CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
}
_PERMUTED = {"llama", "smollm3"}
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
_ROPE_FACTORS = "rope_freqs.weight"
"""Divides the rotary frequencies (llama3 scaling, evaluated by the converter)."""


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
        self._tensors = {_hf_name(t.name): t for t in reader.tensors}
        self.architecture = str(self.field("general.architecture"))

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python objects."""
        return self._fields[key].contents() if key in self._fields else default

    def names(self) -> set[str]:
        return set(self._tensors) - {_ROPE_FACTORS}

    def load(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise LoadError(
                f"tensor {name!r} is quantised as {tensor.tensor_type.name}, which can't be read"
            ) from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if self.architecture in _PERMUTED and ".self_attn.q_proj." in name:
            return _unpermute(weight, self._hyper("attention.head_count"))
        if self.architecture in _PERMUTED and ".self_attn.k_proj." in name:
            return _unpermute(weight, self._kv_heads())
        return weight

    def rope_factors(self) -> Tensor | None:
        """fp32 `[head_dim / 2]` to divide the rotary frequencies by, where the file has them."""
        return self.load(_ROPE_FACTORS) if _ROPE_FACTORS in self._tensors else None

    def eos_token_ids(self) -> set[int]:
        """The ids that end a turn: of the text, the turn and the message."""
        ids = (self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return {int(i) for i in ids if i is not None}

    def config(self) -> PretrainedConfig:
        """The Hugging Face config that the metadata says.

        Raises:
            Unsupported: an architecture or a key that is not understood.
        """
        if self.architecture not in _CONFIGS:
            raise Unsupported(f"GGUF architecture {self.architecture!r}")
        heads, hidden = self._hyper("attention.head_count"), self._hyper("embedding_length")
        head_dim = self._hyper("attention.key_length", hidden // heads)
        self._check_metadata(head_dim)
        values: dict[str, Any] = {
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._hyper("feed_forward_length"),
            "num_hidden_layers": self._hyper("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "max_position_embeddings": self._hyper("context_length"),
            "rms_norm_eps": self._hyper("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted(self.eos_token_ids()) or None,
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }
        make = _CONFIGS[self.architecture]
        if self.architecture != "qwen2":
            values["head_dim"] = head_dim
            values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        elif head_dim * heads != hidden:
            raise Unsupported("a Qwen2 head size other than hidden / heads")
        window = self._hyper("attention.sliding_window", 0)
        if window and self.architecture == "llama":
            make, values = MistralConfig, values | {"sliding_window": window}
            if values.pop("attention_bias"):
                raise Unsupported("biases next to a sliding window")
        try:
            return make(**values)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise LoadError(f"the metadata of {self.path} makes no config: {error}") from error

    def tokenizer(self) -> Any:
        """A transformers tokenizer.

        Raises:
            LoadError: transformers can't convert it.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise LoadError(f"the tokenizer in {self.path} can't be read: {error}") from error
        if self.field("tokenizer.ggml.pre") in ("smollm", "starcoder", "refact", "command-r"):
            # llama.cpp splits every digit off before the usual pattern; the conversion leaves that out.
            split = PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
            tokenizer.backend_tokenizer.pre_tokenizer = split
        return _without_extras(tokenizer, len(self.field("tokenizer.ggml.tokens")))

    def _hyper(self, key: str, default: Any = None) -> Any:
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise LoadError(f"{self.path} has no {self.architecture}.{key}")
        return value

    def _kv_heads(self) -> int:
        return int(self._hyper("attention.head_count_kv", self._hyper("attention.head_count")))

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._hyper("rope.freq_base", 10000.0)}
        kind = self.field(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise Unsupported(f"rope scaling {kind!r} in GGUF")
        rope |= {"rope_type": kind, "factor": self._hyper("rope.scaling.factor")}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._hyper("rope.scaling.original_context_length")
        return rope

    def _check_metadata(self, head_dim: int) -> None:
        for key in self._fields:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in _UNDERSTOOD:
                raise Unsupported(f"GGUF key {key!r}")
        if self._hyper("rope.dimension_count", head_dim) != head_dim:
            raise Unsupported("a rotary part of a head")
        if self._hyper("attention.value_length", head_dim) != head_dim:
            raise Unsupported("value heads of another size")


_UNDERSTOOD = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
}


def _without_extras(tokenizer: Any, size: int) -> Any:
    """Without tokens that the conversion added (a default `<|endoftext|>`): the model has no row for them."""
    if len(tokenizer) <= size:
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    known = {token: getattr(tokenizer, token) for token in ("bos_token", "eos_token", "pad_token", "unk_token")}
    vocabulary = tokenizer.get_vocab()
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=RustTokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        **{name: token for name, token in known.items() if token is not None and vocabulary.get(token, size) < size},
    )


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{kind}"
    return name


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order (`convert_hf_to_gguf.py`, `LlamaModel.permute`): rows (i, half) back to (half, i)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
