"""The Triton mixture of experts: each kernel against fp64, whole mixtures against the CPU's, bits of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.quantize import FP8, quantize_rows, quantize_weight
from kernels.triton import moe
from kernels.triton.matmul import Tile

TILE = Tile(16, 32, 32, 4, 3)
CASES = [(1, 4, 2), (5, 4, 2), (37, 7, 3), (20, 128, 8), (3, 5, 5)]
"""Rows, experts, and experts of a row."""


def of_rows(scores: Tensor, per_row: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the weights (fp64) and the experts of each row, by ascending expert."""
    shares = torch.softmax(scores.double(), -1)
    weights, chosen = shares.topk(per_row, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen, order = chosen.sort(-1)
    return weights.gather(-1, order), chosen


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "per_row"), CASES)
def test_rows_go_to_the_experts_with_the_highest_scores(rows: int, experts: int, per_row: int, normalise: bool) -> None:
    scores = 3 * torch.randn(rows, experts)
    weights, chosen = moe.route(scores, per_row, normalise=normalise)
    want, experts_of = of_rows(scores, per_row, normalise)
    assert torch.equal(chosen.long(), experts_of)
    assert torch.allclose(weights.double(), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gets_valid_experts_and_weights_of_nan(bad: float) -> None:
    scores = torch.randn(3, 6)
    scores[1, 2] = bad
    weights, chosen = moe.route(scores, 2, normalise=True)
    assert weights.isnan().all(1).tolist() == [False, True, False]
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert all(len(set(row)) == 2 for row in chosen.tolist())


def test_among_equal_scores_the_first_experts_are_chosen() -> None:
    _, chosen = moe.route(torch.zeros(2, 6), 3, normalise=False)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("at_once", [moe._TILES, 4])
@pytest.mark.parametrize("tile", [TILE, Tile(64, 32, 32, 4, 3)])
@pytest.mark.parametrize(("rows", "experts", "per_row"), [*CASES, (700, 3, 2)])
def test_a_plan_sorts_pairs_stably_and_tiles_hold_every_place_once(
    rows: int, experts: int, per_row: int, tile: Tile, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "_TILES", at_once)
    chosen = torch.rand(rows, experts).topk(per_row).indices.sort(-1).values.to(torch.int32)
    plan = moe.plan(chosen, experts, tile)
    flat = chosen.flatten().long()
    assert torch.equal(plan.order.long(), flat.argsort(stable=True))
    places: list[int] = []
    for expert, first, end in plan.tiles.tolist():
        if expert >= 0:
            covered = range(first, min(first + tile.rows, end))
            assert {int(flat[plan.order[i].long()]) for i in covered} == {expert}
            places += covered
    assert places == list(range(rows * per_row))


def test_a_plan_of_any_number_of_rows_is_made_by_the_same_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    options = []
    monkeypatch.setattr(moe, "launch", lambda *_, **constants: options.append(constants))
    for rows in (1, 2, 30, 500):
        moe.plan(torch.zeros((rows, 2), dtype=torch.int32), 8, TILE)
    assert options == options[:1] * 4


def test_pairs_whose_rows_all_have_one_expert_fill_its_tiles() -> None:
    plan = moe.plan(torch.full((50, 1), 2, dtype=torch.int32), 4, TILE)
    assert plan.tiles.tolist() == [
        [2, 0, 50],
        [2, 16, 50],
        [2, 32, 50],
        [2, 48, 50],
        *[[-1, 50 + 16 * i, 50] for i in range(4)],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "experts", "per_row"), [(1, 4, 2), (37, 7, 3)])
def test_grouped_products_equal_fp64_and_read_nothing_beside(
    dtype: torch.dtype, rows: int, experts: int, per_row: int
) -> None:
    chosen = torch.rand(rows, experts).topk(per_row).indices.sort(-1).values.to(torch.int32)
    plan = moe.plan(chosen, experts, TILE)
    of_place = chosen.flatten().long()[plan.order.long()]
    x = torch.full((rows + 20, 40), float("nan"), dtype=dtype)
    x[:rows] = torch.randn(rows, 40).to(dtype)
    weight = torch.full((experts + 1, 72, 40), float("nan"), dtype=dtype)
    weight[:experts] = torch.randn(experts, 72, 40).to(dtype)
    x, weight = x[:rows], weight[:experts]
    sorted_rows = x.double()[plan.order.long() // per_row]
    want = torch.einsum("pi,poi->po", sorted_rows, weight.double()[of_place])
    got = moe.grouped(x, weight, plan, gather=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)
    back = moe.grouped(x[plan.order.long() // per_row].contiguous(), weight, plan, gather=False)
    assert torch.equal(back[plan.order.long()], got)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_grouped_products_of_8_bits_equal_those_of_the_quantised_factors(dtype: torch.dtype) -> None:
    chosen = torch.rand(21, 6).topk(2).indices.sort(-1).values.to(torch.int32)
    plan = moe.plan(chosen, 6, Tile(16, 32, 128, 4, 3))
    x, x_scales = quantize_rows(torch.randn(21, 48), dtype)
    weight = torch.empty(6, 32, 48, dtype=dtype)
    scales = torch.stack([quantize_weight(torch.randn(32, 48), values) for values in weight])
    got = moe.grouped(x, weight, plan, gather=True, scales=(x_scales, scales), dtype=torch.float32)
    rows = plan.order.long() // 2
    experts = chosen.flatten().long()[plan.order.long()]
    wide, factors = x.double() * x_scales[:, None], weight.double() * scales[:, :, None]
    want = torch.einsum("pi,poi->po", wide[rows], factors[experts])
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [40, 1500])
def test_results_are_added_by_ascending_expert_in_fp32(cols: int) -> None:
    results, weights = torch.randn(9 * 3, cols), torch.rand(9, 3)
    parts = results.view(9, 3, cols)
    want = parts[:, 0] * weights[:, :1]
    for i in (1, 2):
        want += parts[:, i] * weights[:, i : i + 1]
    assert torch.equal(moe.combine(results, weights), want)


def test_tiles_grow_with_the_pairs_of_an_expert_unless_bits_must_not_change() -> None:
    device = torch.device("cpu")
    sizes = [moe.tile_of(torch.bfloat16, pairs, 128, 2048, device, invariant=False).rows for pairs in (8, 1024, 16384)]
    assert sizes == [16, 16, 128]
    same = {moe.tile_of(torch.bfloat16, pairs, 128, 2048, device, invariant=True).rows for pairs in (8, 1024, 16384)}
    assert same == {64}
