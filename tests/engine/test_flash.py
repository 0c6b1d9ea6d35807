"""The whole engine over the flash backend and its stand-in, on contexts of several pages: transformers' greedy ids, but
for what fp16 rounds away."""

from __future__ import annotations

import functools
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
from engine.request import Request
from tests.engine.stub import expect_short_outputs
from tests.engine.test_model import ask, finish, prompts
from tests.kernels.conftest import flash
from tests.kernels.flash_stand_in import FlashStandIn
from tests.models.driver import Driver
from tests.models.reference import Reference, near_ties
from tests.models.tiny import Case, build_case

__all__ = ["flash"]

_LONG = {"max_position_embeddings": 1024}
CASES = [
    Case("llama", "llama", _LONG),
    Case("llama-one-kv-head", "llama", {**_LONG, "num_key_value_heads": 1, "head_dim": 24}),
    Case("qwen3-windows", "qwen3", {
        **_LONG, "head_dim": 32, "use_sliding_window": True, "sliding_window": 300,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    Case("gemma2", "gemma2", {**_LONG, "head_dim": 32, "sliding_window": 6}, "transformers"),  # soft-cap, too
]  # fmt: skip
LENGTHS = [255, 31, 520, 257]
_load = functools.cache(load_model)
Model = Callable[[Case], tuple[str, Reference, float]]


@pytest.fixture(autouse=True)
def _garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools start as NaN."""
    empty = torch.empty

    def poisoned(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        made = empty(*args, dtype=dtype, **kwargs)
        return made.fill_(0xFF) if dtype is torch.uint8 else made

    monkeypatch.setattr("engine.build.torch.empty", poisoned)
    monkeypatch.setattr("engine.build.load_model", _load)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Path, transformers' fp32 model, and the gap below which fp16 may choose another id.

    The gap is twice what fp16 moves logits by over the reference backend: one for each of the two highest.
    """
    made: dict[str, tuple[str, Reference, float]] = {}

    def get(case: Case) -> tuple[str, Reference, float]:
        if case.name not in made:
            path: Path = build_case(tmp_path_factory.mktemp(case.name), case)
            reference = Reference(path)
            (prompt,) = prompts(300, [300])
            driver = Driver(_load(options(str(path))), block_size=16, backend="reference")
            error = (driver.prefill(driver.add(prompt)) - reference.logits(prompt)).abs().max()
            made[case.name] = str(path), reference, 2 * float(error)
        return made[case.name]

    return get


def options(path: str) -> ModelOptions:
    return ModelOptions(path, device="cpu", dtype="float16")


def make(path: str, *, blocks: int = 24, swap: int = 0, attention: str = "flash", **limits: Any) -> Engine:
    config = EngineConfig(**{"block_size": 0, "max_num_batched_tokens": 2048, **limits})
    cache = CacheOptions(num_blocks=blocks, swap_bytes=swap, attention=attention)
    engine, _ = build_engine(options(path), config, cache)
    assert engine.config.block_size == 256 or attention != "flash"
    return engine


def compare(wanted: tuple[str, Reference, float], finished: dict[str, Finished], requests: list[Request]) -> None:
    """Outputs equal the reference's but for near-ties, and those are few."""
    _, reference, gap = wanted
    ties = 0
    for one in requests:
        want, logits = reference.generate(list(one.prompt), one.params.max_tokens)
        for choice in finished[one.id].choices:
            ties += near_ties(list(choice.token_ids), want, logits, gap)
    assert ties <= len(requests) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_text_equals_transformers_on_every_path(flash: FlashStandIn, model: Model, case: Case) -> None:
    path, *_ = wanted = model(case)
    asked = [ask(f"r{i}", p) for i, p in enumerate(prompts(300, LENGTHS, seed=3))]
    for limits in ({}, {"max_num_batched_tokens": 97}):  # whole prompts; then chunks next to decodes
        engine = make(path, **limits)
        compare(wanted, finish(engine, *asked), asked)
    assert set(flash.calls) == {"varlen", "kvcache"}
    finished = finish(engine, *asked)  # again: prefix hits
    compare(wanted, finished, asked)
    assert sorted(finished[one.id].cached_tokens for one in asked) == [0, 0, 256, 512]


@pytest.mark.parametrize("swap", [0, 1 << 24])
def test_preempted_requests_give_the_same_text(flash: FlashStandIn, model: Model, swap: int) -> None:
    path, *_ = wanted = model(CASES[0])
    engine = make(path, blocks=4, swap=swap)
    expect_short_outputs(engine)
    asked = [ask(f"r{i}", p, 12) for i, p in enumerate(prompts(300, [250, 506, 249], seed=5))]
    compare(wanted, finish(engine, *asked), asked)
    stats = engine.stats()
    assert (stats.preemptions_swap if swap else stats.preemptions_recompute) > 0


@pytest.mark.usefixtures("flash")
def test_choices_that_share_a_page_give_the_same_text(model: Model) -> None:
    """Copy on write: each choice continues from the same partial page."""
    path, *_ = wanted = model(CASES[0])
    asked = [ask("forked", prompts(300, [300], seed=6)[0], n=3), ask("alone", prompts(300, [40], seed=7)[0])]
    finished = finish(make(path), *asked)
    assert len(finished["forked"].choices) == 3
    compare(wanted, finished, asked)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_as_close_to_fp32_as_those_of_the_reference_backend(model: Model, case: Case, dtype: str) -> None:
    """Both round inputs, projections and outputs alike; flash rounds the weights of V as well."""
    path, reference, _ = model(case)
    loaded = _load(ModelOptions(path, device="cpu", dtype=dtype))
    (prompt,) = prompts(300, [530], seed=8)
    want = reference.logits(prompt)
    errors = {}
    for backend, size in (("flash", 256), ("reference", 16)):
        driver = Driver(loaded, size, num_blocks=64, backend=backend)
        got = driver.prefill(driver.add(prompt), [256, 1, 200, 73])
        errors[backend] = float((got - want).square().mean().sqrt())
    assert errors["flash"] <= 1.5 * errors["reference"]
