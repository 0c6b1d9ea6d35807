"""The rows of the check of a GPU that compare graphs with eager steps, and overlap with none, on the pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.gpu_check import engines
from bench.gpu_check.models import SHAPES
from bench.gpu_check.table import Setup, machine
from engine.device.graphs import Graph
from engine.engine import Engine
from engine.start.device_memory import DeviceMemory

SETUP = Setup(reduced=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with machine(SETUP):
        yield engines._engine(SETUP, torch.float32, max_num_seqs=3)[0]


def test_a_graph_that_differs_from_the_eager_step_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "5 of them replayed" in engines._same(SETUP, engine, 3)
    replay = Graph.replay

    def wrong(self: Graph) -> Tensor:
        return replay(self) * (1 + 2**-20)

    monkeypatch.setattr(Graph, "replay", wrong)
    with pytest.raises(ValueError, match="logits differ"):
        engines._same(SETUP, engine, 3)


def test_a_run_in_which_no_step_was_a_graph_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runner.graphs, "_graphs", {})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no step ran as a graph"):
        engines._same(SETUP, engine, 1)


def test_an_id_that_differs_with_overlap_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = engines.crowd(SETUP)[:2]
    monkeypatch.setattr(engines, "crowd", lambda _: requests)
    assert "ids of 2 requests" in engines._overlap(SETUP, engine)
    run = engines.models.run

    def wrong(engine: Engine, asked: object) -> object:
        ids, seconds = run(engine, requests)
        return {name: [[*texts[0], 1]] if engine.overlap else texts for name, texts in ids.items()}, seconds

    monkeypatch.setattr(engines.models, "run", wrong)
    with pytest.raises(ValueError, match="2 of 2 requests get other ids"):
        engines._overlap(SETUP, engine)


def test_the_memory_of_a_random_model_is_measured_as_weights_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(DeviceMemory, "check_end", lambda self, _: found.append((self.weights, self.elsewhere)))
    with machine(SETUP):
        engines._engine(SETUP, torch.float32, max_num_seqs=1)
    ((weights, elsewhere),) = found
    assert weights > 4 * SHAPES["tiny"].step_weights > elsewhere == 0
