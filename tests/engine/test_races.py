"""Steps in flight on a GPU that is as late as it may be: random schedules give the ids of the CPU, and a runner that
overwrites or reads too early does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.device.places import BlockTables
from engine.device.staging import Staging
from engine.engine import Engine
from engine.models.loading import LoadedModel
from engine.outputs import EngineBroken, Finished, Outcome
from engine.request import Request
from engine.scheduling import policy
from kernels.device import Download
from tests.engine.gpus import engine_on_gpu, play, runner_of
from tests.engine.kinds import KINDS, requests
from tests.engine.stub import expect_idle, expect_short_outputs, preempt
from tests.engine.test_gpu import build
from tests.engine.test_model import ask, prompts
from tests.models.tiny import Case, build_case
from tests.pretend_gpu import pretend_gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_case(tmp_path_factory.mktemp("llama"), Case("llama", "llama", {"num_hidden_layers": 2})))


def live(engine: Engine) -> list[str]:
    return sorted({seq.request.id for seq in (*engine.scheduler.running, *engine.scheduler.waiting)})


def disturbed(engine: Engine, asked: list[Request], draw: random.Random) -> dict[str, Finished]:
    """Run the requests as they arrive at random times; cancel some, and preempt others while a step is in flight."""
    waiting = list(asked)
    finished: dict[str, Finished] = {}
    while waiting or engine.has_work:
        for _ in range(draw.choice((0, 0, 1, 3))):
            if waiting:
                engine.add(waiting.pop())
        if engine.has_work and draw.random() < 0.06:
            engine.cancel(draw.choice(live(engine) or [""]))
        if engine.scheduler.running and draw.random() < 0.1:
            preempt(engine, draw.choice(engine.scheduler.running).request.id)
        for done in engine.step().finished:
            finished[done.request_id] = done
        engine.check_integrity()
    expect_idle(engine)
    return finished


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_cancels_and_preemptions_give_the_ids_of_the_cpu(
    path: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy._RATES, "cuda", (1e12, 1e9))  # so that swapping pays for a model as small as this
    draw = random.Random(seed)

    def made(loaded: LoadedModel) -> list[Request]:
        lengths = tuple(random.Random(seed).choices((2, 7, 18, 40), k=2))
        return [one for kind in KINDS for one in requests(kind, loaded, lengths, 4 + seed * 3)]

    engine, loaded = build(path, "cpu")
    want = play(engine, made(loaded)).finished
    with pretend_gpu(stand_ins=True):
        engine, loaded = engine_on_gpu(
            path, overlap=True, graphs=True, blocks=14, swap=(seed % 2) << 20, max_num_batched_tokens=32
        )
        expect_short_outputs(engine)
        got = disturbed(engine, draw.sample(made(loaded), 26), draw)
    for name, done in got.items():
        for choice, reference in zip(done.choices, want[name].choices, strict=True):
            ids = choice.token_ids
            assert ids == reference.token_ids[: len(ids)]
            assert done.outcome is Outcome.CANCELLED or len(ids) == len(reference.token_ids)
    assert sum(done.outcome is Outcome.SUCCEEDED for done in got.values()) > 10


def test_a_device_that_is_full_for_a_while_changes_no_id(path: str) -> None:
    asked = [ask(f"r{i}", p, 12) for i, p in enumerate(prompts(300, [20, 40, 6, 33], seed=5))]
    want = play(build(path, "cpu")[0], asked).ids
    with pretend_gpu(stand_ins=True) as gpu:
        engine, _ = engine_on_gpu(path, overlap=True, graphs=True, max_num_batched_tokens=32)
        for one in asked[:2]:
            engine.add(one)
        finished = [done for _ in range(3) for done in engine.step().finished]
        for one in asked[2:]:
            engine.add(one)
        gpu.memory.empty_cache()
        gpu.memory.others = gpu.memory.free()  # another process takes what is left
        before = engine.stats().steps
        finished += engine.step().finished
        assert engine.stats().steps == before + 1
        gpu.memory.others = 0
        finished += play(engine, []).finished.values()
    assert {done.request_id: [choice.token_ids for choice in done.choices] for done in finished} == want


# ── broken on purpose ─────────────────────────────────────────────────────────────────────────────────────────────────


def one_buffer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Fill the same pinned buffer for each step, without a wait for its copy."""
    patch.setattr(Staging, "next", lambda self: self._pinned[0])


def results_read_too_early(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Read what a download copies without waiting for its event."""
    patch.setattr(Download, "wait", lambda self: self._copies)


def last_ids_elsewhere(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Write sampled ids to a tensor where the next step does not look for them."""
    staging = runner_of(engine).staging
    staging.last = staging.last.clone()


def tables_that_stay(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Upload no change of a block table."""
    none = np.zeros(0, np.int32)
    patch.setattr(BlockTables, "update", lambda *_: (none, none))


def tables_that_move(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Replace a tensor that the graphs read."""
    runner = runner_of(engine)
    runner._tables = runner._tables.clone()


BROKEN = [one_buffer, results_read_too_early, last_ids_elsewhere, tables_that_stay, tables_that_move]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda function: function.__name__)
def test_a_runner_that_is_broken_on_purpose_is_noticed(
    path: str, broken: Callable[[Engine, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(f"r{i}", p, 12) for i, p in enumerate(prompts(300, [20, 14, 6], seed=5))]
    want = play(build(path, "cpu")[0], asked).ids
    with pretend_gpu(stand_ins=True):
        engine, _ = engine_on_gpu(path, overlap=True, graphs=True)
        broken(engine, monkeypatch)
        try:
            got = play(engine, asked).ids
        except (torch.AcceleratorError, EngineBroken):
            return
    assert got != want
