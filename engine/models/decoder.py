"""One decoder for Llama, Mistral, Qwen2, Qwen3, SmolLM2 and SmolLM3: what differs between them is in `DecoderConfig`.

Projections that read the same input are one matrix (q, k and v; gate and up). Rows are tokens of any number of
sequences; only attention looks beyond its own row, so that a row's result depends on its sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.models.config import DecoderConfig
from kernels.attention.base import AttentionBackend
from kernels.linear import Linear
from kernels.ops import add_rms_norm, rms_norm


class Tensors(Protocol):
    """Where parameters come from, under their Hugging Face names."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype and device; an error if it is missing or of another shape."""
        ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    """Gated: `silu(gate) * up`."""
    down: Linear


@dataclass(frozen=True, slots=True)
class Parameters:
    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


class Decoder:
    """A loaded model bound to an attention backend (`engine.batch.Model`)."""

    def __init__(
        self, config: DecoderConfig, parameters: Parameters, table: tuple[Tensor, Tensor], backend: AttentionBackend
    ) -> None:
        self.vocab_size = config.vocab_size
        self.config = config
        self.parameters = parameters
        self.backend = backend
        self._cos, self._sin = table
        self._scale = config.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits `[R, vocab]` of the sampled rows; the KV of all rows is written."""
        positions = batch.positions
        cos, sin = self._cos[positions], self._sin[positions]  # [T, head_dim / 2]
        residual = F.embedding(batch.token_ids, self.parameters.embedding)  # [T, hidden]
        x = rms_norm(residual, self.parameters.layers[0].input_norm, self.config.eps)
        for index, layer in enumerate(self.parameters.layers):
            x = self._attention(index, layer, x, cos, sin, batch)
            x, residual = add_rms_norm(x, residual, layer.post_norm, self.config.eps)
            x = layer.down(layer.gate_up(x))
            if index + 1 < len(self.parameters.layers):
                following = self.parameters.layers[index + 1].input_norm
                x, residual = add_rms_norm(x, residual, following, self.config.eps)
        return self._logits((x + residual)[batch.sample_rows])

    def _attention(self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, config.head_dim)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm, config.eps
        rotation = (cos, sin) if config.rotary[index] else None
        q = self.backend.write_rotated(index, qkv, batch.attention, norms=norms, rotation=rotation)
        out = self.backend.attend(index, q, batch.attention, scale=self._scale, window=config.windows[index])
        return layer.out(out.view(-1, heads * config.head_dim))

    def _logits(self, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty((0, self.vocab_size))
        return self.parameters.head(rms_norm(x, self.parameters.norm, self.config.eps))


def build_parameters(config: DecoderConfig, tensors: Tensors, *, int8: bool = False) -> Parameters:
    """Take every parameter of the model from `tensors`, merging what the forward merges; linears in int8 if asked."""
    embedding, head = _embeddings(config, tensors)
    return Parameters(
        embedding=embedding,
        layers=tuple(_layer(config, tensors, f"model.layers.{i}", int8) for i in range(config.num_layers)),
        norm=tensors.take("model.norm.weight", (config.hidden_size,)),
        head=Linear(head, int8=int8),
    )


def _embeddings(config: DecoderConfig, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Input and output embeddings. Tied ones may both be there; if they differ each is used, as transformers does."""
    shape = (config.vocab_size, config.hidden_size)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    if not config.tied:
        return tensors.take(names[0], shape), tensors.take(names[1], shape)
    found = [tensors.take(name, shape) for name in names if tensors.has(name)]
    if not found:
        return tensors.take(names[0], shape), tensors.take(names[1], shape)
    if len(found) == 2 and torch.equal(found[0], found[1]):
        found.pop()
    return found[0], found[-1]


def _layer(config: DecoderConfig, tensors: Tensors, prefix: str, int8: bool) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, size: int) -> Tensor:
        return tensors.take(f"{prefix}.{name}.weight", (size,))

    def linear(parts: tuple[tuple[str, int], ...], inputs: int, bias: bool, gated: bool = False) -> Linear:
        weight = torch.cat([tensors.take(f"{prefix}.{name}.weight", (size, inputs)) for name, size in parts])
        biases = [tensors.take(f"{prefix}.{name}.bias", (size,)) for name, size in parts] if bias else []
        return Linear(weight, torch.cat(biases) if bias else None, gated=gated, int8=int8)

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(
            (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)), hidden, config.qkv_bias
        ),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        out=linear((("self_attn.o_proj", hidden),), q, config.out_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, config.mlp_bias, True),
        down=linear((("mlp.down_proj", hidden),), inner, config.mlp_bias),
    )
