"""The sampler against values worked out by hand, and its independence of everything but the row."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from engine.request import Bans, SamplingParams
from engine.sampling.sampler import Row, Sampler, uniform

_uids = itertools.count()


def row(
    tokens: list[int] | None = None, prompt: int = 1, *, seed: int = 1, index: int = 0, eos: int = 0, **params: object
) -> Row:
    sampling = SamplingParams(max_tokens=100, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return Row(next(_uids), sampling, seed, index, prompt, tokens or [1], frozenset({eos}))


def pick(logits: list[float], one: Row) -> int | None:
    return Sampler(len(logits)).sample(torch.tensor([logits]), [one]).result().token_ids[0]


def support(logits: list[float], draws: int = 400, **params: object) -> set[int | None]:
    """Which ids come out at all, over many seeds."""
    rows = [row(seed=s, **{"temperature": 1.0, **params}) for s in range(draws)]
    return set(Sampler(len(logits)).sample(torch.tensor([logits] * draws), rows).result().token_ids)


def test_temperature_zero_takes_the_highest_whatever_the_filters() -> None:
    assert pick([1.0, 3.0, 2.0], row(top_p=0.1, top_k=1)) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert pick([1.0, 3.0, 2.0], row(temperature=temperature, logit_bias=((2, -100.0),))) == 1


def test_temperature_comes_before_top_p() -> None:
    # softmax([4,3,1] / 0.5) starts with 0.879, which is enough for 0.75 alone; at temperature 1 it would be 0.705.
    assert support([4.0, 3.0, 1.0], temperature=0.5, top_p=0.75) == {0}
    assert support([4.0, 3.0, 1.0], temperature=1.0, top_p=0.75) == {0, 1}


def test_a_tiny_top_p_and_a_full_min_p_keep_the_best_alone() -> None:
    assert support([2.0, 1.9, 1.8], top_p=1e-9) == {0}
    assert support([2.0, 1.9, 1.8], min_p=1.0) == {0}


def test_top_k_keeps_k_and_all_ties_at_its_edge() -> None:
    assert support([3.0, 2.9, 2.8, 2.7], top_k=2) == {0, 1}
    assert support([3.0, 2.9, 2.9, 2.7], top_k=2) == {0, 1, 2}
    assert support([3.0, 2.9, 2.8, 2.7], top_k=10**9) == {0, 1, 2, 3}
    assert support([3.0, 2.9, 2.8, 2.7], top_k=0) == {0, 1, 2, 3}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # Two equal ones remain; 0.6 of their mass needs both, 0.5 needs one (and its tie).
    logits = [2.0, 1.99, 1.98, 1.97]
    assert support(logits, top_k=2, top_p=0.49) == {0}
    assert support(logits, top_k=2, top_p=0.6) == {0, 1}


def test_min_p_cuts_relative_to_the_best() -> None:
    logits = [0.0, math.log(0.5), math.log(0.2), math.log(0.05)]
    assert support(logits, min_p=0.1) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_a_flat_distribution_needs_more_than_the_sorted_top(top_p: float) -> None:
    logits = torch.linspace(0, 0.001, 3000).tolist()
    out = support(logits, draws=3000, top_p=top_p)
    least = min(i for i in out if i is not None)
    assert abs(least / 3000 - (1 - top_p)) < 0.02


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [row(seed=s, temperature=1.0) for s in range(8000)]
    out = Counter(Sampler(4).sample(probabilities.log().repeat(8000, 1), rows).result().token_ids)
    for i, p in enumerate(probabilities.tolist()):
        assert abs(out[i] / 8000 - p) < 5 * math.sqrt(p * (1 - p) / 8000)


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    logits = torch.tensor([[0.0, 1.0, 50.0]])
    assert Sampler(2).sample(logits.clone(), [row()]).result().token_ids == (1,)
    assert Sampler(2).sample(logits.clone(), [row(temperature=5.0)]).result().token_ids[0] in (0, 1)


def test_a_row_does_not_depend_on_neighbours_order_or_history() -> None:
    torch.manual_seed(0)
    base = torch.randn(9, 500)
    settings = [  # temperature, top_p, top_k, repetition, frequency
        (0, 1, 0, 1, 0),
        (1, 1, 0, 1, 0),
        (0.7, 0.9, 0, 1.2, 0),
        (1, 1, 40, 1, 0.5),
        (2, 0.5, 300, 1, 0),
        (0, 1, 0, 1.5, 0),
        (1.3, 0.95, 0, 1, 1),
        (0.1, 1, 3, 1, 0),
        (1, 0.3, 5, 1.1, 0.1),
    ]
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "frequency_penalty")
    rows = [
        row([3, 5, 5, 7], 2, seed=s, index=s % 3, **dict(zip(names, values, strict=True)))
        for s, values in enumerate(settings)
    ]
    alone = [Sampler(500).sample(base[i : i + 1].clone(), [r]).result().token_ids[0] for i, r in enumerate(rows)]
    sampler = Sampler(500)
    for order in ([*range(9)], [*reversed(range(9))], [2, 5], [8, 0, 3, 7], [*range(9)]):
        for r in rows:
            sampler.forget(r.uid)
        out = sampler.sample(base[order].clone(), [rows[i] for i in order]).result().token_ids
        assert list(out) == [alone[i] for i in order]


EFFECTS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.3},
    "top_p": {"temperature": 1.0, "top_p": 0.3},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "min_p": {"temperature": 1.0, "min_p": 0.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "logit_bias": {"logit_bias": ((9, 50.0),)},
    "min_tokens": {"min_tokens": 5},
    "stop_token_ids": {"min_tokens": 5, "stop_token_ids": frozenset({3})},
    "bans": {"bans": Bans(always=frozenset({7}))},
    "logprobs": {"logprobs": 1},
}
"""Parameter → a value with which it changes what is sampled; at temperature 0 if it can change a greedy id."""
OUTSIDE = {"max_tokens", "seed", "stop", "ignore_eos", "skip_special_tokens", "n", "prompt_logprobs"}
"""Parameters that are not the sampler's: they say when the text ends, which seed the rows have, or what is reported."""


def test_every_parameter_of_sampling_is_tried_here() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == EFFECTS.keys() | OUTSIDE


@pytest.mark.parametrize("name", EFFECTS)
def test_every_parameter_has_an_effect_alone_and_the_same_one_in_a_batch(name: str) -> None:
    """The ids 7, 3 and 0 are the best in turn; 7 is in the output already, 0 ends the text."""
    logits = torch.linspace(1.0, 0.0, 12).repeat(60, 1)
    logits[:, [7, 3, 0]] = torch.tensor([[3.0, 2.9, 2.8], [2.9, 3.0, 2.8], [2.9, 2.8, 3.0]]).repeat(20, 1)

    def rows(options: dict[str, object]) -> list[Row]:
        return [row([1, 7], 1, seed=seed, **options) for seed in range(60)]

    def sampled(rows: list[Row], at: list[int]) -> list[Any]:
        done = Sampler(12).sample(logits[at].clone(), rows).result()
        return list(zip(done.token_ids, done.logprobs, strict=True))

    changed = rows(EFFECTS[name])
    alone = [sampled([one], [i])[0] for i, one in enumerate(changed)]
    without = {key: value for key, value in EFFECTS[name].items() if key != name}
    assert alone != sampled(rows(without), [*range(60)])
    company = [one for options in EFFECTS.values() for one in rows(options)]
    at = [*range(60)] * (len(EFFECTS) + 1)
    assert sampled([*company, *changed], at)[-60:] == alone


def test_choices_and_positions_get_noise_of_their_own() -> None:
    rows = [row([1] * (1 + n), index=i, seed=5, temperature=1.0) for i in range(4) for n in range(8)]
    out = Sampler(1000).sample(torch.zeros(32, 1000), rows).result().token_ids
    assert len(set(out)) > 28


def test_noise_is_uniform_and_repeatable_for_any_seed() -> None:
    keys = [
        (seed, choice, position)
        for seed in (0, -1, 2**63, 2**64 - 1)
        for choice in range(10)
        for position in range(500)
    ]
    noise = uniform(keys)
    assert ((noise >= 0) & (noise < 1)).all()
    assert (noise == uniform(keys)).all()
    assert abs(noise.mean() - 0.5) < 0.01
    assert len(set(noise.tolist())) > 14_000  # -1 and 2**64 - 1 are one seed


# ── penalties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def edited(logits: list[float], one: Row) -> list[float]:
    tensor = torch.tensor([logits])
    Sampler(len(logits)).sample(tensor, [one]).result()
    return [round(x, 4) for x in tensor[0].tolist()]


def test_repetition_penalty_counts_prompt_and_output_once_for_each_id() -> None:
    prompt = row([5, 5, 5], 3, repetition_penalty=2.0)
    assert edited([0, 0, 0, 0, 0, 2.0, -2.0], prompt)[5:] == [1.0, -2.0]
    generated = row([5, 5, 5, 6], 3, repetition_penalty=2.0)
    assert edited([0, 0, 0, 0, 0, 2.0, -2.0], generated)[5:] == [1.0, -4.0]


def test_presence_and_frequency_count_the_output_only() -> None:
    one = row([7, 3, 3], 1, frequency_penalty=0.5, presence_penalty=0.25)
    assert edited([1.0] * 8, one) == [1, 1, 1, 1 - 0.5 * 2 - 0.25, 1, 1, 1, 1]


def test_counts_follow_the_tokens_through_steps_and_a_recompute() -> None:
    sampler = Sampler(8)
    one = row([1, 2], 2, frequency_penalty=1.0)
    for _ in range(4):
        token = sampler.sample(torch.tensor([[0, 0, 0, 2.5, 0, 1.2, 0, 0]]), [one]).result().token_ids[0]
        one.tokens.append(token or 0)
    assert one.tokens[2:] == [3, 3, 5, 3]
    fresh = Sampler(8).sample(torch.tensor([[0, 0, 0, 2.5, 0, 1.2, 0, 0]]), [one]).result().token_ids
    assert sampler.sample(torch.tensor([[0, 0, 0, 2.5, 0, 1.2, 0, 0]]), [one]).result().token_ids == fresh


def test_bias_and_bans() -> None:
    assert pick([0.0, 1.0, 0.5], row(logit_bias=((2, 5.0),))) == 2
    assert pick([9.0, 1.0, 0.5], row(min_tokens=1)) == 1
    assert pick([9.0, 1.0, 0.5], row([1, 4], 1, min_tokens=1)) == 0


# ── broken logits ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [1e-6, 1e-39, 1e6, 1e38])
def test_no_penalty_makes_numbers_that_fp32_cannot_hold(temperature: float, penalty: float) -> None:
    # Penalties below 1 favour what was there, above 1 what was not.
    want = 3 if penalty < 1 else 0
    assert pick([50.0, 2.0, 1.0, 60.0], row([3, 3], temperature=temperature, repetition_penalty=penalty)) == want
    assert pick([1e30, 2.0, 1.0, 1e35], row([3], temperature=temperature, repetition_penalty=min(penalty, 1.0))) == 3


class TestBans:
    logits: ClassVar = [5.0, 4.0, 3.0, 2.0]

    def test_an_id_is_never_drawn(self) -> None:
        bans = Bans(always=frozenset({0, 9}))
        assert pick(self.logits, row(bans=bans)) == 1
        assert support([1.0, 1.0, 1.0, 1.0], bans=bans) == {1, 2, 3}
        assert pick(self.logits, row(bans=bans, logit_bias=((0, 100.0),))) == 1

    def test_an_id_is_not_the_first_of_the_output(self) -> None:
        bans = Bans(first=frozenset({0}))
        assert pick(self.logits, row([2, 3], prompt=2, bans=bans)) == 1
        assert pick(self.logits, row([2, 3, 1], prompt=2, bans=bans)) == 0

    def test_a_sequence_is_not_completed(self) -> None:
        bans = Bans(sequences=((2, 3, 0), (1, 1)))
        assert pick(self.logits, row([2, 3], bans=bans)) == 1
        assert pick(self.logits, row([3], bans=bans)) == 0
        assert pick(self.logits, row([3, 2, 3], prompt=3, bans=bans)) == 1, "the prompt counts"
        assert pick([4.0, 5.0, 3.0], row([1], bans=bans)) == 0

    def test_bans_are_those_of_transformers(self) -> None:
        rng = random.Random(0)
        for _ in range(200):
            tokens = [rng.randrange(4) for _ in range(rng.randint(2, 9))]
            prompt = rng.randint(1, len(tokens))
            words = [[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(3)]
            always, first = [rng.randrange(6)], [rng.randrange(6)]
            scores = torch.zeros((1, 6))
            for processor in (
                NoBadWordsLogitsProcessor(words),
                SuppressTokensLogitsProcessor(always),
                SuppressTokensAtBeginLogitsProcessor(first, prompt),
            ):
                scores = processor(torch.tensor([tokens]), scores)
            bans = Bans(
                always=frozenset(always) | {word[0] for word in words if len(word) == 1},
                first=frozenset(first),
                sequences=tuple(tuple(word) for word in words if len(word) > 1),
            )
            assert row(tokens, prompt, bans=bans).banned == set(scores[0].isneginf().nonzero().flatten().tolist())

    def test_log_probabilities_are_the_models_own(self) -> None:
        sampled = (
            Sampler(4).sample(torch.tensor([self.logits]), [row(bans=Bans(always=frozenset({0})), logprobs=1)]).result()
        )
        assert sampled.logprobs[0] is not None
        assert sampled.logprobs[0].top[0].token_id == 0

    def test_where_everything_is_banned_nothing_is(self) -> None:
        assert pick(self.logits, row(bans=Bans(always=frozenset(range(4))))) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_no_id_and_changes_no_other_row(bad: float, temperature: float) -> None:
    rows = [row(temperature=temperature, top_p=0.9, seed=s, frequency_penalty=0.1) for s in range(3)]
    good = torch.randn(3, 50)
    expected = Sampler(50).sample(good.clone(), rows).result().token_ids
    broken = good.clone()
    broken[1, 7] = bad
    out = Sampler(50).sample(broken, rows).result().token_ids
    assert out == (expected[0], None, expected[2])


def test_a_finished_row_leaves_nothing_behind() -> None:
    sampler = Sampler(50)
    rows = [row(temperature=1.0, frequency_penalty=0.1) for _ in range(3)]
    sampler.sample(torch.randn(3, 50), rows).result()
    for one in rows:
        sampler.forget(one.uid)
    assert sampler.idle
    assert (sampler._counts, sampler._uids, sampler._columns) == ({}, (), None)


def test_a_row_samples_the_same_id_alone_and_beside_any_other_rows() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[4, 7] = torch.nan
    best = int(logits[3, :290].argmax())
    rows = [
        row(),
        row(temperature=1.0, seed=3),
        row(logprobs=2),
        row(min_tokens=5, stop_token_ids=frozenset({best})),
        row(),
        row(min_tokens=5),
    ]
    together = Sampler(290).sample(logits.clone(), rows).result()
    alone = [Sampler(290).sample(logits[i : i + 1].float(), [one]).result() for i, one in enumerate(rows)]
    assert together.token_ids == tuple(one.token_ids[0] for one in alone)
    assert together.logprobs == tuple(one.logprobs[0] for one in alone)
    assert together.token_ids[3] not in (None, best)
    assert together.token_ids[4] is None
