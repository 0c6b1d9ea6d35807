"""Reads a model from GGUF: its config, its weights, its tokenizer.

Key and tensor names are llama.cpp's (gguf-py `constants.py`, `tensor_mapping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import Unsupported
from engine.models.dequantize import dequantize
from engine.models.gguf_config import ARCHITECTURES, Architecture, GgufConfig, read_config
from engine.models.gguf_reader import GgufTensor, read_gguf
from engine.models.gguf_tokenizer import GgufTokenizer, Vocabulary
from engine.models.weights import LoadError

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
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors that hold all experts of a layer."""
_NO_MODELS = {"clip"}
"""Architectures that are no language models but lie beside them: encoders of images and sound."""
ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that divides the rotary frequencies (llama3 scaling, which the converter evaluated)."""
_ROPE_FACTOR_LISTS = ("rope_factors_short.weight", "rope_factors_long.weight")


def holds_model(metadata: Mapping[str, Any]) -> bool:
    """Return whether a file holds a language model, not an adapter, an importance matrix or an encoder of images."""
    kind = metadata.get("general.type", "model")
    return kind == "model" and metadata.get("general.architecture") not in _NO_MODELS


class GgufFile:
    """A model in GGUF, of one file or several parts, read as a checkpoint.

    Raises:
        LoadError: a file is missing or broken, or holds no language model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        contents = read_gguf(path)
        self._metadata = contents.metadata
        self.architecture = str(self.field("general.architecture"))
        self.family = ARCHITECTURES.get(self.architecture)
        """The entry of the architecture; None: the architecture is not known, and `config` raises."""
        if not holds_model(self._metadata):
            kind = self.field("general.type", "model")
            raise LoadError(
                f"{path} holds no language model (its type is {kind!r}, architecture {self.architecture!r})"
            )
        self._tensors: dict[str, tuple[GgufTensor, int | None]] = {}
        """Hugging Face name → tensor, and index of a slice if the tensor holds all experts of a layer."""
        for tensor in contents.tensors:
            for name, entry in _entries(tensor, self.family).items():
                if name in self._tensors:
                    raise LoadError(f"{path} holds tensor {name!r} twice")
                self._tensors[name] = entry
        self._in_config: set[str] = set()
        """Names of tensors that are part of the config."""

    def field(self, key: str, default: Any = None) -> Any:
        """Return a metadata value as Python objects."""
        return self._metadata.get(key, default)

    def names(self) -> set[str]:
        """Return the names of all tensors, without those that are part of the config."""
        return set(self._tensors) - self._in_config

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor, dequantised, in the order and scale of a Hugging Face checkpoint."""
        tensor, part = self._tensors[name]
        family = self.family
        if family is not None and family.norms_less and name.endswith("norm.weight"):
            return (dequantize(tensor, part, torch.float32) - family.norms_less).to(dtype)
        weight = dequantize(tensor, part, dtype)
        if family is not None and family.permuted:
            if ".self_attn.q_proj." in name:
                return self._unpermute(name, weight, self.hyper("attention.head_count"))
            if ".self_attn.k_proj." in name:
                return self._unpermute(name, weight, self.kv_heads)
        return weight

    def _unpermute(self, name: str, weight: Tensor, heads: int) -> Tensor:
        """Undo llama.cpp's order of rows (`convert_hf_to_gguf.py`, `LlamaModel.permute`): (i, half) to (half, i)."""
        if weight.shape[0] % (2 * heads):
            raise LoadError(f"tensor {name!r} has {weight.shape[0]} rows, which are no {heads} heads")
        return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    def eos_token_ids(self) -> set[int]:
        """Return the ids that end a text, a turn or a message."""
        return self.vocabulary.end_ids()

    def rope_factor_lists(self) -> tuple[list[float], list[float]]:
        """Return the divisors for short and for long sequences (longrope); each is empty if the file has none."""
        self._in_config.update(self._tensors.keys() & _ROPE_FACTOR_LISTS)
        short, long = (self.load(name).tolist() if name in self._tensors else [] for name in _ROPE_FACTOR_LISTS)
        return short, long

    def config(self) -> GgufConfig:
        """Return the Hugging Face config, see `read_config`."""
        return read_config(self)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the file."""
        return Vocabulary(self)

    def tokenizer(self) -> GgufTokenizer:
        """Return the tokenizer, with the methods of a transformers tokenizer that we call.

        Raises:
            LoadError: the kind of tokenizer is not known.
        """
        return GgufTokenizer(self)

    def metadata_keys(self) -> list[str]:
        """Return the keys of all metadata."""
        return list(self._metadata)

    def hyper(self, key: str, default: Any = None) -> Any:
        """Return a number of the architecture. If the file has a list with a value for each layer, all must be equal.

        Raises:
            LoadError: the key is missing and has no default, or its value is not a number.
            Unsupported: the layers have different values.
        """
        name = f"{self.architecture}.{key}"
        value = self.field(name, default)
        if value is None:
            raise LoadError(f"{self.path} has no {name}")
        if isinstance(value, list) and value:
            if value.count(value[0]) != len(value):
                raise Unsupported(f"GGUF key {name}: the layers differ")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"{self.path}: {name} is no number: {value!r}")
        return value

    def count(self, key: str, default: Any = None) -> int:
        """Return a number as `hyper` does, which must be an integer of at least 1."""
        value = self.hyper(key, default)
        if not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.path}: {self.architecture}.{key} is {value!r}")
        return value

    @property
    def kv_heads(self) -> int:
        return self.count("attention.head_count_kv", self.count("attention.head_count"))

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        if "model.embed_tokens.weight" not in self._tensors:
            raise LoadError(f"{self.path} has no tensor token_embd.weight")
        return self._tensors["model.embed_tokens.weight"][0].shape[0]


def _entries(tensor: GgufTensor, family: Architecture | None) -> dict[str, tuple[GgufTensor, int | None]]:
    """Return the tensor by its Hugging Face name, or each expert of a tensor of experts by its name."""
    parts = tensor.name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _EXPERTS:
        prefix, suffix = f"model.layers.{parts[1]}.mlp.experts", f"{_EXPERTS[parts[2]]}.{parts[3]}"
        return {f"{prefix}.{i}.{suffix}": (tensor, i) for i in range(tensor.shape[0])}
    return {_hf_name(tensor.name, family): (tensor, None)}


def _hf_name(name: str, family: Architecture | None) -> str:
    """Translate a name: `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".", 2)
    block = _BLOCK if family is None else {**_BLOCK, **family.tensors}
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in block:
        return f"model.layers.{parts[1]}.{block[parts[2]]}.{kind}"
    return name
