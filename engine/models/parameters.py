"""Builds the parameters of the fused decoder from a checkpoint, merged and packed for its forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.models.config import DecoderConfig, ExpertsConfig
from engine.models.feed_forward import Experts, FeedForward, Product, Stack, StackedExperts
from kernels.linear import PLAIN, Linear, Precision
from kernels.linear_cuda import can_quantize
from kernels.ops import gelu_mul, silu_mul
from kernels.quantize import FP8, quantize_weight


class Tensors(Protocol):
    """Source of tensors, by their Hugging Face names."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the model's dtype and device; raise `LoadError` if it is missing or of another shape."""
        ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer: attention and feed-forward, each with a norm before it, after it, or both."""

    attention_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: FeedForward | Experts | StackedExperts
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of the whole model."""

    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear

    def products(self) -> Iterator[Product]:
        """Yield one product of each kind and shape."""
        yield from (self.head, self.layers[0].qkv, self.layers[0].out)
        for mlp in {type(layer.mlp): layer.mlp for layer in self.layers}.values():
            yield from mlp.products()


def build_parameters(
    config: DecoderConfig,
    tensors: Tensors,
    precision: Precision = PLAIN,
) -> Parameters:
    """Take all parameters of a model from `tensors`, merging those that the forward pass uses together.

    Args:
        config: the model.
        tensors: its checkpoint.
        precision: how to multiply. In fp8 the output embedding keeps the model's dtype, since its error is the error
            of the logits.
    """
    embedding, head = _embeddings(config, tensors)
    build = _Builder(config, tensors, precision)
    return Parameters(
        embedding=embedding,
        layers=tuple(build.layer(i) for i in range(config.num_layers)),
        norm=build.norm("model.norm", config.hidden_size),
        head=Linear(head, precision=_plain(precision) if precision.quantize == FP8 else precision),
    )


def _embeddings(config: DecoderConfig, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return input and output embeddings, `[vocab, hidden]`.

    A checkpoint may hold both though they are tied; if they differ, each is used, as in transformers.
    """
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


@dataclass(frozen=True, slots=True)
class _Builder:
    config: DecoderConfig
    tensors: Tensors
    precision: Precision

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
            None if name is None else self.norm(f"{prefix}.{name}", config.hidden_size) for name in config.norms
        )
        q_norm, k_norm = self._qk_norms(f"{prefix}.self_attn")
        return Layer(
            attention_norm=attention_norm,
            qkv=self._qkv(f"{prefix}.self_attn"),
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._linear(
                f"{prefix}.self_attn",
                [("o_proj", config.hidden_size)],
                config.num_heads * config.head_dim,
                bias=config.out_bias,
            ),
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            mlp=self._mlp(f"{prefix}.mlp", index),
            mlp_post_norm=mlp_post_norm,
        )

    def norm(self, name: str, size: int) -> Tensor:
        """Return the factors of a norm, `[size]`; in fp32 if it multiplies before it rounds."""
        weight = self.tensors.take(f"{name}.weight", (size,))
        return weight.float() + self.config.norm_offset if self.config.wide_norms else weight

    def _qk_norms(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        config = self.config
        if config.qk_norm is None:
            return None, None
        whole = config.qk_norm == "projection"
        q, k = (config.num_heads, config.num_kv_heads) if whole else (1, 1)
        return self.norm(f"{prefix}.q_norm", q * config.head_dim), self.norm(f"{prefix}.k_norm", k * config.head_dim)

    def _weights(
        self, prefix: str, parts: Sequence[tuple[str, int]], inputs: int, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the concatenated weights, and biases, of projections (names and output sizes) with the same input."""
        take = self.tensors.take
        weight = _joined([take(f"{prefix}.{name}.weight", (size, inputs)) for name, size in parts])
        return weight, _joined([take(f"{prefix}.{name}.bias", (size,)) for name, size in parts]) if bias else None

    def _linear(self, prefix: str, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        return Linear(*self._weights(prefix, parts, inputs, bias), precision=self.precision)

    def _qkv(self, prefix: str) -> Linear:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [("qkv_proj", q + 2 * kv)] if config.merged else [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        weight, bias = self._weights(prefix, parts, config.hidden_size, config.qkv_bias)
        if config.rotary_dim < config.head_dim:
            order = _rotary_order(config)
            weight, bias = weight[order], None if bias is None else bias[order]
        return Linear(weight, bias, precision=self.precision)

    def _mlp(self, prefix: str, index: int) -> FeedForward | Experts | StackedExperts:
        config = self.config
        if config.experts is not None and index in config.experts.layers:
            return self._experts(prefix, config.experts)
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = [("gate_up_proj", 2 * inner)] if config.merged else [("gate_proj", inner), ("up_proj", inner)]
        gate_up = self._weights(prefix, parts, hidden, bias)
        return self._feed_forward(gate_up, self._weights(prefix, [("down_proj", hidden)], inner, bias))

    def _feed_forward(self, gate_up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None]) -> FeedForward:
        silu = self.config.activation == "silu"
        return FeedForward(
            gate_up=Linear(*gate_up, gated=silu, precision=self.precision),
            down=Linear(*down, precision=self.precision),
            act_mul=None if silu else gelu_mul,
        )

    def _experts(self, prefix: str, mixture: ExpertsConfig) -> Experts | StackedExperts:
        # The router is not quantised: it is small, and a small error may select another expert.
        weight = self.tensors.take(f"{prefix}.gate.weight", (mixture.count, self.config.hidden_size))
        router = Linear(weight, precision=_plain(self.precision))
        if weight.device.type == "cuda":
            gate_up, down = self._stacks(f"{prefix}.experts", mixture)
            act_mul = silu_mul if self.config.activation == "silu" else gelu_mul
            invariant = self.precision.batch_invariant
            return StackedExperts(router, gate_up, down, mixture.per_row, mixture.normalise, act_mul, invariant)
        experts = tuple(
            self._feed_forward((gate_up, None), (down, None))
            for gate_up, down in self._expert_weights(f"{prefix}.experts", mixture)
        )
        return Experts(router, experts, mixture.per_row, mixture.normalise)

    def _stacks(self, prefix: str, mixture: ExpertsConfig) -> tuple[Stack, Stack]:
        """Return gate and up, and down, of all experts; beside them, memory holds what the checkpoint has at once."""
        count, hidden, inner = mixture.count, self.config.hidden_size, mixture.intermediate_size
        quantize = self.precision.quantize
        if quantize is not None and not (can_quantize(quantize, hidden) and can_quantize(quantize, inner)):
            quantize = None
        if quantize is None and self.tensors.has(f"{prefix}.gate_up_proj"):
            gate_up = self.tensors.take(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
            down = self.tensors.take(f"{prefix}.down_proj", (count, hidden, inner))
            return Stack(gate_up.contiguous(), None), Stack(down.contiguous(), None)
        return _stacked(self._expert_weights(prefix, mixture), count, quantize)

    def _expert_weights(self, prefix: str, mixture: ExpertsConfig) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (gate and up, down) of each expert; a checkpoint has a tensor for each expert, or one for all."""
        count, hidden, inner = mixture.count, self.config.hidden_size, mixture.intermediate_size
        take = self.tensors.take
        if self.tensors.has(f"{prefix}.gate_up_proj"):
            gate_ups = take(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
            yield from zip(gate_ups, take(f"{prefix}.down_proj", (count, hidden, inner)), strict=True)
            return
        for i in range(count):
            gate_up, _ = self._weights(f"{prefix}.{i}", [("gate_proj", inner), ("up_proj", inner)], hidden, False)
            yield gate_up, take(f"{prefix}.{i}.down_proj.weight", (hidden, inner))


def _plain(precision: Precision) -> Precision:
    """Return the precision without quantisation."""
    return replace(precision, quantize=None)


def _stacked(experts: Iterable[Sequence[Tensor]], count: int, quantize: torch.dtype | None) -> tuple[Stack, Stack]:
    """Copy the two weights of each expert into stacks; each is freed before the next is taken.

    Args:
        experts: two weights of each expert, `[out, in]`.
        count: number of experts.
        quantize: dtype of the stacks, int8 or e4m3; None: that of the weights.
    """
    stacks: list[Stack] = []
    for i, weights in enumerate(experts):
        if not stacks:
            stacks = [_empty_stack(weight, count, quantize) for weight in weights]
        for stack, weight in zip(stacks, weights, strict=True):
            if stack.scales is None:
                stack.values[i] = weight
            else:
                stack.scales[i] = quantize_weight(weight, stack.values[i])
    return stacks[0], stacks[1]


def _empty_stack(weight: Tensor, count: int, quantize: torch.dtype | None) -> Stack:
    """Allocate a stack for weights like this one, on its device."""
    values = weight.new_empty((count, *weight.shape), dtype=quantize or weight.dtype)
    scales = None if quantize is None else weight.new_empty((count, weight.shape[0]), dtype=torch.float32)
    return Stack(values, scales)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rotary_order(config: DecoderConfig) -> Tensor:
    """Return an order of the rows of q, k and v in which the pairs of a partial rotation are (i, i + head_dim / 2), as
    in a full rotation.

    The rotated pairs come first in both halves of a head. Queries and keys have the same order, so their products stay
    the same.
    """
    size, half = config.head_dim, config.rotary_dim // 2
    middle = (size + config.rotary_dim) // 2  # of the elements that are not rotated
    inner = torch.tensor([*range(half), *range(2 * half, middle), *range(half, 2 * half), *range(middle, size)])
    heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * size
    v = torch.arange(heads.numel() * size, (heads.numel() + config.num_kv_heads) * size)
    return torch.cat([(heads + inner).flatten(), v])
