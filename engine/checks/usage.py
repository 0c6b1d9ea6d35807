"""The shapes and options with which a model calls the kernels, and with which they are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from engine.models.config import ExpertsConfig
from engine.models.loading import LoadedModel
from kernels.attention.base import CacheSpec
from kernels.linear import PLAIN, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sizes and options of one model. Size 0: the model does not use the operation, or it is not known."""

    spec: CacheSpec
    """The shape of the KV cache of one layer."""
    num_heads: int
    scale: float
    """Factor of the attention scores."""
    windows: tuple[int | None, ...] = (None,)
    """Distinct windows of the layers."""
    softcap: float | None = None
    head_norm: bool = False
    """Whether a norm is applied to each head of queries and keys."""
    rotated: bool = True
    eps: float = 1e-6
    hidden_size: int = 0
    gated: tuple[tuple[str, int], ...] = ()
    """Activation (`silu` or `gelu_tanh`) and number of columns of each gated product."""
    wide_norms: bool = False
    """Whether weights of norms are fp32."""
    logit_softcap: float | None = None
    vocab_size: int = 0
    num_ids: int = 0
    precision: Precision = PLAIN
    experts: ExpertsConfig | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        return self.spec.device

    @classmethod
    def of(cls, loaded: LoadedModel, spec: CacheSpec) -> Usage:
        """Return the usage of a model. Of a model of transformers only attention and sampling are known."""
        one_layer = dataclasses.replace(spec, num_layers=1)
        config = loaded.decoder
        if config is None:
            return cls(
                spec=one_layer,
                num_heads=spec.num_heads or spec.num_kv_heads,
                scale=float(spec.head_dim**-0.5),
                vocab_size=loaded.vocab_size,
                num_ids=loaded.tokenizer.size,
            )
        inner = [config.intermediate_size]
        if config.experts is not None:
            inner.append(config.experts.intermediate_size)
        return cls(
            spec=one_layer,
            num_heads=config.num_heads,
            scale=config.attention_scale,
            windows=tuple(dict.fromkeys(config.windows)),
            softcap=config.attention_softcap,
            head_norm=config.qk_norm == "head",
            rotated=any(rope is not None for rope in config.rotary),
            eps=config.eps,
            hidden_size=config.hidden_size,
            gated=tuple((config.activation, size) for size in dict.fromkeys(inner) if size),
            wide_norms=config.wide_norms,
            logit_softcap=config.logit_softcap,
            vocab_size=config.vocab_size,
            num_ids=loaded.tokenizer.size,
            precision=loaded.precision,
            experts=config.experts,
        )
