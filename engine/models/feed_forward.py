"""The second branch of a layer: a gated feed-forward, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import triton as gpu
from kernels.linear import Linear, rows_are_equal
from kernels.linear_cuda import multiply
from kernels.quantize import quantize_rows

_DENSE_ROWS = 512
"""Maximum number of rows that every expert computes where the experts of each row are not known to the host."""


class Product(Protocol):
    """A part of a model that computes each row by itself."""

    @property
    def invariant(self) -> bool:
        """Whether a row has the same bits for every number of rows, as a test run shows."""
        ...


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

    def products(self) -> Iterator[Product]:
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
        return _mix(x, *_choose(self.router(x), self.per_row, self.normalise), self.experts)

    def products(self) -> Iterator[Product]:
        """Yield one product of each shape."""
        yield self.router
        yield from self.experts[0].products()


def _choose(scores: Tensor, per_row: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return weights (fp32) and indices of the experts of each row, each `[T, per_row]`, by ascending index."""
    scores = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights, chosen = scores.topk(per_row, dim=-1)
    if normalise:
        # Added one after the other, since the order in which `sum` adds depends on the shape.
        weights = weights / weights.cumsum(-1)[:, -1:]
    chosen, order = chosen.sort(dim=-1)
    return weights.gather(-1, order), chosen


def _mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Compute each row by its experts, and add the results by ascending expert; waits for a GPU.

    Args:
        x: `[T, hidden]`.
        weights: fp32 `[T, per_row]`.
        chosen: indices of experts, `[T, per_row]`.
        experts: functions of rows.
    """
    per_row = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = x[order // per_row]  # [T * per_row, hidden], sorted by expert
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    parts = zip(experts, torch.split(rows, counts), strict=True)
    results = torch.empty_like(rows)
    results[order] = torch.cat([expert(part) for expert, part in parts if part.shape[0]])
    results = results.view(-1, per_row, x.shape[1])
    out = results[:, 0] * weights[:, :1]  # fp32
    for i in range(1, per_row):
        out += results[:, i] * weights[:, i : i + 1]
    return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Stack:
    """One weight of every expert."""

    values: Tensor
    """`[experts, out, in]`, in the model's dtype, int8 or e4m3."""
    scales: Tensor | None
    """fp32 `[experts, out]` of 8-bit values; otherwise None."""

    def of(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return values and scales of one expert."""
        return self.values[expert], None if self.scales is None else self.scales[expert]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The same mixture on a GPU, with the weights of all experts in one tensor.

    The Triton kernels, and for few rows the operations of torch that replace them, do not wait for the device, and
    their shapes follow from the number of rows, so that a CUDA graph can hold them.
    """

    router: Linear
    gate_up: Stack
    down: Stack
    per_row: int
    normalise: bool
    act_mul: Callable[[Tensor], Tensor]
    batch_invariant: bool
    """Whether a row must have the same bits for every number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        triton = gpu.load("moe")
        if triton is not None and x.shape[0]:
            return self._grouped(triton, x, scores)
        weights, chosen = _choose(scores, self.per_row, self.normalise)
        if x.shape[0] <= _DENSE_ROWS:
            return self._dense(x, weights, chosen)
        return _mix(x, weights, chosen, [self._expert(i) for i in range(self.gate_up.values.shape[0])])

    def products(self) -> Iterator[Product]:
        """Yield the router and the mixture."""
        yield from (self.router, self)

    @property
    def invariant(self) -> bool:
        """Whether a row has the same bits for every number of rows, as a test run shows."""
        return rows_are_equal(self, self.router.in_features, self.router.dtype, self.router.device)

    def _grouped(self, triton: Any, x: Tensor, scores: Tensor) -> Tensor:
        """Compute all experts in a few launches of Triton kernels."""
        values = self.gate_up.values
        experts, _, inputs = values.shape
        weights, chosen = triton.route(scores, self.per_row, normalise=self.normalise)
        tile = triton.tile_of(
            values.dtype,
            chosen.numel(),
            experts,
            gcd(inputs, self.down.values.shape[2]),
            x.device,
            invariant=self.batch_invariant,
        )
        plan = triton.plan(chosen, experts, tile)
        gates = _product(triton, x, self.gate_up, plan, gather=True)
        results = _product(triton, self.act_mul(gates), self.down, plan, gather=False)
        combined: Tensor = triton.combine(results, weights)
        return combined

    def _dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute every row by every expert, and add the results of the chosen ones, by ascending expert."""
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for i in range(self.gate_up.values.shape[0]):
            hit = chosen == i
            weight = torch.where(hit, weights, 0).sum(-1, keepdim=True)  # at most one is not 0
            out += torch.where(hit.any(-1, keepdim=True), self._expert(i)(x) * weight, 0)
        return out.to(x.dtype)

    def _expert(self, index: int) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward of one expert."""

        def compute(x: Tensor) -> Tensor:
            gates = multiply(x, *self.gate_up.of(index), batch_invariant=self.batch_invariant)
            return multiply(self.act_mul(gates), *self.down.of(index), batch_invariant=self.batch_invariant)

        return compute


def _product(triton: Any, x: Tensor, stack: Stack, plan: Any, *, gather: bool) -> Tensor:
    """Multiply each pair of a row and an expert by the expert's weight; see `kernels.triton.moe.grouped`."""
    if stack.scales is None:
        result: Tensor = triton.grouped(x.contiguous(), stack.values, plan, gather=gather)
    else:
        values, x_scales = quantize_rows(x, stack.values.dtype)
        scales = x_scales, stack.scales
        result = triton.grouped(values, stack.values, plan, gather=gather, scales=scales, dtype=x.dtype)
    return result
