"""The Triton sampler in the interpreter, driven by the device sampler, against the CPU sampler."""

from __future__ import annotations

import pytest
import torch

from kernels import sampling
from kernels.triton import sampler
from tests.engine.sampling_rows import expect_the_ids_of_the_cpu


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_operations", lambda logits: sampler)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that rows of a few hundred ids go through every phase."""
    for name, size in (("BLOCK", 64), ("NARROW", 64), ("LIST", 32), ("SAMPLE", 128)):
        monkeypatch.setattr(sampler, name, size)


@pytest.mark.parametrize("num_ids", [1, 2, 50, 300])
def test_random_rows_get_the_ids_and_logprobs_of_the_cpu(num_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    expect_the_ids_of_the_cpu(seed=num_ids, batches=3, rows=16, num_ids=num_ids, steps=2, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_of_the_shipped_size_give_the_ids_of_the_cpu(dtype: torch.dtype) -> None:
    expect_the_ids_of_the_cpu(seed=1, batches=1, rows=16, num_ids=9000, dtype=dtype, steps=2, tolerance=1e-5)
