"""Which graph a step of decodes gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device.graphs import Graphs
from tests.pretend_gpu import pretend_gpu


class Backend:
    """Splits contexts of up to so many rows times tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def bound(self, rows: int, longest: int, max_context: int) -> int:
        return longest if rows * longest <= self.limit else max_context


def captured(max_rows: int, max_context: int, limit: int = 1 << 60) -> tuple[Graphs, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    def step(rows: int, longest: int) -> torch.Tensor:
        seen.append((rows, longest))
        return torch.zeros((rows, 2), device="cuda")

    backend: Any = Backend(limit)
    graphs = Graphs(step, backend, max_rows, max_context)
    graphs.capture(torch.device("cuda", 0))
    assert graphs.count == graphs.planned
    return graphs, seen


def found(graphs: Graphs, rows: int, longest: int) -> tuple[int, int] | None:
    graph = graphs.find(rows, longest)
    return None if graph is None else (graph.rows, graph.longest)


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 32, 40))],
)
def test_the_largest_steps_are_captured_first_and_each_runs_once_before(max_rows: int, sizes: tuple[int, ...]) -> None:
    with pretend_gpu():
        graphs, seen = captured(max_rows, 2048)
    assert graphs.sizes == sizes
    assert seen == [(size, bound) for size in reversed(sizes) for bound in (2048, 1024) for _ in range(2)]


def test_a_step_gets_the_smallest_graph_that_holds_its_rows_and_contexts() -> None:
    with pretend_gpu():
        graphs, _ = captured(40, 40_000)
        assert [found(graphs, rows, 1000) for rows in (1, 3, 17, 33, 40)] == [(n, 1024) for n in (1, 4, 32, 40, 40)]
        assert found(graphs, 41, 1000) is None
        for longest, bound in ((1024, 1024), (1025, 4096), (16_384, 16_384), (16_385, 40_000), (40_000, 40_000)):
            assert found(graphs, 8, longest) == (8, bound)
        graphs.active = False
        assert found(graphs, 8, 1000) is None


def test_bounds_that_change_no_launch_share_a_graph() -> None:
    with pretend_gpu():
        graphs, _ = captured(8, 40_000, limit=8 * 1024)
        assert found(graphs, 8, 1000) == (8, 1024)
        assert found(graphs, 8, 1025) == (8, 40_000)
        assert found(graphs, 2, 1025) == (2, 4096)
        assert graphs.count == 2 + 2 + 3 + 3


def test_disabled_graphs_are_gone_and_say_why() -> None:
    with pretend_gpu():
        graphs, _ = captured(4, 1000)
        graphs.disable("they differ")
        assert (graphs.count, graphs.reason, found(graphs, 1, 1)) == (0, "they differ", None)
