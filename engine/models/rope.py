"""Computes the tables of rotary embeddings, once when the model is loaded.

Functions of transformers compute the scaled frequencies. Where these depend on the length (dynamic, longrope), the
length is `max_model_len`: the rotation of a row must not depend on other rows, nor change while keys are cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine.models.gguf_config import GgufConfig

_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor"} | _YARN,
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
"""Kind of rope scaling → keys that it reads."""


def rotary_dim(config: PretrainedConfig | GgufConfig) -> int:
    """Return how many elements of a head are rotated: all, or the share `partial_rotary_factor`."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))


def inverse_frequencies(
    config: PretrainedConfig | GgufConfig, max_model_len: int, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Compute the rotary frequencies.

    Args:
        config: the model.
        max_model_len: length at which frequencies that depend on it are computed, in tokens.
        layer_type: key of a config with frequencies for each type of layer; None: it has one set.

    Returns:
        The frequencies, fp32 `[rotary_dim / 2]`, and a factor for cosine and sine.
    """
    rope: dict[str, Any] = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = rope.get("rope_type", "default")
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # imported here since it takes a second

        make: Any = getattr(config, "pretrained", None)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            config if make is None else make(), torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
        )
        return frequencies.float(), float(factor)
    dim = rotary_dim(config)
    # Su et al. 2021, eq. 15; the same order of operations as in transformers, for equal rounding.
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0


def rotary_table(frequencies: Tensor, factor: float, length: int, pairs: int | None = None) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the positions 0 to `length - 1`.

    Args:
        frequencies: fp32 `[rotary_dim / 2]`.
        factor: for cosine and sine.
        length: number of positions.
        pairs: `head_dim / 2`; pairs without a frequency are not rotated (partial rotation). None: all have one.

    Returns:
        Each fp32 `[length, pairs]`.
    """
    angles = torch.arange(length, dtype=torch.float)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    still = 0 if pairs is None else pairs - frequencies.shape[0]
    return F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))


def position_limit(config: PretrainedConfig | GgufConfig) -> int:
    """Return the length of the longest sequence for which the rope of this config is made, in tokens."""
    limit = int(config.max_position_embeddings)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    if kind == "yarn":
        return max(limit, int((rope.get("original_max_position_embeddings") or limit) * factor))
    return limit
