"""The engine under memory pressure: whatever mix arrives, every request ends, with its own text, and nothing leaks.

The stub's logits are an exact hash of the KV entries that it reads, so that one wrong slot changes the text.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from engine.canary import CANARY_ID
from engine.engine import Engine
from engine.outputs import Fault, Finished, Outcome
from engine.request import Request
from engine.scheduling.plan import Plan
from engine.scheduling.policy import PreemptionCost
from engine.sequence import SequenceStatus
from tests.engine.grammars import letters
from tests.engine.stub import (
    Collector,
    Flight,
    alone,
    expect_idle,
    expect_short_outputs,
    make_engine,
    preempt,
    request,
    run,
    steps,
)

LONGEST = 40

pytestmark = pytest.mark.usefixtures("overlap")


def mixture(chance: random.Random, count: int = 12) -> list[Request]:
    """Requests of all kinds, some with a common prefix."""
    common = [chance.randrange(1, 60) for _ in range(12)]
    made = []
    for i in range(count):
        own = [chance.randrange(1, 60) for _ in range(chance.randint(1, 10))]
        prompt = common[: chance.choice([0, 0, 5, 12])] + own
        params: dict[str, object] = {}
        if chance.random() < 0.3:
            params["stop"] = ("".join(chr(97 + chance.randrange(1, 60)) for _ in range(chance.randint(1, 2))),)
        if chance.random() < 0.3:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
        if chance.random() < 0.3:
            params |= {"logprobs": 2}
        if chance.random() < 0.1:
            params |= {"prompt_logprobs": 1}
        one = request(
            f"r{i}",
            prompt,
            chance.randint(1, LONGEST - len(prompt)),
            priority=chance.randrange(3),
            n=chance.choice([1, 1, 1, 2, 4]),
            temperature=chance.choice([0.0, 1.0]),
            seed=i,
            ignore_eos=chance.random() < 0.7,
            **params,
        )
        if chance.random() < 0.15:
            one = dataclasses.replace(one, grammar=letters("[a-f]{2,6}g"))
        made.append(one)
    return made


def check_against_alone(one: Request, last: Finished) -> None:
    expected = alone(one, max_model_len=64)
    if last.outcome is Outcome.SUCCEEDED:
        assert last.choices == expected.choices
        return
    for mine, whole in zip(last.choices, expected.choices, strict=True):
        assert mine.token_ids == whole.token_ids[: len(mine.token_ids)]
        assert whole.text.startswith(mine.text) or mine.stop is None


CASES = [
    pytest.param(overlap, i, marks=[pytest.mark.slow] if i % (8 if overlap else 2) else [])
    for overlap in (False, True)
    for i in range(20)
]


@pytest.mark.parametrize(("overlap", "block"), CASES, indirect=["overlap"])
def test_every_request_ends_with_the_text_it_has_alone_and_all_blocks_come_back(block: int) -> None:
    """200 seeds with and without overlap, most of them slow: pools from one that barely holds a sequence up, blocks of
    1 to 32, 0 to many host slots."""
    for seed in range(10 * block, 10 * block + 10):
        chance = random.Random(seed)
        block_size = chance.choice([1, 2, 3, 4, 8, 16, 32])
        limits = {
            "block_size": block_size,
            "num_blocks": -(-LONGEST // block_size) + chance.choice([0, 1, 2, 8]),
            "host_slots": chance.choice([0, 1, 1000]),
            "max_model_len": 64,
            "max_num_batched_tokens": chance.choice([3, 8, 64]),
            "max_num_seqs": chance.choice([2, 5, 64]),
            "max_overtakes": chance.choice([0, 2, 16]),
        }
        requests = mixture(chance)
        free_steps = unhindered(requests, limits)
        engine, _ = make_engine(garbage=seed, **limits)
        if chance.random() < 0.5:
            expect_short_outputs(engine)
        seen, cancelled = Collector(), set()
        for one in requests:
            engine.add(one)
        count = 0
        while engine.has_work:
            if chance.random() < 0.03:
                target = chance.choice(requests).id
                engine.cancel(target)
                cancelled.add(target)
            seen.take(engine.step())
            engine.check_integrity()
            count += 1
            assert count < 4 * free_steps, f"seed {seed}: no end after {count} steps, {free_steps} without pressure"
        expect_idle(engine)
        assert set(seen.finished) == {one.id for one in requests}
        for one in requests:
            last = seen.finished[one.id]
            assert last.outcome is Outcome.SUCCEEDED or one.id in cancelled
            check_against_alone(one, last)


def unhindered(requests: list[Request], limits: dict[str, int]) -> int:
    """Steps for the same requests one after another: what is possible without any sharing of room."""
    total = 0
    for one in requests:
        copy = Request(one.id, one.prompt, one.params, grammar=one.grammar)
        engine, _ = make_engine(**limits)
        engine.add(copy)
        total += sum(1 for _ in steps(engine))
    return total


@pytest.mark.parametrize("slots", [0, 100])
@pytest.mark.parametrize("index", range(1, 11))
def test_a_preemption_at_any_output_index_changes_nothing(slots: int, index: int) -> None:
    """Seed, penalties, stop, logprobs, grammar, choices and streaming at once; by swap and by recompute."""

    def make() -> Request:
        return request(
            "a",
            list(range(1, 15)),
            20,
            grammar=letters("[a-z]{12,16}"),
            n=2,
            temperature=0.8,
            seed=7,
            top_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.1,
            stop=("hh",),
            logprobs=3,
        )

    expected = alone(make())
    engine, _ = make_engine(host_slots=slots)
    engine.add(make())
    seen = Collector()
    for _ in range(index):
        seen.take(engine.step())
    was = [seq.num_tokens for seq in engine._live.by_id["a"].sequences]
    preempt(engine, "a")
    state = SequenceStatus.SWAPPED if slots else SequenceStatus.WAITING
    assert all(seq.status is state for request in engine._live.by_id.values() for seq in request.sequences)
    assert [len(seq.tokens) for seq in engine._live.by_id["a"].sequences] == was
    for output in steps(engine):
        seen.take(output)
    expect_idle(engine)
    assert seen.finished["a"].choices == expected.choices
    stats = engine.stats()
    assert (stats.preemptions_swap, stats.preemptions_recompute) == ((2, 0) if slots else (0, 2))


@pytest.mark.parametrize("when", ["swapped", "resumed"])
def test_cancel_of_a_swapped_request_frees_both_tiers(when: str) -> None:
    engine, _ = make_engine(host_slots=50)
    engine.add(request("a", list(range(1, 15)), 20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    preempt(engine, "a")
    assert engine.stats().swapped == 1
    if when == "resumed":
        engine.step()
    engine.cancel("a")
    (last,) = engine.step().finished
    assert last.outcome is Outcome.CANCELLED
    expect_idle(engine)


def test_forks_that_are_swapped_together_share_their_prompt_in_the_host_tier() -> None:
    engine, _ = make_engine(host_slots=50)
    engine.add(request("a", list(range(1, 13)), 8, n=4, temperature=1.0, seed=1, ignore_eos=True))
    for _ in range(3):
        engine.step()
    preempt(engine, "a")
    used = engine.stats().host_slots - engine.stats().free_host_slots
    assert used == 3 + 4, "three full blocks of the prompt once, one partial block a choice"
    for _ in steps(engine):
        pass
    expect_idle(engine)


# ── order of service ──────────────────────────────────────────────────────────────────────────────────────────────────


def order_of_ends(engine: Engine, requests: list[Request]) -> list[str]:
    for one in requests:
        engine.add(one)
    return [last.request_id for output in steps(engine) for last in output.finished]


@pytest.mark.parametrize("slots", [0, 100])
def test_a_high_arrival_takes_the_place_of_a_low_one_which_resumes_later(slots: int) -> None:
    engine, _ = make_engine(num_blocks=10, host_slots=slots, max_model_len=40)
    low = request("low", [1] * 8, 28, priority=2, ignore_eos=True)
    engine.add(low)
    for _ in range(16):
        engine.step()
    high = request("high", [2] * 20, 12, priority=0, ignore_eos=True)
    engine.add(high)
    finished: dict[str, Finished] = {}
    for output in steps(engine):
        finished |= {last.request_id: last for last in output.finished}
    assert list(finished) == ["high", "low"]
    for one in (low, high):
        check_against_alone(one, finished[one.id])


def test_a_low_request_that_has_aged_is_not_overtaken_for_ever() -> None:
    now = [0.0]
    engine, _ = make_engine(max_num_seqs=1, aging_seconds=10.0)
    engine._clock = lambda: now[0]
    engine.add(request("low", [1], 2, priority=2, ignore_eos=True))
    served: list[str] = []
    for i in range(90):  # a new high one arrives before the last is done
        engine.add(request(f"high{i}", [2], 2, priority=0, ignore_eos=True))
        served += [last.request_id for last in engine.step().finished]
        now[0] += 1.0
    assert "low" in served
    assert served.index("low") < 30
    for _ in steps(engine):
        pass


@pytest.mark.parametrize("keeps_turn", [True, False])
def test_a_dropped_request_that_is_added_again_with_its_turn_keeps_its_place(
    keeps_turn: bool,
) -> None:
    now = [0.0]
    engine, _ = make_engine(max_num_seqs=1, aging_seconds=10.0)
    engine._clock = lambda: now[0]
    low = request("low", [1], 1, priority=2)
    engine.add(low)
    turn = engine.turn("low")
    assert turn == 20.0
    engine.drop("low")
    engine.step()
    assert engine.turn("low") is None
    now[0] = 15.0
    engine.add(low, turn if keeps_turn else None)
    ends = order_of_ends(engine, [request("normal", [2], 1, priority=1)])
    assert ends == (["low", "normal"] if keeps_turn else ["normal", "low"])


@pytest.mark.parametrize("limit", [0, 3])
def test_a_blocked_request_is_overtaken_at_most_so_many_times(limit: int) -> None:
    engine, _ = make_engine(num_blocks=10, max_model_len=40, max_overtakes=limit, watermark=0.0)
    engine.add(request("runs", [1] * 4, 24, ignore_eos=True))
    engine.step()
    engine.add(request("big", [2] * 36, 2, ignore_eos=True))
    small = [request(f"s{i}", [3 + i], 2, ignore_eos=True) for i in range(10)]
    ends = order_of_ends(engine, small)
    assert sum(1 for end in ends[: ends.index("big")] if end.startswith("s")) == limit


def test_a_swapped_request_comes_back_before_newcomers_of_its_lane() -> None:
    engine, _ = make_engine(num_blocks=8, host_slots=50, max_model_len=32)
    engine.add(request("first", [1] * 8, 10, ignore_eos=True))
    for _ in range(3):
        engine.step()
    preempt(engine, "first")
    engine.add(request("second", [2] * 20, 2, ignore_eos=True))
    engine.step()
    assert engine.scheduler.running[0].request.id == "first"
    for _ in steps(engine):
        pass


def test_outputs_that_ended_short_let_more_requests_in() -> None:
    def admitted(taught: list[int]) -> int:
        engine, _ = make_engine(num_blocks=20, max_model_len=64)
        for length in taught:
            engine.scheduler.lengths.learn(length)
        for i in range(10):
            engine.add(request(f"r{i}", [i + 1] * 4, 50, ignore_eos=True))
        engine.step()
        return len(engine.scheduler.running)

    assert admitted([]) < admitted([10] * 40)


def test_swapping_pays_where_copying_costs_less_than_computing() -> None:
    assert PreemptionCost.on("cpu", block_bytes=368_640, block_size=16, num_parameters=135_000_000).swaps
    assert not PreemptionCost.on("cpu", block_bytes=368_640, block_size=16, num_parameters=100_000).swaps
    engine, _ = make_engine(host_slots=50)
    engine.scheduler.cost = PreemptionCost(copy=2.0, recompute=1.0)
    engine.add(request("a", [1] * 8, 10, ignore_eos=True))
    engine.step()
    preempt(engine, "a")
    assert (engine.stats().preemptions_swap, engine.stats().preemptions_recompute) == (0, 1)


# ── out of memory ─────────────────────────────────────────────────────────────────────────────────────────────────────


def small_device(monkeypatch: pytest.MonkeyPatch, largest: int) -> tuple[Engine, list[int], list[int]]:
    """An engine whose device raises as torch does when a step has more than `limit[0]` tokens, unless for the canary.

    Returns:
        The engine, the limit (which may be changed), and the tokens of each step that was tried.
    """
    engine, runner = make_engine(max_num_batched_tokens=64)
    launch, limit, tried = runner.launch, [largest], list[int]()

    def small(plan: Plan) -> Flight:
        tried.append(plan.num_tokens)
        if plan.num_tokens > limit[0] and plan.slices[0].seq.request.id != CANARY_ID:
            raise torch.OutOfMemoryError("the device is too small for this step")
        return launch(plan)

    monkeypatch.setattr(runner, "launch", small)
    return engine, limit, tried


def test_out_of_memory_shrinks_the_step_and_every_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, tried = small_device(monkeypatch, 6)
    requests = [request(f"r{i}", [i + 1] * 20, 6, ignore_eos=True) for i in range(4)]
    finished = run(engine, *requests)
    for one in requests:
        check_against_alone(one, finished[one.id])
    assert tried[:4] == [64, 32, 16, 8]


def test_the_step_grows_again_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limit, _ = small_device(monkeypatch, 6)
    engine.add(request("a", [1] * 30, 2, ignore_eos=True))
    engine.step()
    limit[0] = 1000
    for _ in steps(engine):
        pass
    for i in range(200):
        run(engine, request(f"r{i}", [i % 50 + 1] * 3, 1))
    assert engine.scheduler.budget == 64


def test_a_request_that_is_too_large_by_itself_fails_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = small_device(monkeypatch, 0)
    last = run(engine, request("a", [1, 2], 2))["a"]
    assert (last.outcome, last.fault) == (Outcome.FAILED, Fault.OUT_OF_MEMORY)
