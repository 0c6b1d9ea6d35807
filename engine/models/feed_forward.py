"""The second branch of a layer: a gated feed-forward, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`down(act(gate(x)) * up(x))`, with gate and up as one matrix."""

    gate_up: Linear
    down: Linear
    act_mul: Callable[[Tensor], Tensor] | None
    """Gates `[T, 2 * inner]`, gate first, to `[T, inner]`; None: `gate_up` returns the gated product."""

    def __call__(self, x: Tensor) -> Tensor:
        x = self.gate_up(x)
        return self.down(x if self.act_mul is None else self.act_mul(x))

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017): each row is computed by the experts that the router scores highest.

    A row's bits depend on the row alone: the products of an expert give a row the same bits for any number of rows, and
    a row's results are added in the order of its experts.
    """

    router: Linear
    experts: tuple[FeedForward, ...]
    per_row: int
    """Number of experts that compute each row."""
    normalise: bool
    """Whether the weights of the experts of a row are normalised to a sum of 1."""

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)  # [T, per_row]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows = x[order // self.per_row]  # [T * per_row, hidden], sorted by expert
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        parts = zip(self.experts, torch.split(rows, counts), strict=True)
        results = torch.empty_like(rows)
        results[order] = torch.cat([expert(part) for expert, part in parts if part.shape[0]])
        results = results.view(-1, self.per_row, x.shape[1])
        out = results[:, 0] * weights[:, :1]  # fp32
        for i in range(1, self.per_row):
            out += results[:, i] * weights[:, i : i + 1]
        return out.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (fp32) and indices of the experts of each row, each `[T, per_row]`, by ascending index."""
        scores = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.per_row, dim=-1)
        if self.normalise:
            # Added one after the other, since the order in which `sum` adds depends on the shape.
            weights = weights / weights.cumsum(-1)[:, -1:]
        chosen, order = chosen.sort(dim=-1)
        return weights.gather(-1, order), chosen

    def linears(self) -> Iterator[Linear]:
        """Yield one linear of each shape."""
        yield self.router
        yield from self.experts[0].linears()
