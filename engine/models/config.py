"""What the fused decoder must know of a model, from a Hugging Face config that is understood to the last key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from engine.models.rope import ROPE_KEYS, rotary_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Unsupported(Exception):
    """The fused decoder does not know something in this config; the message says what."""


Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of a layer's norms: before and after attention, before and after the feed-forward."""
PRE_NORM: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH_NORMS: Norms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of a feed-forward."""

    count: int
    per_row: int
    """Experts that each token goes through."""
    intermediate_size: int
    """Of one expert."""
    normalise: bool
    """Whether the weights of a token's experts sum to 1."""
    layers: frozenset[int]
    """The layers that have experts; the others have one feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder with grouped-query attention, rotary positions, RMSNorm and a gated feed-forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    """One a layer; None sees everything."""
    ropes: tuple[str | None, ...] = (None,)
    """The kinds of layer that have rotary frequencies of their own; None: the model has one set."""
    rotary: tuple[int | None, ...]
    """One a layer: which of `ropes` rotates its queries and keys; None: they are not rotated."""
    rotary_dim: int
    """How many numbers at the beginning of each head are rotated."""
    attention_scale: float
    """What products of queries and keys are multiplied with."""
    attention_softcap: float | None = None
    qk_norm: Literal["head", "projection"] | None = None
    """Whether queries and keys are normalised, each head alone or all heads of a token at once."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    merged: bool = False
    """Whether the checkpoint holds q, k and v as one matrix, and gate and up."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertsConfig | None = None
    norms: Norms = PRE_NORM
    norm_offset: float = 0.0
    """What is added to the norms' stored weights."""
    wide_norms: bool = False
    """Whether the norms' weights multiply in fp32, before the result is rounded."""
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    """Whether that scale is rounded to the model's dtype."""
    residual_scale: float = 1.0
    """What a branch is multiplied with before it is added."""
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False

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
"""Keys of published configs that change no logits, whatever their value, and why. Those that every config has are known
from the base class."""


@dataclass(frozen=True)
class _Neutral:
    """A key that changes no logits as long as its value passes a test."""

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
"""Keys of published configs that change no logits as long as they have the value that the decoder computes with. A
family that reads such a key lists it itself."""


def fused_config(config: PretrainedConfig) -> DecoderConfig:
    """Translate a config of a known family.

    Raises:
        Unsupported: another family, or a key or a value that the fused decoder does not know.
    """
    if config.model_type not in _FAMILIES:
        raise Unsupported(f"model type {config.model_type!r}")
    _check_known(config, _FAMILIES[config.model_type])
    return decoder_config(config)


def decoder_config(config: Any) -> DecoderConfig:
    """Translate a config (`PretrainedConfig`, `GgufConfig`) of a known family whose keys are all understood.

    Raises:
        Unsupported: a value that the fused decoder does not know.
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
    """What configs of one model type may say."""

    keys: set[str]
    """Beyond `_SHAPE`, all of it handled by `translate` or `fused_config`."""
    translate: Callable[[PretrainedConfig], dict[str, Any]]
    """Fields of `DecoderConfig` that differ from what `fused_config` sets."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key that names the activation, and the one that is computed."""
    only: tuple[tuple[str, Any], ...] = ()
    """Keys that may be there with this value or none."""
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
    "hidden_act",  # `hidden_activation` is what counts
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
        # transformers does not hand this soft-cap to its attention; which of the two is meant is not for us to say.
        only=(("use_bidirectional_attention", False), ("attn_logit_softcapping", None)),
        ropes_by_layer_type=True,
    ),
}


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_known(config: PretrainedConfig, family: _Family) -> None:
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
        if key == "finetuned" and value is True:  # else the scaling of YaRN's first code would follow the length
            continue
        if key not in allowed and value is not None:
            raise Unsupported(f"rope key {key} = {_short(value)}")


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """For families that turn windows on with a key."""
    return _by_type(config, config.sliding_window if getattr(config, "use_sliding_window", False) else None)


def _by_type(config: PretrainedConfig, window: int | None) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"layer type {kind!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
