"""fp32 logits and greedy ids equal transformers', for every family, however the work is cut and batched."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Batch
from engine.config import ModelOptions
from engine.models.loading import LoadedModel, load_model
from kernels.attention.base import AttentionBatch
from tests.models.driver import Driver
from tests.models.reference import Reference, near_ties
from tests.models.tiny import FUSED, STOCK, Case, build_case

Load = Callable[[Case], tuple[LoadedModel, Reference]]
NEW = 12
PREFIXED = [case for case in FUSED + STOCK if case.name in ("llama", "qwen3-windows", "gemma3", "qwen3-moe-mixed")]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[str, tuple[LoadedModel, Reference]] = {}

    def get(case: Case) -> tuple[LoadedModel, Reference]:
        if case.name not in made:
            path: Path = build_case(tmp_path_factory.mktemp(case.name), case)
            backend = "auto" if case in FUSED or not case.name.endswith("-forced") else "transformers"
            loaded = load_model(ModelOptions(str(path), device="cpu", dtype="float32", backend=backend))
            assert loaded.implementation == case.backend
            made[case.name] = loaded, Reference(path)
        return made[case.name]

    return get


def prompts(vocab: int, lengths: list[int], seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("case", FUSED + STOCK, ids=lambda case: case.name)
def test_alone_and_chunked(load: Load, case: Case) -> None:
    loaded, reference = load(case)
    ties = 0
    for block_size, chunks in ((1, None), (4, [1, 2, 14, 3]), (16, [16, 4]), (32, [5, 15])):
        (prompt,) = prompts(loaded.vocab_size, [20], seed=block_size)
        want, logits = reference.generate(prompt, NEW)
        got, ours = Driver(loaded, block_size).generate(prompt, NEW, chunks)
        ties += near_ties(got, want, logits)
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), NEW - 1) + 1
        assert torch.allclose(ours[:same], logits[:same], atol=1e-3, rtol=1e-4)
    print(f"{case.name}: {ties} near-ties")


@pytest.mark.parametrize("case", FUSED + STOCK, ids=lambda case: case.name)
def test_mixed_batch(load: Load, case: Case) -> None:
    """Decodes, chunks and newcomers in one batch, each as it would be alone."""
    loaded, reference = load(case)
    driver = Driver(loaded, block_size=4)
    # Not shorter than the length at which the rope of the longrope cases changes.
    rows = [driver.add(p) for p in prompts(loaded.vocab_size, [18, 31, 17, 24])]
    lengths = [len(row.tokens) for row in rows]
    starts, ready = [0, 0, 2, 3], {}
    logits: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}
    for step in range(40):
        work = [(i, min(len(rows[i].tokens) - rows[i].computed, 7 + i)) for i in range(4) if step >= starts[i]]
        work = [(i, n) for i, n in work if len(logits[i]) < NEW]
        if not work:
            break
        for (i, _), out in zip(work, driver.step([(rows[i], n) for i, n in work]), strict=True):
            if rows[i].computed == len(rows[i].tokens):
                logits[i].append(out)
                rows[i].tokens.append(int(out.argmax()))
                ready[i] = True
    assert len(ready) == 4
    for row, length in zip(rows, lengths, strict=True):
        want, reference_logits = reference.generate(row.tokens[:length], NEW)
        near_ties(row.tokens[length:], want, reference_logits)


@pytest.mark.parametrize("case", PREFIXED, ids=lambda case: case.name)
def test_a_step_may_sample_nothing(load: Load, case: Case) -> None:
    """A batch of unfinished chunks alone."""
    loaded, _ = load(case)
    driver = Driver(loaded)
    attention = AttentionBatch(torch.tensor([0, 1]), torch.tensor([0, 1]), (0, 2), (2,), ((0,),))
    out = driver.model.forward(Batch(torch.tensor([7, 8]), attention, torch.empty(0, dtype=torch.int64)))
    assert out.shape == (0, loaded.vocab_size)
    k, _ = driver.backend.read(0, (0,), 2)
    assert k.isfinite().all()


@pytest.mark.parametrize("case", PREFIXED, ids=lambda case: case.name)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefix_hit_at_every_block(load: Load, case: Case, block_size: int) -> None:
    loaded, reference = load(case)
    first, tail = prompts(loaded.vocab_size, [33, 5], seed=3)
    driver = Driver(loaded, block_size, num_blocks=1024)
    whole = driver.add(first)
    driver.prefill(whole)
    for cached in range(0, 33, block_size):
        tokens = first[: cached + min(2, 33 - cached)] + tail
        row = driver.add(tokens, whole, cached)
        got = driver.prefill(row)[-1]
        want = reference.logits(tokens)[-1]
        assert torch.allclose(got, want, atol=1e-3, rtol=1e-4), cached
        near_ties([int(got.argmax())], [int(want.argmax())], want[None])
