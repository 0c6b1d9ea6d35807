"""Translates the metadata of a GGUF file to the Hugging Face config of the same model.

Keys are those of llama.cpp (gguf-py `constants.py`). Constants that llama.cpp has in the graph of a family, since the
format has no key for them, are in the entry of the family here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.models.config import Unsupported
from engine.models.weights import LoadError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}
_YARN = frozenset({"rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"})


_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0,
    "leading_dense_block_count": 0,
    "logit_scale": 1,
    "pooling_type": 0,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
"""Key → the value with which it changes nothing, for architectures that do not read the key."""


class GgufConfig:
    """The Hugging Face config of a file, as plain attributes.

    transformers is not imported, since that takes as long as loading a small model; `pretrained` imports it.
    """

    def __init__(self, model_type: str, values: Values) -> None:
        self.model_type = model_type
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"GGUF config of {self.__dict__.get('model_type')} has no {name!r}") from None

    def get_text_config(self) -> GgufConfig:
        """Return this config: the file holds only a language model."""
        return self

    def pretrained(self) -> PretrainedConfig:
        """Return this config as an object of transformers.

        Raises:
            LoadError: transformers refuses the values.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        try:
            config: PretrainedConfig = AutoConfig.for_model(self.model_type, **self._values)
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
            raise LoadError(f"the metadata makes no {self.model_type} config: {error}") from error
        return config


def read_config(file: GgufFile) -> GgufConfig:
    """Return the Hugging Face config of a file.

    Raises:
        Unsupported: the architecture or a key is not understood.
        LoadError: a key is missing, or values contradict each other.
    """
    if file.architecture not in ARCHITECTURES:
        raise Unsupported(f"GGUF architecture {file.architecture!r} is not read; take the model's safetensors")
    try:
        return GgufConfig(*_read(file, ARCHITECTURES[file.architecture]))
    except (ArithmeticError, ValueError, TypeError, LookupError) as error:
        raise LoadError(f"the metadata of {file.path} makes no config: {error!r}") from error


def _read(file: GgufFile, architecture: Architecture) -> tuple[str, Values]:
    heads, hidden = file.count("attention.head_count"), file.count("embedding_length")
    head_dim = file.count("attention.key_length", hidden // heads)
    _check_metadata(file, architecture, head_dim)
    return architecture.read(
        file,
        {
            "vocab_size": file.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": file.count("feed_forward_length"),
            "num_hidden_layers": file.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": file.kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": file.count("context_length"),
            "rms_norm_eps": file.hyper("attention.layer_norm_rms_epsilon"),
            "rope_parameters": _rope(file),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in file.names(),
            "tie_word_embeddings": "lm_head.weight" not in file.names(),
            "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted(file.eos_token_ids()) or None,
            "pad_token_id": file.field("tokenizer.ggml.padding_token_id"),
        },
    )


def _rope(file: GgufFile) -> Values:
    rope: Values = {"rope_type": "default", "rope_theta": file.hyper("rope.freq_base", 10000.0)}
    factor = file.hyper("rope.scaling.factor", file.hyper("rope.scale_linear", 0))
    # If there is a factor but no type, llama.cpp scales linearly.
    kind = file.field(f"{file.architecture}.rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "longrope" and ARCHITECTURES[file.architecture].reads_longrope):
        return rope
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"GGUF key {file.architecture}.rope.scaling.type = {kind!r}")
    if not factor:
        raise LoadError(f"{file.path} has no {file.architecture}.rope.scaling.factor")
    if not 0 < factor < math.inf:
        raise LoadError(f"{file.path}: {file.architecture}.rope.scaling.factor is {factor}")
    rope |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": file.hyper(
                "rope.scaling.original_context_length", file.hyper("context_length")
            ),
            # The factor of the file multiplies that of the method itself (Peng et al. 2023, eq. 22).
            "attention_factor": file.hyper("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0),
            "beta_fast": float(file.hyper("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(file.hyper("rope.scaling.yarn_beta_slow", 1.0)),
        }
    return rope


def _check_metadata(file: GgufFile, architecture: Architecture, head_dim: int) -> None:
    yarn = file.field(f"{file.architecture}.rope.scaling.type") == "yarn"
    known = _UNDERSTOOD | architecture.keys | (_YARN if yarn else frozenset())
    for key in file.metadata_keys():
        name = key.removeprefix(f"{file.architecture}.")
        if name == key or name in known:
            continue
        value = file.field(key)
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise Unsupported(f"GGUF key {key} = {value if not isinstance(value, list) else 'a list'!r}")
    if file.hyper("rope.dimension_count", head_dim) != head_dim and not architecture.partial_rotary:
        raise Unsupported(f"GGUF key {file.architecture}.rope.dimension_count: only a part of a head is rotated")
    if file.hyper("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"GGUF key {file.architecture}.attention.value_length: values of another size than keys")


# ── architectures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Architecture:
    """The metadata that files of one architecture may have, and their translation to a Hugging Face config."""

    read: Callable[[GgufFile, Values], tuple[str, Values]]
    """Returns the model type and all values of the config, from the values that all architectures have in common."""
    keys: frozenset[str] = frozenset()
    """Keys beside `_UNDERSTOOD`."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors of a block that `engine.models.gguf` does not have: llama.cpp's → Hugging Face's."""
    partial_rotary: bool = False
    """Whether `read` reads `rope.dimension_count`: only the first numbers of each head are rotated."""
    reads_longrope: bool = False
    """Whether `read` reads the scaling `longrope`, whose factors are tensors."""
    permuted: bool = False
    """Whether llama.cpp stores the rows of q and k with the two halves of a head interleaved."""
    norms_less: float = 0.0
    """Number to subtract from the norms of the file to get those of a checkpoint."""
    control_takes_space: bool = False
    """Whether control tokens absorb white space after them (SentencePiece only); the format has no key for this."""


def _as(model_type: str, **more: Any) -> Callable[[GgufFile, Values], tuple[str, Values]]:
    return lambda file, values: (model_type, values | more)


def _llama(file: GgufFile, values: Values) -> tuple[str, Values]:
    window = file.hyper("attention.sliding_window", 0)
    if not window:
        return "llama", values | {"mlp_bias": _has_mlp_bias(file)}
    if values.pop("attention_bias"):
        raise Unsupported("biases next to a sliding window")
    return "mistral", values | {"sliding_window": window}


def _has_mlp_bias(file: GgufFile) -> bool:
    return "model.layers.0.mlp.up_proj.bias" in file.names()


def _qwen2(file: GgufFile, values: Values) -> tuple[str, Values]:
    del values["attention_bias"]
    if values.pop("head_dim") * values["num_attention_heads"] != values["hidden_size"]:
        raise Unsupported("a Qwen2 head size other than hidden / heads")
    return "qwen2", values


def _qwen3_moe(file: GgufFile, values: Values) -> tuple[str, Values]:
    # llama.cpp's graph has experts in every layer, and normalises their weights.
    return "qwen3_moe", values | {
        "num_experts": file.hyper("expert_count"),
        "num_experts_per_tok": file.hyper("expert_used_count"),
        "moe_intermediate_size": file.hyper("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _smollm3(file: GgufFile, values: Values) -> tuple[str, Values]:
    # llama.cpp's graph rotates in three of four layers.
    return "smollm3", values | {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(values["num_hidden_layers"])]}


def _phi3(file: GgufFile, values: Values) -> tuple[str, Values]:
    head_dim = values.pop("head_dim")
    if head_dim * values["num_attention_heads"] != values["hidden_size"]:
        raise Unsupported("a Phi-3 head size other than hidden / heads")
    rope = values["rope_parameters"]
    rope["partial_rotary_factor"] = file.hyper("rope.dimension_count", head_dim) / head_dim
    original = file.hyper("rope.scaling.original_context_length", values["max_position_embeddings"])
    short, long = file.rope_factor_lists()
    if bool(short) != bool(long):
        raise LoadError(f"{file.path} has rope factors for {'short' if short else 'long'} sequences only")
    if file.field("phi3.rope.scaling.type") == "longrope" and not short:
        raise LoadError(f"{file.path} has no tensors of rope factors, though its rope.scaling.type is longrope")
    if short:
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": file.hyper("rope.scaling.attn_factor", 1.0),
        }
    return "phi3", values | {
        "original_max_position_embeddings": original,
        "sliding_window": file.hyper("attention.sliding_window", 0) or None,
    }


def _granite(file: GgufFile, values: Values) -> tuple[str, Values]:
    return "granite", values | {
        "mlp_bias": _has_mlp_bias(file),
        "attention_multiplier": file.hyper("attention.scale", values["head_dim"] ** -0.5),
        "embedding_multiplier": file.hyper("embedding_scale", 1.0),
        "residual_multiplier": file.hyper("residual_scale", 1.0),
        "logits_scaling": file.hyper("logit_scale", 1.0),
    }


def _gemma2(file: GgufFile, values: Values) -> tuple[str, Values]:
    return "gemma2", _gemma(file, values, pattern=2, largest=46) | {
        "attn_logit_softcapping": file.hyper("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.hyper("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, values: Values) -> tuple[str, Values]:
    local = {"rope_type": "default", "rope_theta": file.hyper("rope.freq_base_swa", 10000.0)}
    return "gemma3_text", _gemma(file, values, pattern=6, largest=62) | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.hyper("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
    }


def _gemma(file: GgufFile, values: Values, pattern: int, largest: int) -> Values:
    """Return the values that Gemma 2 and 3 have in common.

    Args:
        file: the file.
        values: the values that all architectures have in common.
        pattern: every `pattern`-th layer has no window, unless the file says otherwise.
        largest: number of layers of the 27B model, which alone scales by hidden / heads; the format has no key for it.
    """
    layers: int = values["num_hidden_layers"]
    heads: int = values["num_attention_heads"]
    stated = file.field(f"{file.architecture}.attention.sliding_window_pattern", pattern)
    slides = stated if isinstance(stated, list) else [(i + 1) % stated != 0 for i in range(layers)]
    return values | {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": file.hyper("attention.sliding_window"),
        "query_pre_attn_scalar": values["hidden_size"] // heads if layers == largest else values["head_dim"],
    }


_WINDOW = frozenset({"attention.sliding_window"})
_PATTERN = _WINDOW | {"attention.sliding_window_pattern", "final_logit_softcapping"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_BOTH_NORMS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, _WINDOW, permuted=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_as("qwen3")),
    "qwen3moe": Architecture(
        _qwen3_moe,
        frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
        {"ffn_gate_inp": "mlp.gate"},
    ),
    "smollm3": Architecture(_smollm3, permuted=True),
    "phi3": Architecture(
        _phi3,
        _WINDOW | {"rope.scaling.attn_factor"},
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rotary=True,
        reads_longrope=True,
        control_takes_space=True,
    ),
    "granite": Architecture(
        _granite, frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}), permuted=True
    ),
    "olmo2": Architecture(_as("olmo2"), tensors=_POST_NORMS),
    "gemma2": Architecture(_gemma2, _PATTERN | {"attn_logit_softcapping"}, _BOTH_NORMS, norms_less=1.0),
    "gemma3": Architecture(_gemma3, _PATTERN | {"rope.freq_base_swa"}, _BOTH_NORMS, norms_less=1.0),
}
