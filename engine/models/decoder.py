"""The fused decoder: Llama and the families like it, which differ in their `DecoderConfig`.

Projections that read the same input are one matrix (q, k and v; gate and up). Rows are tokens of any number of
sequences; only attention looks beyond its own row, so that a row's result depends on its sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.models.config import DecoderConfig
from engine.models.parameters import Layer, Parameters
from kernels.attention.base import AttentionBackend
from kernels.ops import add_rms_norm, rms_norm, softcap


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
        """Compute all rows and write their K and V; return the logits of the sampled rows, `[R, vocab]`."""
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
        """Return what a branch (attention or feed-forward) adds to the residual, `[T, hidden]`."""
        if norm is not None:
            x = rms_norm(x, norm, self.config.eps)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _add(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add to the residual and normalise it; return the input of the next branch, and the residual."""
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
        """Normalise in place: all queries of a row together, and all keys of a row together."""
        start = 0
        for weight in (q_norm, k_norm):
            part = qkv[:, start : start + weight.shape[0]]
            part.copy_(rms_norm(part.contiguous(), weight, self.config.eps))
            start += weight.shape[0]

    def _logits(self, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty((0, self.vocab_size))
        logits = self.parameters.head(rms_norm(x, self.parameters.norm, self.config.eps))
        if self.config.logit_divisor != 1:
            logits /= self.config.logit_divisor
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)
