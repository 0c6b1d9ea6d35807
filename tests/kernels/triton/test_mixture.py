"""Whole mixtures and models with experts through the Triton kernels, against the CPU's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config import ExpertsConfig
from engine.models.feed_forward import Experts, FeedForward, Stack, StackedExperts
from engine.models.parameters import _Builder, _stacked
from kernels import triton as gpu
from kernels.linear import Linear, Precision
from kernels.ops import gelu_mul, silu_mul
from kernels.quantize import FP8

ROWS = [1, 2, 3, 17, 128]


@pytest.fixture(autouse=True)
def _all_enabled() -> Iterator[None]:
    yield
    gpu.enable_all()


def mixtures(
    quantize: torch.dtype | None = None, *, experts: int = 6, per_row: int = 2, invariant: bool = False
) -> tuple[Experts, StackedExperts]:
    """Return a mixture as the CPU computes it, and the same as a GPU does."""
    hidden, inner = 64, 48
    draw = torch.Generator().manual_seed(experts)
    router = Linear(torch.randn(experts, hidden, generator=draw))
    weights = [
        (torch.randn(2 * inner, hidden, generator=draw) / 8, torch.randn(hidden, inner, generator=draw) / 8)
        for _ in range(experts)
    ]
    apart = tuple(FeedForward(Linear(gate_up), Linear(down), silu_mul) for gate_up, down in weights)
    gate_up, down = _stacked(weights, experts, quantize)
    stacked = StackedExperts(router, gate_up, down, per_row, True, silu_mul, invariant)
    return Experts(router, apart, per_row, True), stacked


@pytest.mark.parametrize("rows", ROWS)
def test_a_mixture_in_triton_equals_that_of_the_cpu(rows: int) -> None:
    on_cpu, stacked = mixtures()
    x = torch.randn(rows, 64)
    assert torch.allclose(stacked(x), on_cpu(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 17, 600])
def test_without_the_kernels_torch_computes_the_same(rows: int) -> None:
    on_cpu, stacked = mixtures()
    for group in ("moe", "matmul"):
        gpu.disable(group, "a test")
    x = torch.randn(rows, 64)
    assert torch.allclose(stacked(x), on_cpu(x), rtol=1e-4, atol=1e-5)
    assert stacked(torch.empty(0, 64)).shape == (0, 64)


@pytest.mark.parametrize(("quantize", "error"), [(torch.int8, 0.03), (FP8, 0.08)])
def test_a_quantised_mixture_is_close_with_and_without_the_kernels(quantize: torch.dtype, error: float) -> None:
    on_cpu, stacked = mixtures(quantize)
    x = torch.randn(17, 64)
    want = on_cpu(x)
    results = [stacked(x)]
    for group in ("moe", "matmul", "quantize"):
        gpu.disable(group, "a test")
    results.append(stacked(x))
    for got in results:
        assert (got - want).square().mean().sqrt() < error * want.square().mean().sqrt()
    assert torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantize", [None, torch.int8, FP8])
def test_a_row_has_the_same_bits_for_every_number_of_rows(quantize: torch.dtype | None) -> None:
    _, stacked = mixtures(quantize, experts=3, invariant=True)
    x = torch.randn(128, 64)
    whole = stacked(x)
    for rows, start in zip(ROWS, (5, 0, 120, 60, 0), strict=True):
        part = slice(start, start + rows)
        assert torch.equal(stacked(x[part]), whole[part])


class _Tensors:
    """Weights of two experts, each tensor by itself."""

    def __init__(self, joined: bool) -> None:
        draw = torch.Generator().manual_seed(3)
        self.taken: list[str] = []
        self._all = {"m.gate.weight": torch.randn(2, 32, generator=draw)}
        gate_up, down = torch.randn(2, 96, 32, generator=draw), torch.randn(2, 32, 48, generator=draw)
        if joined:
            self._all |= {"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}
            return
        for i in range(2):
            self._all[f"m.experts.{i}.gate_proj.weight"], self._all[f"m.experts.{i}.up_proj.weight"] = gate_up[i].chunk(
                2
            )
            self._all[f"m.experts.{i}.down_proj.weight"] = down[i]

    def has(self, name: str) -> bool:
        return name in self._all

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._all[name]
        assert found.shape == shape
        return found


@pytest.mark.parametrize("quantize", [None, torch.int8])
def test_stacks_of_joined_and_of_separate_tensors_are_equal(quantize: torch.dtype | None) -> None:
    mixture = ExpertsConfig(2, 1, 48, True, frozenset({0}))
    stacks = []
    for joined in (True, False):
        config: Any = type("Config", (), {"hidden_size": 32, "activation": "silu"})
        precision = Precision(quantize)
        builder = _Builder(config, _Tensors(joined), precision)
        stacks.append(builder._stacks("m.experts", mixture))
    for one, other in zip(*stacks, strict=True):
        assert isinstance(one, Stack)
        assert torch.equal(one.values, other.values)
        assert (one.scales is None) == (quantize is None)
        if one.scales is not None and other.scales is not None:
            assert torch.equal(one.scales, other.scales)


def test_gelu_experts_take_their_activation() -> None:
    _, stacked = mixtures()
    gelu = StackedExperts(stacked.router, stacked.gate_up, stacked.down, 2, True, gelu_mul, False)
    x = torch.randn(4, 64)
    assert not torch.allclose(gelu(x), stacked(x))
