"""The logits of the fused decoder have the same bits alone, beside other sequences, chunked, and after a prefix hit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from engine.config import ModelOptions
from engine.models.loading import LoadedModel, load_model
from tests.models.driver import Driver
from tests.models.tiny import FUSED, Case, build_case

CASES = [c for c in FUSED if c.name in ("llama-biases", "qwen3-windows", "smollm3", "llama-head-dim")]
OTHERS = [
    c
    for c in FUSED
    if c.name in ("phi3-partial-longrope", "gemma2", "gemma3", "granite", "olmo2", "qwen3-moe", "qwen3-moe-mixed")
]
LENGTH = 45


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_case(tmp_path_factory.mktemp(request.param.name), request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, path: Path) -> LoadedModel:
    model = load_model(ModelOptions(str(path), device="cpu", dtype=request.param))
    assert model.batch_invariant
    return model


def draw(loaded: LoadedModel, length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(loaded.vocab_size) for _ in range(length)]


@pytest.fixture(params=["auto", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sizes(loaded: LoadedModel, backend: str) -> list[int]:
    """Return block sizes that the backend supports; with other sizes `auto` would take another backend."""
    multiple = Driver(loaded, 16, backend=backend).backend.page_multiple
    return [size for size in (1, 4, 16, 32) if size % multiple == 0]


def check_cuts(loaded: LoadedModel, backend: str, cuts: Iterable[int]) -> None:
    """A sequence in two chunks, in single tokens and after prefix hits is what it is in one go."""
    tokens = draw(loaded, LENGTH, 0)
    driver = Driver(loaded, 16, backend=backend)
    want = driver.prefill(driver.add(tokens))

    one_by_one = driver.prefill(driver.add(tokens), [1] * LENGTH)
    assert torch.equal(one_by_one, want)

    for block_size in sizes(loaded, backend):
        driver = Driver(loaded, block_size, num_blocks=4096, seed=block_size, backend=backend)
        for cut in cuts:
            assert torch.equal(driver.prefill(driver.add(tokens), [cut, LENGTH - cut]), want), cut
        whole = driver.add(tokens)
        driver.prefill(whole)
        for cached in range(block_size, LENGTH, block_size):
            assert torch.equal(driver.prefill(driver.add(tokens, whole, cached)), want[cached:]), cached


def check_neighbours(loaded: LoadedModel, backend: str, seeds: int) -> None:
    tokens = draw(loaded, LENGTH, 0)
    alone = Driver(loaded, 16, backend=backend)
    want = alone.prefill(alone.add(tokens))
    for seed in range(seeds):
        dice = random.Random(seed)
        driver = Driver(loaded, sizes(loaded, backend)[0], num_blocks=4096, seed=seed, backend=backend)
        others = [driver.add(draw(loaded, dice.choice([1, 3, 20, 90]), 100 + i)) for i in range(dice.choice([1, 3, 9]))]
        row = driver.add(tokens)
        got = []
        while row.computed < LENGTH:
            work = [(o, min(dice.choice([1, 1, 7, 40]), len(o.tokens) - o.computed)) for o in others]
            work = [(o, n) for o, n in work if n]
            at = dice.randrange(len(work) + 1)
            work.insert(at, (row, min(dice.choice([1, 2, 11, 30]), LENGTH - row.computed)))
            got.append(driver.step(work, every_row=True)[at])
        assert torch.equal(torch.cat(got), want), seed


def test_bits_of_a_row_depend_on_its_sequence_alone(loaded: LoadedModel, backend: str) -> None:
    check_cuts(loaded, backend, range(1, LENGTH))


def test_bits_do_not_depend_on_neighbours(loaded: LoadedModel, backend: str) -> None:
    check_neighbours(loaded, backend, 6)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_bits_of_every_family_depend_on_the_sequence_alone(
    tmp_path: Path, case: Case, dtype: str, quantize: str
) -> None:
    loaded = load_model(ModelOptions(str(build_case(tmp_path, case)), device="cpu", dtype=dtype, quantize=quantize))
    assert (loaded.implementation, loaded.batch_invariant) == ("fused", True)
    check_cuts(loaded, "auto", (1, 17, 44))
    check_neighbours(loaded, "auto", 2)


def test_bits_do_not_depend_on_the_number_of_sampled_rows(loaded: LoadedModel) -> None:
    driver = Driver(loaded, 16)
    rows = [driver.add(draw(loaded, 9, i)) for i in range(20)]
    want = driver.step([(row, 9) for row in rows])
    for row, logits in zip(rows, want, strict=True):
        assert torch.equal(driver.step([(driver.add(row.tokens), 9)])[0], logits)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_give_the_bits_of_one(loaded: LoadedModel) -> None:
    """However a chunk is cut; that another number of threads agrees is not promised, but so it is."""
    tokens = draw(loaded, LENGTH, 0)
    driver = Driver(loaded, 16, num_blocks=1024)
    want = driver.prefill(driver.add(tokens))
    for chunks in ([3] * 15, [1, 2, 42], [30, 15]):
        assert torch.equal(driver.prefill(driver.add(tokens), chunks), want)
    torch.set_num_threads(1)
    assert torch.equal(driver.prefill(driver.add(tokens)), want)
