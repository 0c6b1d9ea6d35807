"""The model families that the fused decoder runs, and which keys their Hugging Face configs may have.

A config is translated only if every key of it is understood, since a key that is ignored may change the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from engine.models.config import BOTH_NORMS, POST_NORM, DecoderConfig, ExpertsConfig, Unsupported
from engine.models.rope import ROPE_KEYS, rotary_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHAPE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
}
_HARMLESS: dict[str, str] = {
    key: reason
    for reason, keys in {
        "name of a class, a file or a library version": (
            "architectures auto_map model_type tokenizer_class transformers.js_config unsloth_fixed unsloth_version "
            "is_llama_config"
        ),
        "an id that the tokenizer knows too": (
            "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id"
        ),
        "for training, classification or beam search alone": (
            "attention_dropout embd_pdrop resid_pdrop initializer_range output_router_logits router_aux_loss_coef "
            "id2label label2id problem_type task_specific_params finetuning_task prefix is_decoder tie_encoder_decoder "
            "tf_legacy_loss pretraining_tp gradient_checkpointing neftune_noise_alpha router_jitter_noise attn_pdrop "
            "hidden_dropout hidden_dropout_prob classifier_dropout"
        ),
        "precision and cache are chosen by the worker": (
            "torch_dtype dtype use_cache use_bfloat16 cache_implementation torchscript attn_implementation "
            "use_flash_attn use_flash_attention use_flash_attention_2"
        ),
        "length that the model was trained with": "max_sequence_length model_max_length seq_length",
        "default of sampling, which comes after the logits": (
            "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
            "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
            "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
            "output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens "
            "temperature top_k top_p typical_p"
        ),
    }.items()
    for key in keys.split()
}
"""Keys of published configs that change no logits, whatever their value, and why. The keys of the base class
`PretrainedConfig` need no entry."""


@dataclass(frozen=True)
class _Neutral:
    """A key that changes no logits while its value passes a test."""

    why: str
    test: Callable[[Any, PretrainedConfig], bool]


_NEUTRAL: dict[str, _Neutral] = {
    "rope_interleaved": _Neutral("the rotated pairs are the two halves of a head", lambda value, _: value is False),
    "use_mrope": _Neutral("positions have one dimension", lambda value, _: value is False),
    "mlp_bias": _Neutral("a bias that is not there", lambda value, _: value is False),
    "lm_head_bias": _Neutral("a bias that is not there", lambda value, _: value is False),
    "qk_layernorm": _Neutral("a norm that is not there", lambda value, _: value is False),
    "use_sliding_window": _Neutral("a window that is not there", lambda value, _: value is False),
    "is_causal": _Neutral("each token sees what came before it", lambda value, _: value is True),
    "num_nextn_predict_layers": _Neutral("a draft that is not there", lambda value, _: value == 0),
    "pruned_heads": _Neutral("no head is missing", lambda value, _: not value),
    "partial_rotary_factor": _Neutral(
        "repeats what rope_parameters says",
        lambda value, config: value == ((config.rope_parameters or {}).get("partial_rotary_factor") or 1.0),
    ),
    "sliding_window_size": _Neutral(
        "repeats sliding_window", lambda value, config: value == getattr(config, "sliding_window", None)
    ),
    "layer_types": _Neutral(
        "every layer sees everything, as in a family without windows",
        lambda value, config: set(value) <= {"full_attention"} and not getattr(config, "sliding_window", None),
    ),
}
"""Keys of published configs that change no logits while they have the value that the decoder computes with. A family
that reads such a key has it in its own `keys`."""


def fused_config(config: PretrainedConfig) -> DecoderConfig:
    """Translate the Hugging Face config of a known family.

    Raises:
        Unsupported: the family, a key or a value is not known to the fused decoder.
    """
    if config.model_type not in _FAMILIES:
        raise Unsupported(f"model type {config.model_type!r}")
    _check_known(config, _FAMILIES[config.model_type])
    return decoder_config(config)


def decoder_config(config: Any) -> DecoderConfig:
    """Translate a config (`PretrainedConfig`, `GgufConfig`) of a known family whose keys are all understood.

    Raises:
        Unsupported: a value is not known to the fused decoder.
    """
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        raise Unsupported("query heads that are no multiple of the KV heads")
    if not 0 <= config.rms_norm_eps < inf:
        raise Unsupported(f"config key rms_norm_eps = {config.rms_norm_eps}")
    layers: int = config.num_hidden_layers
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "eps": config.rms_norm_eps,
        "windows": (None,) * layers,
        "rotary": (0,) * layers,
        "rotary_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "tied": bool(config.tie_word_embeddings),
    }
    return DecoderConfig(**values | _FAMILIES[config.model_type].translate(config))


# ── families ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Family:
    """Which keys the configs of one model type may have, and their translation."""

    keys: set[str]
    """Keys beside `_SHAPE`; `translate` or `decoder_config` reads each of them."""
    translate: Callable[[PretrainedConfig], dict[str, Any]]
    """Returns the fields of `DecoderConfig` that differ from those that `decoder_config` sets."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key that names the activation, and its only value."""
    only: tuple[tuple[str, Any], ...] = ()
    """Keys with the only value that they may have, beside null."""
    partial_rotary: bool = False
    """Whether `translate` reads `partial_rotary_factor`: only the first numbers of each head are rotated."""
    ropes_by_layer_type: bool = False
    """Whether `rope_parameters` holds one rope for each type of layer."""


def _llama(config: PretrainedConfig) -> dict[str, Any]:
    return {}


def _mistral(config: PretrainedConfig) -> dict[str, Any]:
    return {"windows": (config.sliding_window,) * config.num_hidden_layers}


def _qwen2(config: PretrainedConfig) -> dict[str, Any]:
    return {"windows": _windows(config), "qkv_bias": True}


def _qwen3(config: PretrainedConfig) -> dict[str, Any]:
    return {"windows": _windows(config), "qk_norm": "head"}


def _qwen3_moe(config: PretrainedConfig) -> dict[str, Any]:
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    experts = ExpertsConfig(
        count=config.num_experts,
        per_row=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalise=config.norm_topk_prob,
        layers=frozenset(i for i in layers if (i + 1) % step == 0 and i not in config.mlp_only_layers),
    )
    if not 1 <= experts.per_row <= experts.count:
        raise Unsupported(f"{experts.per_row} of {experts.count} experts")
    window = config.sliding_window if config.use_sliding_window else None
    return {"windows": (window,) * len(layers), "qk_norm": "head", "experts": experts if experts.layers else None}


def _smollm3(config: PretrainedConfig) -> dict[str, Any]:
    rotary = tuple(0 if rotates else None for rotates in config.no_rope_layers[: config.num_hidden_layers])
    return {"windows": _windows(config), "rotary": rotary}


def _phi3(config: PretrainedConfig) -> dict[str, Any]:
    rotated = rotary_dim(config)
    if rotated % 2 or not rotated:
        raise Unsupported(f"{rotated} rotated numbers of a head")
    return {"windows": (config.sliding_window,) * config.num_hidden_layers, "merged": True, "rotary_dim": rotated}


def _granite(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_divisor": config.logits_scaling,
    }


def _olmo2(config: PretrainedConfig) -> dict[str, Any]:
    return {"norms": POST_NORM, "wide_norms": True, "qk_norm": "projection"}


def _gemma2(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "windows": _by_type(config, config.sliding_window),
        "norms": BOTH_NORMS,
        "norm_offset": 1.0,
        "wide_norms": True,
        "activation": "gelu_tanh",
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "embedding_scale": config.hidden_size**0.5,
        "round_embedding_scale": True,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: PretrainedConfig) -> dict[str, Any]:
    kinds = config.layer_types[: config.num_hidden_layers]
    ropes = tuple(sorted(set(kinds)))
    rotary = tuple(ropes.index(kind) for kind in kinds)
    return {**_gemma2(config), "ropes": ropes, "rotary": rotary, "qk_norm": "head"}


_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_GEMMA = {
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",  # transformers uses `hidden_activation`
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
}
_FAMILIES: dict[str, _Family] = {
    "llama": _Family({"attention_bias", "mlp_bias"}, _llama),
    "mistral": _Family({"sliding_window"}, _mistral, only=(("attention_bias", False), ("use_sliding_window", True))),
    "qwen2": _Family(_WINDOWS, _qwen2, only=(("attention_bias", True), ("qkv_bias", True))),
    "qwen3": _Family(_WINDOWS | {"attention_bias"}, _qwen3),
    "qwen3_moe": _Family(
        {
            "attention_bias",
            "decoder_sparse_step",
            "max_window_layers",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "use_sliding_window",
        },
        _qwen3_moe,
        only=(("qkv_bias", False), ("shared_expert_intermediate_size", 0), ("use_qk_norm", True)),
    ),
    "smollm3": _Family(
        _WINDOWS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        _smollm3,
    ),
    "phi3": _Family(
        {"original_max_position_embeddings", "sliding_window"},
        _phi3,
        only=(
            ("attention_bias", False),
            ("full_attn_mod", 1),
            ("interpolate_factor", 1),
        ),
        partial_rotary=True,
    ),
    "granite": _Family(
        {
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "mlp_bias",
            "residual_multiplier",
        },
        _granite,
    ),
    "olmo2": _Family({"attention_bias"}, _olmo2),
    "gemma2": _Family(
        _GEMMA,
        _gemma2,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        only=(("use_bidirectional_attention", False),),
    ),
    "gemma3_text": _Family(
        _GEMMA | {"sliding_window_pattern"},
        _gemma3,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        # transformers does not pass this soft-cap to its attention, so it is unclear what such a config means.
        only=(("use_bidirectional_attention", False), ("attn_logit_softcapping", None)),
        ropes_by_layer_type=True,
    ),
}


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_known(config: PretrainedConfig, family: _Family) -> None:
    """Raise `Unsupported` for the first key or value that neither the family nor the lists above know."""
    from transformers import PretrainedConfig

    base = PretrainedConfig().to_dict()
    activation, computed = family.activation
    only = dict(family.only)
    known = (_SHAPE | family.keys | _HARMLESS.keys() | {activation}) - only.keys()
    for key, value in config.to_dict().items():
        if value is None or key in known or key in base or key.startswith("_"):
            continue
        harmless = value == only[key] if key in only else key in _NEUTRAL and _NEUTRAL[key].test(value, config)
        if not harmless:
            raise Unsupported(f"config key {key} = {_short(value)}")
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False):
            raise Unsupported(f"config key {flag} = True")
    if getattr(config, activation) != computed:
        raise Unsupported(f"activation {getattr(config, activation)!r}")
    rope = config.rope_parameters or {}
    for parameters in rope.values() if family.ropes_by_layer_type else (rope,):
        _check_rope(parameters, partial=family.partial_rotary)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_rope(rope: dict[str, Any], partial: bool) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise Unsupported(f"rope type {kind!r}")
    if not partial and rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise Unsupported("a partial rotary factor")
    allowed = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key, value in rope.items():
        if key == "finetuned" and value is True:  # if false, the original code of YaRN scales by the length
            continue
        if key not in allowed and value is not None:
            raise Unsupported(f"rope key {key} = {_short(value)}")


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, for families that enable windows with the key `use_sliding_window`."""
    return _by_type(config, config.sliding_window if getattr(config, "use_sliding_window", False) else None)


def _by_type(config: PretrainedConfig, window: int | None) -> tuple[int | None, ...]:
    """Return `window` for each layer of the type `sliding_attention`, None for the other layers."""
    layers: int = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"layer type {kind!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
