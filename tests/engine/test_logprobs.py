"""Log-probabilities against values worked out by hand: raw, normalised, and the same however they were computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.outputs import Finished, Logprob, TokenLogprobs
from engine.request import Request, SamplingParams
from engine.sampling.sampler import Sampler
from tests.engine.grammars import letters
from tests.engine.stub import _ODD, EOS, VOCAB, Collector, logits_of, make_engine, request, run, steps
from tests.engine.test_sampler import row
from tests.models import tiny

# log softmax([2, 1, 0]): the sum of exponentials is 11.107338, its logarithm 2.407606.
GOLDEN = (-0.407606, -1.407606, -2.407606)


def sampled(logits: list[float], **params: Any) -> TokenLogprobs:
    (found,) = Sampler(len(logits)).sample(torch.tensor([logits]), [row(**params)]).result().logprobs
    assert found is not None
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 2},
        {"temperature": 2.0, "top_p": 0.1},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"repetition_penalty": 1.9, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((0, -100.0), (1, -100.0))},
        {"min_tokens": 5},
    ],
)
def test_logprobs_are_those_of_the_model_before_any_step_of_the_sampler(params: dict[str, Any]) -> None:
    found = sampled([2.0, 1.0, 0.0], tokens=[1, 2, 2], logprobs=3, **params)
    assert [one.token_id for one in found.top] == [0, 1, 2]
    assert [one.logprob for one in found.top] == pytest.approx(GOLDEN, abs=1e-5)
    assert found.chosen.logprob == pytest.approx(GOLDEN[found.chosen.token_id], abs=1e-5)
    assert sum(math.exp(one.logprob) for one in found.top) == pytest.approx(1)


def test_the_chosen_id_is_there_even_outside_the_top() -> None:
    found = sampled([2.0, 1.0, 0.0], logit_bias=((2, 100.0),), logprobs=1)
    assert (found.chosen.token_id, [one.token_id for one in found.top]) == (2, [0])
    assert found.chosen.logprob == pytest.approx(GOLDEN[2], abs=1e-5)


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (20, [0, 1, 2])])
def test_as_many_as_asked_for_or_as_there_are(count: int, expected: list[int]) -> None:
    assert [one.token_id for one in sampled([2.0, 1.0, 0.0], logprobs=count).top] == expected


@pytest.mark.parametrize("count", range(6))
def test_equal_ones_are_ordered_by_id_also_at_the_edge(count: int) -> None:
    ranked = [1, 3, 0, 2, 4]
    assert [one.token_id for one in sampled([1.0, 5.0, 1.0, 5.0, 1.0], logprobs=count).top] == ranked[:count]
    assert [one.token_id for one in sampled([1.0] * 500, logprobs=count).top] == list(range(count))


def test_ids_that_the_tokenizer_lacks_have_no_share() -> None:
    (found,) = Sampler(3).sample(torch.tensor([[2.0, 1.0, 0.0, 50.0]]), [row(logprobs=3)]).result().logprobs
    assert found is not None
    assert [one.logprob for one in found.top] == pytest.approx(GOLDEN, abs=1e-5)


def test_only_rows_that_request_logprobs_get_them() -> None:
    rows = [row(), row(logprobs=0), row(logprobs=2)]
    found = Sampler(3).sample(torch.tensor([[2.0, 1.0, 0.0]] * 3), rows).result().logprobs
    assert [None if one is None else len(one.top) for one in found] == [None, 0, 2]


def test_logprobs_stay_finite_with_a_grammar_and_extreme_logits() -> None:
    one = request("a", [1, 2, 3], 8, grammar=letters("bcd"), logprobs=20)
    engine, _ = make_engine()
    (choice,) = run(engine, one)["a"].choices
    assert all(math.isfinite(p.logprob) for entry in choice.logprobs or () for p in (entry.chosen, *entry.top))
    assert all(math.isfinite(one.logprob) for one in sampled([1e30, -1e30, 0.0], logprobs=3).top)


def test_text_ids_and_logprobs_end_at_the_same_token_when_a_stop_string_cuts() -> None:
    for stop, text in (("de", "bc"), ("g", "bcdef"), ("b", ""), ("x", "bcdefg")):
        one = request("a", [1, 2, 3], 20, grammar=letters("bcdefg"), logprobs=1, stop=(stop,))
        engine, _ = make_engine()
        engine.add(one)
        seen = Collector()
        for output in steps(engine):
            seen.take(output)  # which compares deltas with the result
        (choice,) = seen.finished["a"].choices
        assert choice.text == text
        assert len(choice.token_ids) == len(choice.logprobs or ()) == len(text)


# ── of the prompt ─────────────────────────────────────────────────────────────────────────────────────────────────────


def by_hand(prompt: list[int], top: int) -> list[TokenLogprobs | None]:
    """Compute the prompt logprobs of the stub model from its definition."""
    tokens = np.array(prompt, dtype=np.uint64)
    places = np.arange(len(prompt), dtype=np.uint64)
    entries = (tokens * np.uint64(1_000_003) + places * np.uint64(7_919) + np.uint64(12_345)) * _ODD
    found: list[TokenLogprobs | None] = [None]
    for i in range(1, len(prompt)):
        raw = logits_of(entries[:i]).double()
        logs = (raw - raw.logsumexp(0)).tolist()
        best = sorted(range(VOCAB), key=lambda token, logs=logs: (-logs[token], token))[:top]
        found.append(TokenLogprobs(Logprob(prompt[i], logs[prompt[i]]), tuple(Logprob(t, logs[t]) for t in best)))
    return found


def check(found: Any, expected: list[TokenLogprobs | None]) -> None:
    assert found is not None
    assert (found[0], len(found)) == (None, len(expected))
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert theirs is not None
        for a, b in zip((mine.chosen, *mine.top), (theirs.chosen, *theirs.top), strict=True):
            assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-5))


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_are_the_same_chunked_cached_and_whole(block_size: int, budget: int, caching: bool) -> None:
    prompt = [(i * 7) % 60 + 1 for i in range(33)]
    expected = by_hand(prompt, 2)
    engine, _ = make_engine(block_size=block_size, max_num_batched_tokens=budget, prefix_caching=caching)
    run(engine, request("before", prompt, 2))
    for name in ("once", "twice"):
        finished = run(engine, request(name, prompt, 3, prompt_logprobs=2), request(f"{name} plain", prompt, 3))
        check(finished[name].choices[0].prompt_logprobs, expected)
        assert finished[f"{name} plain"].choices[0].prompt_logprobs is None
        assert finished[name].choices[0].text == finished[f"{name} plain"].choices[0].text


def test_a_prompt_of_one_token_has_null_alone_and_all_choices_agree() -> None:
    engine, _ = make_engine()
    finished = run(
        engine, request("one", [5], 2, prompt_logprobs=0), request("two", [5, 6, 7], 2, n=3, prompt_logprobs=1)
    )
    assert finished["one"].choices[0].prompt_logprobs == (None,)
    for choice in finished["two"].choices:
        check(choice.prompt_logprobs, by_hand([5, 6, 7], 1))


def test_an_end_id_in_the_prompt_counts_like_any_other() -> None:
    engine, _ = make_engine()
    check(
        run(engine, request("a", [3, EOS, 4], 1, prompt_logprobs=1))["a"].choices[0].prompt_logprobs,
        by_hand([3, EOS, 4], 1),
    )


# ── of a model ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Callable[[list[int]], torch.Tensor]]:
    path: Path = tiny.build(tmp_path_factory.mktemp("model"))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def logs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return str(path), logs


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("budget", [7, 256])
def test_logprobs_equal_those_of_transformers(
    model: tuple[str, Callable[[list[int]], torch.Tensor]], block_size: int, budget: int
) -> None:
    path, logs = model
    config = EngineConfig(block_size=block_size, max_num_batched_tokens=budget)
    engine, _ = build_engine(ModelOptions(path, device="cpu", dtype="float32"), config, CacheOptions(num_blocks=160))
    prompt = [(i * 37) % 300 + 8 for i in range(33)]
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=1, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    found: list[Finished] = []
    for name in ("once", "twice"):
        engine.add(Request(name, prompt, params))
        found += [last for output in steps(engine) for last in output.finished]
    (choice,) = found[0].choices
    assert found[1].choices == found[0].choices
    expected = logs([*prompt, *choice.token_ids])
    told = [*(choice.prompt_logprobs or ())[1:], *(choice.logprobs or ())]
    for i, one in enumerate(told):
        assert one is not None
        for single in (one.chosen, *one.top):
            assert single.logprob == pytest.approx(float(expected[i, single.token_id]), abs=2e-4)
        best = expected[i].topk(len(one.top)).values.tolist()
        assert [single.logprob for single in one.top] == pytest.approx(best, abs=2e-4)
    assert len(told) == len(prompt) - 1 + 6
