"""The description of a model that the fused decoder computes; `engine.models.families` makes it from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class Unsupported(Exception):
    """The fused decoder cannot run a config; the message names the key, value or model type that it does not know."""


Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of a layer's norms: before attention, after it, before the feed-forward, after it; None: there is no norm."""
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
    """A mixture of experts in place of the feed-forward of some layers."""

    count: int
    per_row: int
    """Number of experts that compute each token."""
    intermediate_size: int
    """Inner size of each expert's feed-forward."""
    normalise: bool
    """Whether the weights of a token's experts sum to 1."""
    layers: frozenset[int]
    """Indices of the layers that have experts; the other layers have one feed-forward."""


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
    """For each layer, how many tokens a token attends to, itself included; None: all before it."""
    ropes: tuple[str | None, ...] = (None,)
    """Names of the sets of rotary frequencies; None: the only set, without a name."""
    rotary: tuple[int | None, ...]
    """For each layer, the index in `ropes` of the set that rotates its queries and keys; None: no rotation."""
    rotary_dim: int
    """How many elements at the start of each head are rotated."""
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_softcap: float | None = None
    qk_norm: Literal["head", "projection"] | None = None
    """Normalise queries and keys: each head by itself, or all heads of a token together; None: no norm."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    merged: bool = False
    """Whether the checkpoint holds q, k and v as one matrix, and gate and up as one matrix."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertsConfig | None = None
    norms: Norms = PRE_NORM
    norm_offset: float = 0.0
    """Number that is added to the norms' stored weights."""
    wide_norms: bool = False
    """Whether a norm multiplies with its weights in fp32, before it rounds to the model's dtype."""
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    """Whether `embedding_scale` is rounded to the model's dtype."""
    residual_scale: float = 1.0
    """Factor of the output of attention and feed-forward before it is added to the residual."""
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)
