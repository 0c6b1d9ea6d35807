"""Rotary tables, made once: a table fixes the frequencies for the life of the model.

The scaled kinds come from transformers' own functions. The two whose frequencies depend on the length (dynamic,
longrope) are evaluated at `max_model_len`: a row's rotation must not depend on what else is in the batch, nor change
under keys that are cached already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor"} | _YARN,
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
"""The kinds of rope scaling and the keys that each reads."""


def inverse_frequencies(config: PretrainedConfig, max_model_len: int) -> tuple[Tensor, float]:
    """fp32 `[head_dim / 2]`, and the factor that cosine and sine are multiplied with."""
    rope: dict[str, Any] = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
        return frequencies.float(), float(factor)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Su et al. 2021, eq. 15; the order of operations is transformers', for equal rounding.
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0


def rotary_table(frequencies: Tensor, factor: float, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions 0 to `length - 1`, each fp32 `[length, head_dim / 2]`."""
    angles = torch.arange(length, dtype=torch.float)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def position_limit(config: PretrainedConfig) -> int:
    """The longest sequence that the rope of this config is made for, in tokens."""
    limit = int(config.max_position_embeddings)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    if kind == "yarn":
        return max(limit, int((rope.get("original_max_position_embeddings") or limit) * factor))
    return limit
