"""The device sampler, in plain torch, against the CPU sampler: equal ids for every option, and one event is waited for.

`tests/kernels/triton/test_sampler.py` has the same comparison for the Triton kernels.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from engine.request import Bans
from engine.sampling.device import DeviceSampler
from engine.sampling.sampler import PromptRows, Row, Sampled, Sampler
from tests.engine.sampling_rows import Mask, expect_the_ids_of_the_cpu, make_row, random_row, without_last
from tests.pretend_gpu import pretend_gpu

DTYPES = [torch.bfloat16, torch.float16]


def both(logits: torch.Tensor, rows: list[Row]) -> tuple[Sampled, Sampled]:
    mine = DeviceSampler(logits.shape[1], "cpu", len(rows)).sample(logits, rows).result()
    return mine, Sampler(logits.shape[1]).sample(logits.clone(), rows).result()


@pytest.mark.parametrize("num_ids", [1, 2, 7, 50, 300, 5000])
def test_thousands_of_random_rows_get_the_ids_and_logprobs_of_the_cpu(num_ids: int) -> None:
    expect_the_ids_of_the_cpu(seed=num_ids, batches=6 if num_ids == 5000 else 30, rows=20, num_ids=num_ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_16_bits_give_the_ids_of_the_cpu(dtype: torch.dtype) -> None:
    expect_the_ids_of_the_cpu(seed=1, batches=20, rows=20, num_ids=300, dtype=dtype)


def test_a_batch_larger_than_a_chunk_gives_the_ids_of_the_cpu() -> None:
    torch.manual_seed(0)
    num_ids = 1 << 18
    rows = [make_row([1], 1, seed, temperature=1.0, top_p=0.9, logprobs=3) for seed in range(9)]
    mine, want = both(torch.randn(9, num_ids) * 3, rows)
    assert mine == want


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(4, 50)
    before = logits.clone()
    rows = [random_row(random.Random(seed), 50) for seed in range(4)]
    DeviceSampler(50, "cpu", 4).sample(logits, rows).result()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_allows_no_id_and_bans_of_all_allowed_ids_give_the_ids_of_the_cpu(temperature: float) -> None:
    rows = [
        make_row([1], 1, mask=set(), temperature=temperature),
        make_row([1], 1, mask={3, 4}, bans=Bans(always=frozenset({3, 4, 5})), temperature=temperature),
        make_row([1], 1, mask={3}, min_tokens=2, stop_token_ids=frozenset({3}), temperature=temperature),
        make_row([1], 1, bans=Bans(always=frozenset(range(9))), temperature=temperature),
        make_row([1], 1, min_tokens=2, stop_token_ids=frozenset(range(9)), temperature=temperature),
    ]
    mine, want = both(torch.randn(5, 9), rows)
    assert mine == want


def test_a_ban_after_a_pending_id_holds_only_after_that_id() -> None:
    bans = Bans(sequences=((2, 3, 0), (5, 0), (1, 2, 3, 4)))
    logits = torch.tensor([[9.0, 0, 0, 0, 8.0, 7.0]] * 4)
    known = [make_row([1, 2, 3], 1, bans=bans), make_row([1, 2, 5], 1, bans=bans), make_row([1, 2, 4], 1, bans=bans)]
    known.append(make_row([7, 2, 3], 1, bans=bans))
    rows = [without_last(row, place) for place, row in enumerate(known)]
    last = torch.tensor([3, 5, 4, 3], dtype=torch.int32)
    drawn = DeviceSampler(6, "cpu", 4).sample(logits, rows, last)
    assert drawn.result().token_ids == (5, 4, 0, 4)
    assert Sampler(6).sample(logits.clone(), rows, last).result().token_ids == (5, 4, 0, 4)


def test_a_pending_id_that_was_not_finite_is_nowhere_counted() -> None:
    row = dataclasses.replace(make_row([1], 1, frequency_penalty=1.0), pending=True)
    drawn = DeviceSampler(4, "cpu", 1).sample(torch.ones(1, 4), [row], torch.tensor([-1], dtype=torch.int32))
    assert drawn.result().token_ids == (0,)


def test_rows_with_penalties_that_lost_their_slot_are_counted_again() -> None:
    dice = random.Random(0)
    rows = [make_row([dice.randrange(30)], 1, seed, repetition_penalty=1.5, temperature=0.5) for seed in range(5)]
    mine, theirs = DeviceSampler(30, "cpu", 2), Sampler(30)
    for _ in range(40):
        pair = dice.sample(rows, 2)
        logits = torch.randn(2, 30)
        want = theirs.sample(logits.clone(), pair).result()
        assert mine.sample(logits, pair).result() == want
        for row, token in zip(pair, want.token_ids, strict=True):
            row.tokens.append(token or 0)
    with pytest.raises(IndexError, match="3 rows with penalties in a step, but only 2 slots"):
        mine.sample(torch.randn(3, 30), rows[:3])


def test_a_row_that_ended_leaves_nothing_behind_and_the_memory_is_counted() -> None:
    sampler = DeviceSampler(50, "cpu", 3)
    rows = [make_row([1], 1, temperature=1.0, frequency_penalty=0.1) for _ in range(3)]
    sampler.sample(torch.randn(3, 50), rows).result()
    assert not sampler.idle
    for row in rows:
        sampler.forget(row.uid)
    sampler.sample(torch.randn(0, 50), []).result()
    assert sampler.idle
    assert sampler.bytes == 3 * 64 * (4 + 4)


def test_prompt_logprobs_come_without_a_sampled_row() -> None:
    logits = torch.randn(5, 30)
    prompts = [PromptRows([3, 29], 2), PromptRows([1, 2, 0], 0)]
    mine = DeviceSampler(30, "cpu", 1).sample(logits, [], None, prompts).result()
    assert mine == Sampler(30).sample(logits.clone(), [], None, prompts).result()
    assert [len(entries) for entries in mine.prompt_logprobs] == [2, 3]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.5},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias": {"logit_bias": ((3, 2.0),)},
    "bans": {"bans": Bans(always=frozenset({1}), first=frozenset({2}), sequences=((1, 2), (2, 3, 4)))},
    "min_tokens": {"min_tokens": 9},
    "logprobs": {"logprobs": 4},
    "grammar": {"mask": {1, 5, 9}, "temperature": 0.8},
}


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
def test_the_host_waits_for_one_event_and_gets_the_ids_of_the_cpu(name: str, pending: bool) -> None:
    chosen = OPTIONS.values() if name == "all" else [OPTIONS[name]] * 3
    known = [make_row([1, 2, 3], 1, seed, **options) for seed, options in enumerate(chosen)]
    logits = torch.randn(len(known) + 2, 70)
    logits[0, 4] = math.nan
    prompts = [PromptRows([3, 5], 2)] if name in ("logprobs", "all") else []
    want = Sampler(60).sample(logits.clone(), known, None, prompts).result()
    rows = [without_last(row, i) for i, row in enumerate(known)] if pending else known
    with pretend_gpu() as gpu:
        there, last = logits.to("cuda"), torch.full((len(rows),), 3, dtype=torch.int32).to("cuda")
        sampler = DeviceSampler(60, "cuda", len(rows))
        for _ in range(2):
            before = gpu.waits
            drawn = sampler.sample(there, rows, last, prompts)
            assert gpu.waits == before
            result = drawn.result()
            assert gpu.waits == before + 1
            assert result == want
            for row in rows:
                sampler.forget(row.uid)


def test_a_matcher_of_these_tests_writes_the_bits_of_its_ids() -> None:
    bits = torch.full((1, 2), -1, dtype=torch.int32)
    Mask({0, 33, 63}).fill(bits, 0)
    assert bits.tolist() == [[1, -(2**31) + 2]]
