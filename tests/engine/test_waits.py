"""On a GPU the host waits for one event a step and for nothing else, whatever a request asks for; ids are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.gpus import engine_on_gpu, expect_one_event_a_step, play
from tests.engine.kinds import KINDS, requests
from tests.engine.test_gpu import build
from tests.models.tiny import Case, build_case
from tests.pretend_gpu import pretend_gpu

MODES = [(False, False), (True, True)]
"""Overlap, graphs."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("llama")
    return str(build_case(folder, Case("two", "llama", {"num_hidden_layers": 2})))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_waits_for_one_event_a_step(path: str, kind: str) -> None:
    engine, loaded = build(path, "cpu")
    want = play(engine, requests(kind, loaded))
    for overlap, graphs in MODES:
        with pretend_gpu(stand_ins=True) as gpu:
            engine, loaded = engine_on_gpu(path, overlap=overlap, graphs=graphs)
            got = play(engine, requests(kind, loaded), gpu)
        expect_one_event_a_step(got)
        assert bool(got.replays) == graphs
        assert got.ids == want.ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
