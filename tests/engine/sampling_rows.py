"""Random rows with every option of the sampler, and comparisons of a device sampler with the CPU's."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.outputs import TokenLogprobs
from engine.request import Bans, SamplingParams
from engine.sampling.device import DeviceSampler
from engine.sampling.sampler import PromptRows, Row, Sampled, Sampler

_uids = itertools.count(1_000_000)
EOS = 0


class Mask:
    """A `Matcher` that allows a fixed set of ids."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed

    def fill(self, mask: Tensor, row: int) -> None:
        bits = np.zeros(mask.shape[1] * 32, dtype=bool)
        bits[[i for i in self.allowed if i < len(bits)]] = True
        mask[row] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def accept(self, token: int) -> bool:
        return token in self.allowed

    complete = False
    error = None


def make_row(tokens: list[int], prompt: int, seed: int = 0, mask: set[int] | None = None, **params: Any) -> Row:
    sampling = SamplingParams(max_tokens=1000, **{"temperature": 0.0, **params})
    matcher = None if mask is None else Mask(mask)
    return Row(next(_uids), sampling, seed, seed % 3, prompt, tokens, frozenset({EOS}), matcher)


def random_row(dice: random.Random, num_ids: int) -> Row:
    """A row with a random subset of the options."""

    def sometimes(value: Any, default: Any, share: float = 0.3) -> Any:
        return value if dice.random() < share else default

    def some(most: int) -> frozenset[int]:
        return frozenset(dice.randrange(num_ids + 3) for _ in range(dice.randint(1, most)))

    tokens = [dice.randrange(num_ids) for _ in range(dice.randint(1, 9))]
    sequences = tuple(
        (*(tokens[len(tokens) - k :] if dice.random() < 0.7 else [1] * k), dice.randrange(num_ids))
        for k in (dice.randint(1, min(3, len(tokens))) for _ in range(dice.randint(0, 4)))
    )
    bans = Bans(
        always=sometimes(some(5), frozenset(), 0.5), first=sometimes(some(5), frozenset(), 0.5), sequences=sequences
    )
    return make_row(
        tokens,
        dice.randint(1, len(tokens)),
        dice.getrandbits(60),
        sometimes({dice.randrange(num_ids) for _ in range(dice.choice((1, 5, num_ids)))}, None, 0.2),
        temperature=dice.choice((0.0, 1e-38, 1e-3, 0.3, 0.7, 1.0, 1.5, 40.0)),
        top_k=sometimes(dice.choice((1, 2, 5, 40, 300, 10**9)), 0),
        top_p=sometimes(dice.choice((1e-9, 0.1, 0.5, 0.9, 0.999)), 1.0),
        min_p=sometimes(dice.choice((1e-6, 0.01, 0.3, 1.0)), 0.0),
        repetition_penalty=sometimes(dice.choice((0.5, 1.1, 2.0, 1e-39, 1e38)), 1.0, 0.2),
        frequency_penalty=sometimes(dice.uniform(-2, 2), 0.0, 0.2),
        presence_penalty=sometimes(dice.uniform(-2, 2), 0.0, 0.2),
        logit_bias=sometimes(tuple((i, dice.uniform(-9, 9)) for i in some(6) if i < num_ids), (), 0.2),
        min_tokens=sometimes(dice.randint(1, 8), 0, 0.2),
        stop_token_ids=sometimes(some(3), frozenset(), 0.2),
        bans=sometimes(bans, None, 0.2),
        logprobs=sometimes(dice.choice((0, 1, 5, 20)), None, 0.2),
    )


def random_logits(dice: random.Random, rows: int, num_ids: int, padding: int, dtype: torch.dtype) -> Tensor:
    """Logits of several shapes: spread, peaked, with many ties, flat; columns of the padding are NaN."""
    torch.manual_seed(dice.getrandbits(40))
    logits = torch.randn(rows, num_ids) * torch.tensor([[dice.choice((0.01, 1.0, 4.0, 30.0))] for _ in range(rows)])
    for i in range(rows):
        if dice.random() < 0.25:
            logits[i] = logits[i].round()
        if dice.random() < 0.05:
            logits[i] = 1.5
    return torch.cat((logits, torch.full((rows, padding), math.nan)), 1).to(dtype)


def without_last(row: Row, place: int) -> Row:
    """The same row before the host knows its last id."""
    return dataclasses.replace(row, tokens=row.tokens[:-1], pending=True, place=place)


def close(mine: TokenLogprobs | None, theirs: TokenLogprobs | None, tolerance: float) -> bool:
    """Whether two entries have the same ids, and log-probabilities within the tolerance."""
    if mine is None or theirs is None:
        return mine is theirs
    pairs = list(zip((mine.chosen, *mine.top), (theirs.chosen, *theirs.top), strict=True))
    return all(a.token_id == b.token_id and abs(a.logprob - b.logprob) <= tolerance for a, b in pairs)


def expect_equal(mine: Sampled, theirs: Sampled, tolerance: float = 0.0) -> None:
    """Check that two samplers agree; log-probabilities may differ by the tolerance."""
    assert mine.token_ids == theirs.token_ids
    for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert close(a, b, tolerance), (a, b)
    for one, other in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
        assert all(close(a, b, tolerance) for a, b in zip(one, other, strict=True))


def expect_the_ids_of_the_cpu(
    seed: int,
    batches: int,
    rows: int,
    num_ids: int,
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 3,
    tolerance: float = 0.0,
    device: str = "cpu",
) -> None:
    """Sample random batches on the device and on the CPU for some steps; a row's last id is pending half of the time.

    Rows leave and come back, and some have logits that are not finite.
    """
    dice = random.Random(seed)
    mine, theirs = DeviceSampler(num_ids, device, rows), Sampler(num_ids)
    for _ in range(batches):
        batch = [random_row(dice, num_ids) for _ in range(rows)]
        last = torch.zeros(rows, dtype=torch.int32)
        for _ in range(steps):
            present = [i for i in range(rows) if dice.random() < 0.9] or [0]
            logits = random_logits(dice, len(present), num_ids, dice.choice((0, 5)), dtype)
            if dice.random() < 0.3:
                logits[dice.randrange(len(present)), dice.randrange(num_ids)] = dice.choice((math.nan, math.inf))
            known = [batch[i] for i in present]
            asked = list(known)
            for at, i in enumerate(present):
                last[i] = batch[i].tokens[-1]
                if len(batch[i].tokens) > batch[i].num_prompt_tokens and dice.random() < 0.5:
                    asked[at] = without_last(batch[i], i)
            prompts = [PromptRows([dice.randrange(num_ids)], dice.choice((0, 2, 7)))] if dice.random() < 0.3 else []
            if prompts:
                logits = torch.cat((logits, random_logits(dice, 1, num_ids, logits.shape[1] - num_ids, dtype)))
            drawn = mine.sample(logits.to(device), asked, last.to(device), prompts)
            want = theirs.sample(logits.clone(), known, None, prompts).result()
            expect_equal(drawn.result(), want, tolerance)
            assert drawn.ids.tolist() == [-1 if i is None else i for i in want.token_ids]
            for i, row, token in zip(present, known, want.token_ids, strict=True):
                row.tokens.append(token or 0)
                if token is None:  # its request fails
                    mine.forget(row.uid)
                    batch[i] = random_row(dice, num_ids)
        for row in batch:
            mine.forget(row.uid)
            theirs.forget(row.uid)
