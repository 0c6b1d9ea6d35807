"""Runs any causal language model of transformers over our paged attention.

transformers lets a library register an attention function under a name. A model that is set to this name builds no mask
and passes the extra keyword arguments of its forward pass to the function in each layer, so it can compute a batch of
prefill chunks and decodes as one row of tokens. If the model needs anything of attention beyond causality, window and
soft-cap, it is refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.batch import Batch
from engine.models.config import Unsupported
from kernels.attention import get_backend
from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec

ATTENTION_NAME = "tokenmill"

_IRRELEVANT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments of attention functions that do not change what they compute."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass
class _Call:
    """Arguments of our attention function, passed through the forward pass of the model."""

    backend: AttentionBackend
    batch: AttentionBatch
    layers: set[int] = field(default_factory=set)
    """Indices of the layers that called the function, for `check`."""


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    tokenmill: _Call | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for one layer, as the registered function.

    Args:
        q: `[1, heads, T, head_dim]`; `k` and `v` have KV heads.

    Returns:
        `[1, T, heads, head_dim]`, and None for the attention weights.

    Raises:
        Unsupported: the model needs attention that the backends do not have.
    """
    if tokenmill is None:
        raise Unsupported("the model does not pass keyword arguments to its attention")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = {name: value for name, value in kwargs.items() if value is not None and name not in _IRRELEVANT}
    if given or attention_mask is not None or dropout or not causal:
        what = sorted(given) or ["a mask, dropout or bidirectional attention"]
        raise Unsupported(f"the model needs attention with {', '.join(what)}")
    _check_layer(module, k, v, sliding_window, tokenmill.backend.spec)
    layer: int = module.layer_idx
    tokenmill.layers.add(layer)
    backend, batch = tokenmill.backend, tokenmill.batch
    backend.write(layer, k[0].transpose(0, 1), v[0].transpose(0, 1), batch)
    out = backend.attend(
        layer,
        q[0].transpose(0, 1).contiguous(),
        batch,
        scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


def _check_layer(module: Any, k: Tensor, v: Tensor, window: int | None, spec: CacheSpec) -> None:
    shape = (spec.num_kv_heads, spec.head_dim)
    if (k.shape[1], k.shape[3]) != shape or (v.shape[1], v.shape[3]) != shape:
        raise Unsupported(f"layer {module.layer_idx} has keys and values of another shape than {shape} (heads, size)")
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types and types[module.layer_idx] == "sliding_attention" and window is None:
        raise Unsupported(f"layer {module.layer_idx} has a window, but does not pass it to its attention function")


def register() -> None:
    """Register our attention function with transformers; may be called several times."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


class TransformersModel:
    """A transformers model bound to an attention backend (`engine.batch.Model`)."""

    def __init__(self, model: Any, backend: AttentionBackend) -> None:
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.backend = backend
        self._model = model

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute all rows and write their K and V; return the logits of the sampled rows, fp32 `[R, vocab]`."""
        return _run(self._model, batch, _Call(self.backend, batch.attention))


def _run(model: Any, batch: Batch, call: _Call) -> Tensor:
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        tokenmill=call,
    )
    logits: Tensor = output.logits[0]
    if logits.shape[0] != batch.sample_rows.shape[0]:
        raise Unsupported("the model does not take `logits_to_keep`")
    return logits.float()


def cache_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the numbers of layers and KV heads, and the head size, of a transformers model.

    Raises:
        Unsupported: the model has layers other than causal attention.
    """
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise Unsupported(f"layer type {kind!r}")
    if getattr(text, "use_bidirectional_attention", None):
        raise Unsupported("bidirectional attention")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_dim


def freeze_rope(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix rotary frequencies that depend on the longest position of a batch (dynamic, longrope) at `max_model_len`."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and ("dynamic" in kinds or kinds == "longrope"):
            frequencies, factor = ROPE_INIT_FUNCTIONS[kinds](
                module.config, module.inv_freq.device, seq_len=max_model_len
            )
            module.inv_freq = module.original_inv_freq = frequencies
            module.attention_scaling = factor
            module.rope_type = "default"
        elif isinstance(kinds, dict) and any("dynamic" in kind or kind == "longrope" for kind in kinds.values()):
            raise Unsupported("length-dependent rope that differs between layers")


@torch.inference_mode()
def check(model: Any, spec: CacheSpec) -> None:
    """Compare the logits of some tokens over our attention, in two chunks, with those over the model's own attention.

    Raises:
        Unsupported: the model cannot run over our attention, or its logits differ.
    """
    if not model._supports_attention_backend:
        raise Unsupported("the model has no pluggable attention")
    text = model.config.get_text_config()
    ids = torch.arange(8, device=spec.device) * 7919 % text.vocab_size
    model.set_attn_implementation("eager")
    whole = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(ATTENTION_NAME)
    spec = dataclasses.replace(spec, block_size=16)
    backend = get_backend("reference", spec)
    backend.bind(torch.zeros((1, backend.block_bytes), dtype=torch.uint8, device=spec.device))
    parts = []
    for start, stop in ((0, 5), (5, 8)):
        rows = torch.arange(start, stop, device=spec.device)
        attention = AttentionBatch(rows, rows, (0, stop - start), (stop,), ((0,),))
        call = _Call(backend, attention)
        parts.append(_run(model, Batch(ids[rows], attention, rows - start), call))
        if call.layers != set(range(spec.num_layers)):
            raise Unsupported("not every layer is an attention layer")
    error = (torch.cat(parts) - whole).abs().amax(-1) / whole.std(-1).clamp_min(1e-6)
    # The median row, since in low precision a mixture of experts may route a token to another expert.
    if not error.median() < (1e-2 if spec.dtype == torch.float32 else 0.3):
        raise Unsupported(
            f"the paged path gives other logits than the model's own attention (by {error.median():.2g} std)"
        )
