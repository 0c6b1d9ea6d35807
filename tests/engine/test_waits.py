"""On a GPU the host waits for one event a step and for nothing else, whatever a request asks for; ids are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.loading import LoadedModel
from engine.request import Request
from engine.scheduling import policy
from tests.engine.gpus import engine_on_gpu, expect_one_event_a_step, play
from tests.engine.kinds import KINDS, requests
from tests.engine.stub import expect_short_outputs
from tests.engine.test_gpu import CASES, build
from tests.engine.test_model import ask, prompts
from tests.models.tiny import FUSED, Case, build_case
from tests.pretend_gpu import pretend_gpu

(MOE,) = (case for case in FUSED if case.name == "qwen3-moe")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cases = [Case("llama", "llama", {"num_hidden_layers": 2}), CASES["qwen3-windows"], MOE]
    return {case.name: str(build_case(tmp_path_factory.mktemp(case.name), case)) for case in cases}


@pytest.mark.parametrize(("overlap", "graphs"), [(False, False), (True, True)], ids=["plain", "overlap, graphs"])
def test_each_kind_of_request_waits_for_one_event_a_step(paths: dict[str, str], overlap: bool, graphs: bool) -> None:
    engine, loaded = build(paths["llama"], "cpu")
    want = {kind: play(engine, requests(kind, loaded)) for kind in KINDS}
    with pretend_gpu(stand_ins=True) as gpu:
        engine, loaded = engine_on_gpu(paths["llama"], overlap=overlap, graphs=graphs)
        for kind in KINDS:
            got = play(engine, requests(kind, loaded), gpu)
            expect_one_event_a_step(got)
            assert bool(got.replays) == graphs, kind
            assert got.ids == want[kind].ids, kind
            assert got.logprobs == pytest.approx(want[kind].logprobs, abs=1e-4), kind


def everything(loaded: LoadedModel) -> list[Request]:
    """One or two requests of each kind; long prompts are computed in chunks, beside decodes."""
    lengths = ((70, 3), (9,), (33,), (20,))
    return [one for i, kind in enumerate(KINDS) for one in requests(kind, loaded, lengths[i % 4], 5 + i % 7)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("name", ["llama", "qwen3-windows"])
def test_a_crowd_of_all_kinds_in_chunks_waits_for_one_event_a_step(
    paths: dict[str, str], name: str, overlap: bool, graphs: bool
) -> None:
    engine, loaded = build(paths[name], "cpu")
    want = play(engine, everything(loaded))
    with pretend_gpu(stand_ins=True) as gpu:
        engine, loaded = engine_on_gpu(paths[name], overlap=overlap, graphs=graphs, max_num_batched_tokens=24)
        got = play(engine, everything(loaded), gpu)
    expect_one_event_a_step(got)
    assert got.ids == want.ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.parametrize("swap", [0, 1 << 22], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_preemptions_wait_for_one_event_a_step(
    paths: dict[str, str], overlap: bool, swap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy._RATES, "cuda", (1e12, 1e9))  # so that swapping pays for a model as small as this
    asked = [ask(f"r{i}", p, 30, n=1 + i % 2) for i, p in enumerate(prompts(300, [9, 14, 6, 11], seed=5))]
    want = play(build(paths["llama"], "cpu")[0], asked)
    with pretend_gpu(stand_ins=True) as gpu:
        engine, _ = engine_on_gpu(paths["llama"], overlap=overlap, graphs=True, blocks=8, swap=swap)
        expect_short_outputs(engine)
        got = play(engine, asked, gpu)
        stats = engine.stats()
    assert (stats.preemptions_swap if swap else stats.preemptions_recompute) > 0
    expect_one_event_a_step(got)
    assert got.ids == want.ids


WAYS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "fp8": {"quantize": "fp8", "dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "experts": {"name": "qwen3-moe"},
    "transformers": {"backend": "transformers"},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_precision_and_implementation_waits_for_one_event_a_step(paths: dict[str, str], way: str) -> None:
    options = {"name": "llama", **WAYS[way]}
    path = paths[options.pop("name")]
    kinds = ("greedy", "penalties", "logprobs", "choices")
    with pretend_gpu(stand_ins=True) as gpu:
        engine, loaded = engine_on_gpu(path, overlap=True, graphs=True, **options)
        got = play(engine, [one for kind in kinds for one in requests(kind, loaded)], gpu)
    expect_one_event_a_step(got)
    assert got.replays
    if way in ("float16", "fp8"):  # which no CPU computes
        assert all(len(ids) == 6 for choices in got.ids.values() for ids in choices)
    else:
        engine, loaded = build(path, "cpu", **options)
        assert got.ids == play(engine, [one for kind in kinds for one in requests(kind, loaded)]).ids


def test_a_canary_beside_a_step_in_flight_waits_for_events_alone_and_changes_no_id(paths: dict[str, str]) -> None:
    engine, loaded = build(paths["llama"], "cpu")
    want = play(engine, requests("choices", loaded))
    with pretend_gpu(stand_ins=True) as gpu:
        engine, loaded = engine_on_gpu(paths["llama"], overlap=True, graphs=True)
        for one in requests("choices", loaded):
            engine.add(one)
        for _ in range(3):
            engine.step()
        with gpu.watch() as waited:
            engine.check()
        assert {wait.what for wait in waited} == {"event"}
        assert play(engine, [], gpu).ids == want.ids
