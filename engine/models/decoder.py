"""One decoder for Llama and its many relatives: what differs between them is in `DecoderConfig`.

Projections that read the same input are one matrix (q, k and v; gate and up). Rows are tokens of any number of
sequences; only attention looks beyond its own row, so that a row's result depends on its sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.models.config import DecoderConfig, ExpertsConfig
from engine.models.feed_forward import Experts, FeedForward
from kernels.attention.base import AttentionBackend
from kernels.linear import Linear, bucket, pad_rows
from kernels.ops import add_rms_norm, gelu_mul, rms_norm, silu_mul, softcap


class Tensors(Protocol):
    """Where parameters come from, under their Hugging Face names."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype and device; an error if it is missing or of another shape."""
        ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer: two branches, each with a norm before, after or both."""

    attention_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: FeedForward | Experts
    mlp_post_norm: Tensor | None

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.out)
        yield from self.mlp.linears()


@dataclass(frozen=True, slots=True)
class Parameters:
    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear

    def linears(self) -> Iterator[Linear]:
        """All of them."""
        yield self.head
        for layer in self.layers:
            yield from layer.linears()


class Decoder:
    """A loaded model bound to an attention backend (`engine.batch.Model`)."""

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Parameters,
        tables: Sequence[tuple[Tensor, Tensor]],
        backend: AttentionBackend,
    ) -> None:
        """
        Args:
            tables: cosine and sine by position for each of `config.ropes`, fp32 `[positions, head_dim / 2]`.
        """
        self.vocab_size = config.vocab_size
        self.config = config
        self.parameters = parameters
        self.backend = backend
        self._tables = tuple(tables)
        self._embedding_scale = config.embedding_scale
        if config.round_embedding_scale:
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=parameters.embedding.dtype))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits `[R, vocab]` of the sampled rows; the KV of all rows is written."""
        positions = batch.positions
        rotations = [(cos[positions], sin[positions]) for cos, sin in self._tables]  # [T, head_dim / 2] each
        layers = self.parameters.layers
        residual = F.embedding(batch.token_ids, self.parameters.embedding)  # [T, hidden]
        if self._embedding_scale != 1:
            residual *= self._embedding_scale
        first = layers[0].attention_norm
        x = residual if first is None else rms_norm(residual, first, self.config.eps)
        for index, layer in enumerate(layers):
            x = self._branch(self._attention(index, layer, x, rotations, batch), layer.attention_post_norm)
            x, residual = self._add(x, residual, layer.mlp_norm)
            x = self._branch(layer.mlp(x), layer.mlp_post_norm)
            if index + 1 < len(layers):
                x, residual = self._add(x, residual, layers[index + 1].attention_norm)
        return self._logits((x + residual)[batch.sample_rows])

    def _branch(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What a branch adds to the residual."""
        if norm is not None:
            x = rms_norm(x, norm, self.config.eps)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _add(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of the next branch, and the residual."""
        if norm is not None:
            return add_rms_norm(x, residual, norm, self.config.eps)
        residual = x + residual
        return residual, residual

    def _attention(
        self, index: int, layer: Layer, x: Tensor, rotations: list[tuple[Tensor, Tensor]], batch: Batch
    ) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            if config.qk_norm == "projection":
                self._norm_projections(qkv, layer.q_norm, layer.k_norm)
            else:
                norms = layer.q_norm, layer.k_norm, config.eps
        rope = config.rotary[index]
        q = self.backend.write_rotated(
            index,
            qkv.view(-1, heads + 2 * kv_heads, config.head_dim),
            batch.attention,
            norms=norms,
            rotation=None if rope is None else rotations[rope],
        )
        out = self.backend.attend(
            index,
            q,
            batch.attention,
            scale=config.attention_scale,
            window=config.windows[index],
            softcap=config.attention_softcap,
        )
        return layer.out(out.view(-1, heads * config.head_dim))

    def _norm_projections(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise all queries of a row at once, and all its keys, in place."""
        start = 0
        for weight in (q_norm, k_norm):
            part = qkv[:, start : start + weight.shape[0]]
            part.copy_(rms_norm(part.contiguous(), weight, self.config.eps))
            start += weight.shape[0]

    def _logits(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not rows:
            return x.new_empty((0, self.vocab_size))
        x = rms_norm(pad_rows(x, bucket(rows)), self.parameters.norm, self.config.eps)
        logits = self.parameters.head(x)[:rows]
        if self.config.logit_divisor != 1:
            logits /= self.config.logit_divisor
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def build_parameters(config: DecoderConfig, tensors: Tensors) -> Parameters:
    """Take every parameter of the model from `tensors`, merging what the forward merges."""
    embedding, head = _embeddings(config, tensors)
    return Parameters(
        embedding=embedding,
        layers=tuple(_layer(config, tensors, i) for i in range(config.num_layers)),
        norm=_norm(config, tensors, "model.norm", config.hidden_size),
        head=Linear(head),
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


def _layer(config: DecoderConfig, tensors: Tensors, index: int) -> Layer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
        None if name is None else _norm(config, tensors, f"{prefix}.{name}", hidden) for name in config.norms
    )
    heads = 1 if config.qk_norm == "head" else config.num_heads, 1 if config.qk_norm == "head" else config.num_kv_heads
    q_norm, k_norm = (
        None if config.qk_norm is None else _norm(config, tensors, f"{prefix}.self_attn.{name}", n * config.head_dim)
        for name, n in zip(("q_norm", "k_norm"), heads, strict=True)
    )
    out = (("self_attn.o_proj", hidden),), config.num_heads * config.head_dim, config.out_bias
    return Layer(
        attention_norm=attention_norm,
        qkv=_qkv(config, tensors, prefix),
        q_norm=q_norm,
        k_norm=k_norm,
        out=Linear(*_joined(tensors, prefix, *out)),
        attention_post_norm=attention_post_norm,
        mlp_norm=mlp_norm,
        mlp=_mlp(config, tensors, f"{prefix}.mlp", index),
        mlp_post_norm=mlp_post_norm,
    )


def _norm(config: DecoderConfig, tensors: Tensors, name: str, size: int) -> Tensor:
    """The weight of a norm, as what it multiplies with; in fp32 where that happens before the rounding."""
    weight = tensors.take(f"{name}.weight", (size,))
    return weight.float() + config.norm_offset if config.wide_norms else weight


def _joined(
    tensors: Tensors, prefix: str, parts: Sequence[tuple[str, int]], inputs: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of projections (names and output sizes) that read the same input, one below the other."""
    weight = torch.cat([tensors.take(f"{prefix}.{name}.weight", (size, inputs)) for name, size in parts])
    if not bias:
        return weight, None
    return weight, torch.cat([tensors.take(f"{prefix}.{name}.bias", (size,)) for name, size in parts])


def _qkv(config: DecoderConfig, tensors: Tensors, prefix: str) -> Linear:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    if config.merged:
        parts = [("qkv_proj", q + 2 * kv)]
    weight, bias = _joined(tensors, f"{prefix}.self_attn", parts, config.hidden_size, config.qkv_bias)
    if config.rotary_dim < config.head_dim:
        order = _rotary_order(config)
        weight, bias = weight[order], None if bias is None else bias[order]
    return Linear(weight, bias)


def _rotary_order(config: DecoderConfig) -> Tensor:
    """Rows of q, k and v so that the pairs of a partial rotation lie as those of a whole one do: (i, i + head_dim / 2).

    The rotated pairs come first in both halves, the others stand still. Queries and keys change alike, so that their
    products stay the same.
    """
    size, half = config.head_dim, config.rotary_dim // 2
    middle = (size + config.rotary_dim) // 2  # of what is not rotated
    inner = torch.tensor([*range(half), *range(2 * half, middle), *range(half, 2 * half), *range(middle, size)])
    heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * size
    v = torch.arange(heads.numel() * size, (heads.numel() + config.num_kv_heads) * size)
    return torch.cat([(heads + inner).flatten(), v])


def _mlp(config: DecoderConfig, tensors: Tensors, prefix: str, index: int) -> FeedForward | Experts:
    if config.experts is not None and index in config.experts.layers:
        return _experts(config, config.experts, tensors, prefix)
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = [("gate_up_proj", 2 * inner)] if config.merged else [("gate_proj", inner), ("up_proj", inner)]
    return FeedForward(
        gate_up=Linear(*_joined(tensors, prefix, parts, hidden, config.mlp_bias)),
        down=Linear(*_joined(tensors, prefix, [("down_proj", hidden)], inner, config.mlp_bias)),
        act_mul=_ACTIVATIONS[config.activation],
    )


_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_mul}


def _experts(config: DecoderConfig, mixture: ExpertsConfig, tensors: Tensors, prefix: str) -> Experts:
    """A checkpoint holds the experts one by one, or all of them stacked."""
    count, hidden, inner = mixture.count, config.hidden_size, mixture.intermediate_size
    router = Linear(tensors.take(f"{prefix}.gate.weight", (count, hidden)))
    if tensors.has(f"{prefix}.experts.gate_up_proj"):
        gate_ups = tensors.take(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden))
        downs = tensors.take(f"{prefix}.experts.down_proj", (count, hidden, inner))
        weights: Iterator[tuple[Tensor, Tensor]] = zip(gate_ups, downs, strict=True)
    else:
        parts = [("gate_proj", inner), ("up_proj", inner)]
        names = [f"{prefix}.experts.{i}" for i in range(count)]
        weights = (
            (
                _joined(tensors, name, parts, hidden, False)[0],
                tensors.take(f"{name}.down_proj.weight", (hidden, inner)),
            )
            for name in names
        )
    act_mul = _ACTIVATIONS[config.activation]
    experts = tuple(FeedForward(Linear(gate_up), Linear(down), act_mul) for gate_up, down in weights)
    return Experts(router, experts, mixture.per_row, mixture.normalise)
