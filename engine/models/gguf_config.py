"""From the metadata of a GGUF file to the Hugging Face config of the same model.

Keys are llama.cpp's (gguf-py `constants.py`). What a family's graph there holds as constants, for want of a key, is
held here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from engine.models.config import Unsupported
from engine.models.weights import LoadError

if TYPE_CHECKING:
    from engine.models.gguf import GgufFile

Values = dict[str, Any]

_UNDERSTOOD = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
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


def read_config(file: GgufFile) -> PretrainedConfig:
    """The Hugging Face config that the metadata says.

    Raises:
        Unsupported: an architecture or a key that is not understood.
        LoadError: a key is missing, or they don't go together.
    """
    if file.architecture not in _ARCHITECTURES:
        raise Unsupported(f"GGUF architecture {file.architecture!r}")
    architecture = _ARCHITECTURES[file.architecture]
    heads, hidden = file.hyper("attention.head_count"), file.hyper("embedding_length")
    head_dim = file.hyper("attention.key_length", hidden // heads)
    _check_metadata(file, architecture, head_dim)
    values: Values = {
        "vocab_size": file.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": file.hyper("feed_forward_length"),
        "num_hidden_layers": file.hyper("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.hyper("context_length"),
        "rms_norm_eps": file.hyper("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in file.names(),
        "tie_word_embeddings": "lm_head.weight" not in file.names(),
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(file.eos_token_ids()) or None,
        "pad_token_id": file.field("tokenizer.ggml.padding_token_id"),
    }
    make, values = architecture.read(file, values)
    try:
        return make(**values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise LoadError(f"the metadata of {file.path} makes no config: {error}") from error


def _rope(file: GgufFile) -> Values:
    rope: Values = {"rope_type": "default", "rope_theta": file.hyper("rope.freq_base", 10000.0)}
    kind = file.field(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"rope scaling {kind!r} in GGUF")
    rope |= {"rope_type": kind, "factor": file.hyper("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.hyper("rope.scaling.original_context_length")
    return rope


def _check_metadata(file: GgufFile, architecture: _Architecture, head_dim: int) -> None:
    for key in file.metadata_keys():
        name = key.removeprefix(f"{file.architecture}.")
        if name != key and name not in _UNDERSTOOD | architecture.keys:
            raise Unsupported(f"GGUF key {key!r}")
    if file.hyper("rope.dimension_count", head_dim) != head_dim and not architecture.partial_rotary:
        raise Unsupported("a rotary part of a head")
    if file.hyper("attention.value_length", head_dim) != head_dim:
        raise Unsupported("value heads of another size")


# ── architectures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Architecture:
    read: Callable[[GgufFile, Values], tuple[Callable[..., PretrainedConfig], Values]]
    """The config's class and its arguments, from those that all architectures have in common."""
    keys: frozenset[str] = frozenset()
    """Beyond `_UNDERSTOOD`."""
    partial_rotary: bool = False


def _as(make: Callable[..., PretrainedConfig]) -> Callable[[GgufFile, Values], Any]:
    return lambda file, values: (make, values)


def _llama(file: GgufFile, values: Values) -> Any:
    window = file.hyper("attention.sliding_window", 0)
    if not window:
        return LlamaConfig, values
    if values.pop("attention_bias"):
        raise Unsupported("biases next to a sliding window")
    return MistralConfig, values | {"sliding_window": window}


def _qwen2(file: GgufFile, values: Values) -> Any:
    del values["attention_bias"]
    if values.pop("head_dim") * values["num_attention_heads"] != values["hidden_size"]:
        raise Unsupported("a Qwen2 head size other than hidden / heads")
    return Qwen2Config, values


def _qwen3_moe(file: GgufFile, values: Values) -> Any:
    # llama.cpp's graph has experts in every layer, and normalises their weights.
    return Qwen3MoeConfig, values | {
        "num_experts": file.hyper("expert_count"),
        "num_experts_per_tok": file.hyper("expert_used_count"),
        "moe_intermediate_size": file.hyper("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3(file: GgufFile, values: Values) -> Any:
    head_dim = values.pop("head_dim")
    if head_dim * values["num_attention_heads"] != values["hidden_size"]:
        raise Unsupported("a Phi-3 head size other than hidden / heads")
    rope = values["rope_parameters"]
    rope["partial_rotary_factor"] = file.hyper("rope.dimension_count", head_dim) / head_dim
    original = file.hyper("rope.scaling.original_context_length", values["max_position_embeddings"])
    short, long = file.rope_factor_lists()
    if short and long:
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": file.hyper("rope.scaling.attn_factor", 1.0),
        }
    return Phi3Config, values | {
        "original_max_position_embeddings": original,
        "sliding_window": file.hyper("attention.sliding_window", 0) or None,
    }


def _granite(file: GgufFile, values: Values) -> Any:
    return GraniteConfig, values | {
        "attention_multiplier": file.hyper("attention.scale", values["head_dim"] ** -0.5),
        "embedding_multiplier": file.hyper("embedding_scale", 1.0),
        "residual_multiplier": file.hyper("residual_scale", 1.0),
        "logits_scaling": file.hyper("logit_scale", 1.0),
    }


def _gemma2(file: GgufFile, values: Values) -> Any:
    return Gemma2Config, _gemma(file, values, pattern=2, largest=46) | {
        "attn_logit_softcapping": file.hyper("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.hyper("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, values: Values) -> Any:
    local = {"rope_type": "default", "rope_theta": file.hyper("rope.freq_base_swa", 10000.0)}
    return Gemma3TextConfig, _gemma(file, values, pattern=6, largest=62) | {
        "final_logit_softcapping": file.hyper("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
    }


def _gemma(file: GgufFile, values: Values, pattern: int, largest: int) -> Values:
    """
    Args:
        pattern: each layer of this number sees everything, where the file does not say.
        largest: layers of the 27B model, which alone scales by hidden / heads; the format has no key for it.
    """
    layers: int = values["num_hidden_layers"]
    heads: int = values["num_attention_heads"]
    stated = file.hyper("attention.sliding_window_pattern", pattern)
    slides = stated if isinstance(stated, list) else [(i + 1) % stated != 0 for i in range(layers)]
    return values | {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": file.hyper("attention.sliding_window"),
        "query_pre_attn_scalar": values["hidden_size"] // heads if layers == largest else values["head_dim"],
    }


_WINDOW = frozenset({"attention.sliding_window"})
_PATTERN = _WINDOW | {"attention.sliding_window_pattern", "final_logit_softcapping"}
_ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture(_llama, _WINDOW),
    "qwen2": _Architecture(_qwen2),
    "qwen3": _Architecture(_as(Qwen3Config)),
    "qwen3moe": _Architecture(
        _qwen3_moe, frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
    ),
    "smollm3": _Architecture(_as(SmolLM3Config)),
    "phi3": _Architecture(_phi3, _WINDOW | {"rope.scaling.attn_factor"}, partial_rotary=True),
    "granite": _Architecture(
        _granite, frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
    ),
    "olmo2": _Architecture(_as(Olmo2Config)),
    "gemma2": _Architecture(_gemma2, _PATTERN | {"attn_logit_softcapping"}),
    "gemma3": _Architecture(_gemma3, _PATTERN | {"rope.freq_base_swa"}),
}
