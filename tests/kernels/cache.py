"""A KV cache under test, full of NaN where nothing was written, beside the true K and V and an oracle in fp64."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernels.attention import get_backend
from kernels.attention.base import AttentionBatch, CacheSpec


class Cache:
    """A backend, and the true K and V of each sequence in it."""

    def __init__(self, spec: CacheSpec, lengths: list[int], heads: int, seed: int = 0, name: str = "reference") -> None:
        self.spec, self.heads, self.lengths = spec, heads, lengths
        generator = torch.Generator().manual_seed(seed)
        self.backend = get_backend(name, spec)
        shape = (spec.num_kv_heads, spec.head_dim)
        self.k = [torch.randn(n, *shape, generator=generator).to(spec.dtype) for n in lengths]
        self.v = [torch.randn(n, *shape, generator=generator).to(spec.dtype) for n in lengths]
        self.q = [torch.randn(n, heads, spec.head_dim, generator=generator).to(spec.dtype) for n in lengths]
        blocks = [-(-n // spec.block_size) for n in lengths]
        order = list(range(sum(blocks) + 3))
        random.Random(seed).shuffle(order)
        self.tables = [tuple(order.pop() for _ in range(n)) for n in blocks]
        self.pool = torch.full((sum(blocks) + 3, self.backend.block_bytes), 0xFF, dtype=torch.uint8, device=spec.device)
        self.backend.bind(self.pool)

    def batch(self, work: list[tuple[int, int, int]], padding: int = 0) -> AttentionBatch:
        """Rows `[start, stop)` of sequences, in this order."""
        slots, positions, cu = [], [], [0]
        for s, start, stop in work:
            size = self.spec.block_size
            slots += [self.tables[s][p // size] * size + p % size for p in range(start, stop)]
            positions += list(range(start, stop))
            cu.append(len(slots))
        return AttentionBatch(
            torch.tensor(slots + [-1] * padding, device=self.spec.device),
            torch.tensor(positions + [0] * padding, device=self.spec.device),
            tuple(cu),
            tuple(stop for _, _, stop in work),
            tuple(self.tables[s] for s, _, _ in work),
        )

    def run(
        self, work: list[tuple[int, int, int]], padding: int = 0, layer: int = 0, **options: object
    ) -> list[Tensor]:
        """Write and attend; each item's output rows."""
        batch = self.batch(work, padding)
        q, k, v = (
            torch.cat([x[s][a:b] for s, a, b in work] + [x[0].new_full((padding, *x[0].shape[1:]), torch.nan)]).to(
                self.spec.device
            )
            for x in (self.q, self.k, self.v)
        )
        self.backend.write(layer, k, v, batch)
        out = self.backend.attend(layer, q, batch, scale=self.spec.head_dim**-0.5, **options)  # type: ignore[arg-type]
        assert out.dtype == q.dtype
        assert out.shape == q.shape
        assert (out[batch.num_rows :] == 0).all()
        out = out.cpu()
        return list(out[: batch.num_rows].split([b - a for _, a, b in work]))

    def oracle(self, s: int, start: int, stop: int, window: int | None = None, softcap: float | None = None) -> Tensor:
        """One position and head at a time, in fp64."""
        group = self.heads // self.spec.num_kv_heads
        out = torch.zeros(stop - start, self.heads, self.spec.head_dim, dtype=torch.float64)
        q, k, v = self.q[s].double(), self.k[s].double(), self.v[s].double()
        for row, p in enumerate(range(start, stop)):
            low = 0 if window is None else max(0, p - window + 1)
            for head in range(self.heads):
                scores = k[low : p + 1, head // group] @ q[p, head] * self.spec.head_dim**-0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, head] = scores.softmax(0) @ v[low : p + 1, head // group]
        return out

    def bound(
        self, s: int, softcap: float | None = None, rounded_weights: bool = False, tanh: float = 2.0**-21
    ) -> float:
        """How far rounding can move an output of sequence `s` from the oracle's, to first order.

        With u = 2^-24: a score is a sum of D products, so off by at most (D + 2) u |q| |k| scale, and a soft-cap adds
        an absolute cap * `tanh` (2^-21 where it is made of one division; a GPU's instruction has 2^-11). An error e in
        scores moves the weights by a factor e^±e above and below the fraction line, and exp itself by 4 u; the weighted
        sum and the total add up one term after the other, within a tile and over tiles. An output is a mean of V under
        these weights, so all of it is relative to the largest |V|. bf16 (u = 2^-8) and fp16 (u = 2^-11) round the
        output, and the weights where `rounded_weights`, whose exp is then good to 2^-18 only; weights too small for
        fp16 are off by up to 2^-25 of the largest, each.
        """
        u, dim, n = 2.0**-24, self.spec.head_dim, self.lengths[s]
        norms = self.q[s].float().norm(dim=-1).max() * self.k[s].float().norm(dim=-1).max()
        score = (dim + 2) * u * float(norms) * self.spec.head_dim**-0.5 + (softcap or 0.0) * tanh
        relative = 2 * (score + 4 * u) + 2 * (128 + n // 128 + 4) * u
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(self.spec.dtype, 0.0)
        if rounded_weights:
            relative += rounding + 2.0**-17
        if rounded_weights and self.spec.dtype == torch.float16:
            relative += n * 2.0**-25
        relative += rounding
        return relative * float(self.v[s].float().abs().max())
