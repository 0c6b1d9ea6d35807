"""What the fused decoder must know of a model, from a Hugging Face config that is understood to the last key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from engine.models.rope import ROPE_KEYS


class Unsupported(Exception):
    """The fused decoder does not know something in this config; the message says what."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention and a gated SiLU feed-forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    """One a layer; None sees everything."""
    rotary: tuple[bool, ...]
    """One a layer: whether it rotates queries and keys."""
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)


_SHAPE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
}
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_FAMILIES: dict[str, set[str]] = {
    "llama": {"attention_bias", "mlp_bias", "pretraining_tp"},
    "mistral": {"sliding_window"},
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS | {"attention_bias"},
    "smollm3": _WINDOWS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "pretraining_tp"},
}
"""What each family's config may say beyond `_SHAPE`, all of it handled below."""

_HARMLESS = {
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "is_llama_config",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "torch_dtype",
    "transformers.js_config",
    "unk_token_id",
    "use_cache",
}
"""Keys that change nothing in the forward. Those that every config has are known from the base class."""


def fused_config(config: PretrainedConfig) -> DecoderConfig:
    """Translate a config of a known family.

    Raises:
        Unsupported: another family, or a key or a value that the fused decoder does not know.
    """
    _check_known(config)
    layers = config.num_hidden_layers
    family = config.model_type
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        windows=_windows(config),
        rotary=tuple(bool(r) for r in config.no_rope_layers[:layers]) if family == "smollm3" else (True,) * layers,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        out_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied=bool(config.tie_word_embeddings),
    )


def _check_known(config: PretrainedConfig) -> None:
    family = config.model_type
    if family not in _FAMILIES:
        raise Unsupported(f"model type {family!r}")
    base = PretrainedConfig().to_dict()
    known = _SHAPE | _FAMILIES[family] | _HARMLESS
    for key, value in config.to_dict().items():
        if key in known or key.startswith("_"):
            continue
        if key not in base and value is not None:
            raise Unsupported(f"config key {key!r} = {value!r}")
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False):
            raise Unsupported(f"config key {flag!r}")
    if config.hidden_act != "silu":
        raise Unsupported(f"activation {config.hidden_act!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise Unsupported("query heads that are no multiple of the KV heads")
    _check_rope(config.rope_parameters or {})


def _check_rope(rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise Unsupported(f"rope type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise Unsupported("a partial rotary factor")
    allowed = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key, value in rope.items():
        if key not in allowed and value is not None:
            raise Unsupported(f"rope key {key!r} = {value!r}")


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers
    if config.model_type == "mistral":
        return (window,) * layers
    if not getattr(config, "use_sliding_window", False):
        window = None
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"layer type {kind!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
