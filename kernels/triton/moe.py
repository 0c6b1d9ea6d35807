"""A mixture of experts in Triton, without asking the host: every shape follows from the number of rows.

    scores ─ route ─► experts and weights of each row ─ plan ─► pairs sorted by expert, and the expert of each tile
    x ─ grouped (gate and up) ─► activation ─ grouped (down) ─► combine: the sum of a row's experts, in their order

A pair is a row and one of its experts. Tiles of pairs hold one expert each. Their number is at most
`pairs / tile + experts`, for which programs are started; those without a tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.matmul import INNER, Tile, accumulate, capability, constants, invariant_tile, wide

_CHUNK = 1024
"""Pairs that a program of `_plan` reads at a time."""
_TILES = 128
"""Tiles that a program of `_plan` writes at a time."""
_COLUMNS = 1024
"""Columns of a program of `_combine`."""


@triton.jit
def _route(
    scores,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_ROW: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Program (row): softmax, the PER_ROW highest, written by ascending expert."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < EXPERTS
    score = tl.load(scores + row * EXPERTS + at, mask=mask, other=-float("inf")).to(tl.float32)
    share = tl.exp(score - tl.max(score, 0))
    share = share / tl.sum(share, 0)
    # A row that is not finite has shares of NaN, which no comparison finds: any experts will do, its weights are NaN.
    left = tl.where(mask, tl.where(share == share, share, 2.0), -1.0)
    picked = tl.zeros((WIDTH,), tl.int32)
    total = 0.0
    for _ in tl.static_range(PER_ROW):
        best = tl.argmax(left, 0)
        total += tl.max(left, 0)  # from the highest down, as in `engine.models.feed_forward`
        picked = tl.where(at == best, 1, picked)
        left = tl.where(at == best, -1.0, left)
    place = row * PER_ROW + tl.cumsum(picked, 0) - 1
    tl.store(weights + place, share / total if NORMALISE else share, mask=picked > 0)
    tl.store(chosen + place, at, mask=picked > 0)


@triton.jit(do_not_specialize=["pairs", "max_tiles"])
def _plan(
    chosen,
    order,
    tiles,
    pairs,
    max_tiles,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (expert), and one more for the tiles that are left over: a stable counting sort."""
    expert = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    counts = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS), WIDTH)
    counts = tl.where(at < EXPERTS, counts, 0)
    needed = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(at < expert, counts, 0), 0)
    end = start + tl.sum(tl.where(at == expert, counts, 0), 0)
    tile = tl.sum(tl.where(at < expert, needed, 0), 0)
    number = tl.sum(tl.where(at == expert, needed, 0), 0)
    rest = expert == EXPERTS
    number = tl.where(rest, max_tiles - tile, number)
    for first in range(0, number, TILES):
        item = first + tl.arange(0, TILES)
        mask = item < number
        place = tiles + (tile + item) * 3
        tl.store(place, tl.where(rest, -1, expert) + item * 0, mask=mask)
        tl.store(place + 1, start + item * ROWS, mask=mask)
        tl.store(place + 2, end + item * 0, mask=mask)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        hit = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(hit, 0) - 1, pair, mask=hit > 0)
        start += tl.sum(hit, 0)


@triton.jit
def _grouped(
    x,
    weight,
    out,
    order,
    tiles,
    x_scales,
    scales,
    cols,
    inner,
    PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (tile, tile of outputs). GATHER: read rows, write sorted pairs; otherwise the reverse, to each pair."""
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        at = tl.load(tile + 1) + tl.arange(0, ROWS)
        is_row = at < tl.load(tile + 2)
        pair = tl.load(order + at, mask=is_row, other=0)
        source = (pair // PER_ROW if GATHER else at).to(tl.int64)
        target = (at if GATHER else pair).to(tl.int64)
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        is_col = col < cols
        weight_at = weight + (expert * cols + col) * inner
        total = accumulate(
            x + source * inner, weight_at, is_row, is_col, inner, ROWS, COLS, INNER, EVEN, INTEGERS, EXACT
        )
        total = total.to(tl.float32)
        if SCALED:
            of_row = tl.load(x_scales + source, mask=is_row, other=0.0)
            of_col = tl.load(scales + expert * cols + col, mask=is_col, other=0.0)
            total *= of_row[:, None] * of_col[None, :]
        place = out + target[:, None] * cols + col[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _combine(results, weights, out, cols, PER_ROW: tl.constexpr, WIDTH: tl.constexpr):
    """Program (row, range of columns): the weighted sum of a row's results, in fp32, by ascending expert."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = col < cols
    total = tl.zeros((WIDTH,), tl.float32)
    for i in tl.static_range(PER_ROW):
        result = tl.load(results + (row * PER_ROW + i) * cols + col, mask=mask, other=0.0).to(tl.float32)
        total += result * tl.load(weights + row * PER_ROW + i)
    tl.store(out + row * cols + col, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """The pairs of a batch, sorted by expert, and their tiles."""

    order: Tensor
    """int32 `[pairs]`: pair (`row * per_row + i`) at each sorted place."""
    tiles: Tensor
    """int32 `[tiles, 3]`: expert (-1: no tile), first sorted place, and end of the expert's places."""
    per_row: int
    tile: Tile


def route(scores: Tensor, per_row: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the highest scores of each row.

    Args:
        scores: `[T, experts]`, contiguous.
        per_row: number of experts that compute a row.
        normalise: whether the weights of a row are scaled to a sum of 1.

    Returns:
        Weights, fp32, and experts, int32, each `[T, per_row]`, by ascending expert.
    """
    rows, experts = scores.shape
    weights = torch.empty((rows, per_row), dtype=torch.float32, device=scores.device)
    chosen = torch.empty((rows, per_row), dtype=torch.int32, device=scores.device)
    launch(
        _route, (rows,),
        scores, weights, chosen,
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), PER_ROW=per_row, NORMALISE=normalise,
        num_warps=1 if experts <= 256 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, chosen


def plan(chosen: Tensor, experts: int, tile: Tile) -> Plan:
    """Sort pairs by expert and divide them into tiles.

    Args:
        chosen: int32 `[T, per_row]`, the experts of each row, which are distinct.
        experts: number of experts.
        tile: of the products that follow.
    """
    rows, per_row = chosen.shape
    pairs = chosen.numel()
    max_tiles = min(pairs, triton.cdiv(pairs, tile.rows) + experts, experts * triton.cdiv(rows, tile.rows))
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((max_tiles, 3), dtype=torch.int32, device=chosen.device)
    launch(
        _plan, (experts + 1,),
        chosen, order, tiles, pairs, max_tiles,
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts + 1), ROWS=tile.rows,
        TILES=_TILES, CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Plan(order, tiles, per_row, tile)


def grouped(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    gather: bool,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of each pair with the weight of its expert, `[pairs, out]`.

    Args:
        x: contiguous; the rows `[T, in]` if `gather`, otherwise the sorted pairs `[pairs, in]`.
        weight: `[experts, out, in]` in the dtype of x, contiguous.
        plan: the pairs.
        gather: whether x has rows and the result sorted pairs; otherwise x has sorted pairs, and the result has pairs
            in the order of the rows.
        scales: for 8-bit factors: of the rows of x, fp32, and of the outputs, fp32 `[experts, out]`.
        dtype: of the result; None: that of x.
    """
    _, cols, inner = weight.shape
    out = torch.empty((plan.order.shape[0], cols), dtype=dtype or x.dtype, device=x.device)
    tile = plan.tile
    x_scales, w_scales = scales or (out, out)
    launch(
        _grouped, (plan.tiles.shape[0], triton.cdiv(cols, tile.cols)),
        x, weight, out, plan.order, plan.tiles, x_scales, w_scales, cols, inner,
        PER_ROW=plan.per_row, GATHER=gather, SCALED=scales is not None, **constants(tile, x.dtype, inner),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the results of each row's experts times their weights, `[T, hidden]`.

    Args:
        results: `[T * per_row, hidden]`, contiguous.
        weights: fp32 `[T, per_row]`.
    """
    rows, per_row = weights.shape
    cols = results.shape[1]
    out = torch.empty((rows, cols), dtype=results.dtype, device=results.device)
    width = min(_COLUMNS, triton.next_power_of_2(cols))
    launch(
        _combine, (rows, triton.cdiv(cols, width)),
        results, weights, out, cols, PER_ROW=per_row, WIDTH=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def tile_of(dtype: torch.dtype, pairs: int, experts: int, inner: int, device: torch.device, *, invariant: bool) -> Tile:
    """Return the tile for products of pairs, by the number of them that an expert has on average.

    Args:
        dtype: of the factors.
        pairs: number of pairs.
        experts: number of experts.
        inner: inputs of the products; if they differ, a number that both are multiples of.
        device: the device.
        invariant: whether the bits of a row must be the same for every number of rows.
    """
    if invariant:
        return invariant_tile(dtype, pairs, inner, capability(device))
    mean = pairs / experts
    if dtype == torch.float32 or inner % 16:
        return Tile(16, 32, INNER[dtype], 4, 3)
    if mean <= 16:
        return Tile(16, 64, INNER[dtype], 4, 4)
    rows, warps = (64, 4) if mean <= 64 else (128, 8)
    return Tile(rows, wide(dtype, capability(device)), INNER[dtype], warps, 3)
