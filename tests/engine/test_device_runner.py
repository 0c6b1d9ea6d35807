"""The runner of a GPU, on the CPU: its ids are those of the CPU's runner, on every path and with a step in flight."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.engine import Engine
from engine.request import Request
from engine.scheduling import policy
from tests.engine.devices import device_engine
from tests.engine.stub import expect_short_outputs
from tests.engine.test_model import ask, finish, prompts
from tests.models.tiny import FUSED, STOCK, build_case
from tests.pretend_gpu import pretend_gpu

NAMES = ("llama", "qwen3-windows", "llama-biases-forced")
CASES = {case.name: case for case in FUSED + STOCK if case.name in NAMES}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(build_case(tmp_path_factory.mktemp(name), case)) for name, case in CASES.items()}


def build(path: str, backend: str = "auto") -> Engine:
    engine, _ = build_engine(
        ModelOptions(path, device="cpu", dtype="float32", backend=backend),
        EngineConfig(block_size=4, max_num_batched_tokens=64),
        CacheOptions(num_blocks=96, attention="reference"),
    )
    return engine


def crowd() -> list[Request]:
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.9, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logit_bias": ((11, 4.0), (12, -3.0)), "min_tokens": 4},
        {"temperature": 0.7, "seed": 10, "n": 3},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"prompt_logprobs": 0},
    ]
    return [ask(f"r{i}", p, **params[i]) for i, p in enumerate(prompts(300, [70, 5, 33, 12, 40, 21, 90], seed=2))]


def results(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    return {
        name: [(c.token_ids, c.logprobs, c.prompt_logprobs) for c in done.choices]
        for name, done in finish(engine, *requests).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_mixed_batches_forks_and_logprobs_equal_those_of_the_cpus_runner(paths: dict[str, str], name: str) -> None:
    backend = "transformers" if name.endswith("forced") else "auto"
    want = results(build(paths[name], backend=backend), crowd())
    engine, runner = device_engine(paths[name], "cpu", backend=backend)
    assert results(engine, crowd()) == want
    assert len(runner.places) == len(runner._rows) == 0


@pytest.mark.parametrize("slots", [0, 40])
def test_preempted_requests_give_the_ids_of_the_cpus_runner(
    paths: dict[str, str], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy._RATES, "cpu", (1e12, 1e9))  # so that swapping pays for a model as small as this
    asked = [ask(f"r{i}", p, 30, n=1 + i % 2) for i, p in enumerate(prompts(300, [9, 14, 6, 11], seed=5))]
    want = results(build(paths["llama"]), asked)
    engine, _ = device_engine(paths["llama"], "cpu", num_blocks=20, slots=slots)
    expect_short_outputs(engine)
    assert results(engine, asked) == want
    stats = engine.stats()
    assert (stats.preemptions_swap if slots else stats.preemptions_recompute) > 0


@pytest.mark.parametrize("slots", [0, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_in_flight_changes_no_id(
    paths: dict[str, str], seed: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops, forks, preemptions and cancels while the ids of the last step are not known to the host."""
    monkeypatch.setitem(policy._RATES, "cpu", (1e12, 1e9))
    chance = random.Random(seed)
    asked = [
        ask(
            f"r{i}",
            p,
            chance.randrange(1, 25),
            n=chance.choice([1, 3]),
            temperature=chance.choice([0.0, 1]),
            seed=i,
        )
        for i, p in enumerate(prompts(300, [chance.randrange(1, 40) for _ in range(9)], seed=seed))
    ]
    want = results(build(paths["llama"]), asked)
    engine, runner = device_engine(paths["llama"], "cpu", num_blocks=24, slots=slots, overlap=True, max_num_seqs=5)
    expect_short_outputs(engine)
    assert results(engine, asked) == want
    stats = engine.stats()
    assert (stats.preemptions_swap if slots else stats.preemptions_recompute) > 0
    assert len(runner.places) == 0


def test_a_launch_that_raises_leaves_tables_that_the_next_launch_repairs(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(f"r{i}", p, 12) for i, p in enumerate(prompts(300, [9, 30, 6], seed=5))]
    want = results(build(paths["llama"]), asked)
    engine, runner = device_engine(paths["llama"], "cpu", overlap=True)
    send, calls = runner.staging.send, iter(range(1000))

    def fails(*args: Any) -> Any:
        if next(calls) in (3, 12):
            raise RuntimeError("no upload")
        return send(*args)

    monkeypatch.setattr(runner.staging, "send", fails)
    assert results(engine, asked) == want


def test_more_changed_table_entries_than_fit_into_a_step_go_up_apart(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.runner._CHANGES", 3)
    want = results(build(paths["llama"]), crowd())
    engine, _ = device_engine(paths["llama"], "cpu")
    assert results(engine, crowd()) == want


def test_a_place_may_be_given_away_while_a_step_with_it_is_in_flight(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU as late as it may be. A stop is seen one step late: that step still has a row of the ended sequence."""
    asked = [
        ask(f"r{i}", p, 12, temperature=1.0, seed=i, stop_token_ids=frozenset(range(160)))
        for i, p in enumerate(prompts(300, [3, 9, 7, 5] * 3, seed=8))
    ]
    want = results(build(paths["llama"]), asked)
    with pretend_gpu(total=1 << 30):
        engine, runner = device_engine(paths["llama"], "cuda", overlap=True, max_num_seqs=2)
        owners: list[dict[int, int]] = [{}]
        forward = runner._forward

        def noted(step: Any) -> Any:
            owners.append(dict(zip(step.places.tolist(), (seq.uid for seq in step.seqs), strict=True)))
            return forward(step)

        monkeypatch.setattr(runner, "_forward", noted)
        assert results(engine, asked) == want
    handed_on = [1 for a, b in pairwise(owners) for place in a if b.get(place, a[place]) != a[place]]
    assert handed_on
