"""The Triton sampler in the interpreter, driven by the device sampler, against the CPU sampler."""

from __future__ import annotations

import pytest
import torch

from engine.sampling.device import DeviceSampler
from engine.sampling.sampler import Sampler
from kernels import sampling
from kernels.triton import sampler
from tests.engine.sampling_rows import expect_the_ids_of_the_cpu, make_row


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_operations", lambda logits: sampler)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that rows of a few hundred ids go through every phase."""
    for name, size in (("SCAN", 64), ("BLOCK", 64), ("LIST", 32), ("SAMPLE", 128)):
        monkeypatch.setattr(sampler, name, size)


@pytest.mark.parametrize("num_ids", [1, 50, 300])
def test_random_rows_get_the_ids_and_logprobs_of_the_cpu(num_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    expect_the_ids_of_the_cpu(seed=num_ids, batches=1, rows=20, num_ids=num_ids, steps=2, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_of_the_shipped_size_give_the_ids_of_the_cpu(dtype: torch.dtype) -> None:
    expect_the_ids_of_the_cpu(seed=1, batches=1, rows=10, num_ids=9001, dtype=dtype, steps=1, tolerance=1e-5)


def test_greedy_rows_get_their_first_highest_id() -> None:
    logits = torch.randn(5, 1000)
    logits[0, [3, 500]] = 9.0
    logits[1, 7] = torch.nan
    logits[2, 7] = -torch.inf
    logits[3, 950] = torch.inf  # beyond the ids
    want = [3, -1, -1, int(logits[3, :900].argmax()), int(logits[4, :900].argmax())]
    assert sampler.highest(logits, 900).tolist() == want


def test_equal_logits_are_one_tie_whatever_the_pivots(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    logits = torch.full((4, 500), 1.5)
    logits[1, ::2] = 1.0
    logits[2] = torch.arange(500).float() // 100
    logits[3, 17] = 1.5000001
    rows = [
        make_row([1], 1, seed, temperature=0.9, top_k=k, top_p=p)
        for seed, (k, p) in enumerate([(3, 0.5), (300, 1.0), (150, 0.7), (1, 1.0)])
    ]
    want = Sampler(500).sample(logits.clone(), rows).result()
    assert DeviceSampler(500, "cpu", 4).sample(logits, rows).result() == want
