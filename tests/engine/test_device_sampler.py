"""The device sampler, in plain torch, against the CPU sampler: equal ids for every option, and no wait but one."""

from __future__ import annotations

import pytest
import torch

from tests.engine.sampling_rows import expect_the_ids_of_the_cpu


@pytest.mark.parametrize("num_ids", [1, 2, 7, 50, 300, 5000])
def test_random_rows_get_the_ids_and_logprobs_of_the_cpu(num_ids: int) -> None:
    expect_the_ids_of_the_cpu(seed=num_ids, batches=6 if num_ids == 5000 else 30, rows=20, num_ids=num_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_give_the_ids_of_the_cpu(dtype: torch.dtype) -> None:
    expect_the_ids_of_the_cpu(seed=1, batches=20, rows=20, num_ids=300, dtype=dtype)
