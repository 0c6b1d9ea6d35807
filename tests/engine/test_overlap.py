"""One step in flight: the same outputs as without it, under every option of a request and whatever happens to it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from structlog.testing import capture_logs

from engine.canary import CANARY_ID
from engine.outputs import EngineBroken, Fault, Finished, Outcome
from engine.request import Request
from engine.scheduling.plan import Plan
from tests.engine.grammars import letters
from tests.engine.schedules import Schedule
from tests.engine.stub import (
    Collector,
    Flight,
    StubRunner,
    alone,
    expect_idle,
    expect_short_outputs,
    make_engine,
    request,
    run,
    steps,
)

SCHEDULES = 40
"""Schedules of one test."""


def cases(overlap: bool, fast: int, count: int) -> list[object]:
    """Numbers of `count` tests, of which the first `fast` are not slow."""
    mark = [pytest.mark.slow]
    name = "overlap" if overlap else "in_turn"
    return [pytest.param(overlap, i, marks=[] if i < fast else mark, id=f"{name}-{i}") for i in range(count)]


@pytest.mark.parametrize(("overlap", "number"), cases(True, 28, 150) + cases(False, 3, 30))
def test_whatever_happens_each_request_ends_once_with_its_own_output(overlap: bool, number: int) -> None:
    """7,200 schedules, 6,000 of them with overlap; 1,240 of all are not slow."""
    happened = Counter[str]()
    with capture_logs():  # steps that raise log a traceback, which takes longer than the schedule
        for seed in range(SCHEDULES * number, SCHEDULES * (number + 1)):
            try:
                happened += Schedule(seed, overlap).run()
            except BaseException as error:
                error.add_note(f"Schedule({seed}, {overlap})")
                raise
    expected = {"launch", "recompute", "swap", "fork", "cancel", "drop", "succeeded", "cancelled", "prefix hit"}
    assert set(happened) >= expected
    assert (happened["overlap"] > happened["launch"] / 2) == overlap


def computed(runner: StubRunner, request_id: str) -> int:
    """Tokens computed of a request."""
    return sum(p.num_tokens for plan in runner.plans for p in plan.slices if p.seq.request.id == request_id)


# ── what is in flight ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_step_is_launched_before_the_result_of_the_last_one_is_fetched() -> None:
    engine, runner = make_engine(overlap=True)
    run(engine, request("a", [1, 2, 3], 4, ignore_eos=True))
    expected = "launch 0, launch 1, result 0, launch 2, result 1, launch 3, result 2, result 3"
    assert ", ".join(runner.events) == expected


def test_without_overlap_each_result_is_fetched_before_the_next_launch() -> None:
    engine, runner = make_engine(overlap=False)
    run(engine, request("a", [1, 2, 3], 3, ignore_eos=True))
    assert ", ".join(runner.events) == "launch 0, result 0, launch 1, result 1, launch 2, result 2"


def test_an_end_by_length_computes_no_token_in_vain() -> None:
    engine, runner = make_engine(overlap=True)
    run(engine, request("a", [1, 2, 3], 6, n=2, temperature=1.0, ignore_eos=True), request("b", [4, 5], 9))
    assert computed(runner, "a") == 3 + 2 * 5


@pytest.mark.parametrize("length", [1, 4, 5])
def test_an_end_that_was_not_foreseen_computes_one_token_in_vain(length: int) -> None:
    free = alone(request("a", [1, 2, 3], 12, ignore_eos=True)).choices[0].token_ids
    assert free.index(free[length - 1]) == length - 1
    engine, runner = make_engine(overlap=True)
    one = request("a", [1, 2, 3], 12, ignore_eos=True, stop_token_ids=frozenset({free[length - 1]}))
    last = run(engine, one)["a"]
    assert (last.choices, last.completion_tokens) == (alone(one).choices, length)
    assert computed(runner, "a") == 3 + length


def test_the_output_of_the_last_step_is_not_left_behind() -> None:
    engine, runner = make_engine(overlap=True)
    engine.add(request("a", [1, 2, 3], 1))
    assert not engine.step()
    assert (engine.has_work, engine.computing, runner.events) == (True, {"a"}, ["launch 0"])
    (last,) = engine.step().finished
    assert last.outcome is Outcome.SUCCEEDED
    expect_idle(engine)
    assert not engine.has_work


def test_a_step_whose_requests_have_all_ended_is_settled() -> None:
    engine, runner = make_engine(overlap=True)
    engine.add(request("a", [1], 9, logit_bias=((0, 1000.0),)))
    engine.step()
    (last,) = engine.step().finished
    assert last.choices[0].token_ids == (0,)
    assert engine.has_work, "the row that was computed in vain is in flight"
    assert not engine.step()
    assert not engine.has_work
    assert runner.events[-1] == "result 1"
    expect_idle(engine)


def test_a_grammar_is_advanced_before_the_next_step_is_scheduled() -> None:
    engine, runner = make_engine(overlap=True)
    one = request("a", [1, 2, 3], 9, grammar=letters("[a-f]{2,6}g"))
    assert run(engine, one)["a"].choices == alone(one).choices
    assert all(event.startswith("launch") for event in runner.events[::2])
    assert all(event.startswith("result") for event in runner.events[1::2])


def test_overlap_can_be_turned_off_between_two_steps() -> None:
    engine, runner = make_engine(overlap=True)
    one = request("a", [1, 2, 3], 6, ignore_eos=True)
    engine.add(one)
    engine.step()
    engine.overlap = False
    finished = [last for output in steps(engine) for last in output.finished]
    assert finished[0].choices == alone(one).choices
    assert runner.events[:6] == ["launch 0", "launch 1", "result 0", "result 1", "launch 2", "result 2"]


# ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.EXPIRED])
@pytest.mark.parametrize("count", range(12))
def test_a_request_cut_short_after_so_many_steps_has_the_same_output_as_without_overlap(
    count: int, outcome: Outcome
) -> None:
    def cut(overlap: bool) -> Finished:
        now = [0.0]
        engine, _ = make_engine(overlap=overlap, max_num_batched_tokens=4)
        engine._clock = lambda: now[0]
        params = {"temperature": 1.0, "seed": 3, "logprobs": 1, "prompt_logprobs": 1, "n": 2, "ignore_eos": True}
        engine.add(request("a", list(range(1, 14)), 12, deadline=1.0, **params))
        engine.add(request("b", [4, 5, 6], 12, ignore_eos=True))
        seen = Collector()
        for _ in range(count):
            seen.take(engine.step())
        if outcome is Outcome.CANCELLED:
            engine.cancel("a")
        else:
            now[0] = 2.0
        output = engine.step()
        assert [last.request_id for last in output.finished] == ["a"], "ended by the next step"
        seen.take(output)
        for output in steps(engine):
            seen.take(output)
        expect_idle(engine)
        return seen.finished["a"]

    assert cut(True) == cut(False)
    assert cut(True).outcome is outcome


def test_a_cancel_that_meets_the_last_id_in_flight_wins() -> None:
    engine, _ = make_engine(overlap=True)
    engine.add(request("a", [1, 2, 3], 1))
    engine.step()
    engine.cancel("a")
    (last,) = engine.step().finished
    assert (last.outcome, last.completion_tokens) == (Outcome.CANCELLED, 1)
    expect_idle(engine)


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_request_dropped_in_flight_has_no_further_output(max_tokens: int) -> None:
    engine, _ = make_engine(overlap=True)
    one = request("a", [1, 2, 3], max_tokens, ignore_eos=True)
    engine.add(one)
    engine.step()
    engine.drop("a")
    assert not engine.step()
    expect_idle(engine)
    assert run(engine, one)["a"].choices == alone(one).choices


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [RuntimeError("a passing fault"), torch.OutOfMemoryError("no room")])
def test_a_launch_that_raises_loses_nothing_of_the_step_in_flight(error: Exception) -> None:
    engine, runner = make_engine(overlap=True)
    requests = [request(f"r{i}", [i + 1] * 3, 6, ignore_eos=True, n=2, temperature=1.0, seed=i) for i in range(3)]
    for one in requests:
        engine.add(one)
    engine.step()
    launch, seen = runner.launch, Collector()

    def raises(plan: Plan) -> Flight:
        raise error

    runner.launch = raises  # type: ignore[method-assign]
    output = engine.step()
    assert {delta.request_id for delta in output.deltas} == {"r0", "r1", "r2"}
    assert engine.computing == frozenset()
    seen.take(output)
    runner.launch = launch  # type: ignore[method-assign]
    for output in steps(engine):
        seen.take(output)
    expect_idle(engine)
    for one in requests:
        assert seen.finished[one.id].choices == alone(one).choices


def lose_results(runner: StubRunner, error: Exception) -> None:
    """Let all results of the runner raise."""

    class Lost(Flight):
        def result(self) -> Flight:  # type: ignore[override]
            raise error

    launch = runner.launch
    runner.launch = lambda plan: Lost(runner, 0, launch(plan)._sampled)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (torch.AcceleratorError("an illegal memory access"), torch.AcceleratorError, "illegal"),
        (RuntimeError("the copy failed"), EngineBroken, "results of a step are lost: RuntimeError: the copy failed"),
    ],
)
def test_results_that_are_lost_end_the_engine_and_fail_no_request(
    error: Exception, raised: type[Exception], match: str, overlap: bool
) -> None:
    engine, runner = make_engine()
    lose_results(runner, error)
    for name in ("a", "b"):
        engine.add(request(name, [1, 2, 3]))
    with pytest.raises(raised, match=match):
        list(steps(engine))
    assert engine.computing == {"a", "b"}


def test_logits_that_are_not_finite_end_one_request_while_its_next_step_is_in_flight() -> None:
    engine, runner = make_engine(overlap=True)
    requests = [request(f"r{i}", [i + 1] * 3, 6, ignore_eos=True) for i in range(3)]
    for one in requests:
        engine.add(one)
    engine.step()
    runner.poisons.add("r1")
    seen = Collector()
    for output in steps(engine):
        seen.take(output)
    failed = seen.finished["r1"]
    assert (failed.outcome, failed.fault, failed.completion_tokens) == (Outcome.FAILED, Fault.NON_FINITE_LOGITS, 1)
    for i in (0, 2):
        assert seen.finished[f"r{i}"].choices == alone(requests[i]).choices
    expect_idle(engine)


def test_the_canary_runs_while_no_step_is_in_flight_and_loses_no_output() -> None:
    engine, runner = make_engine(overlap=True)
    one = request("a", [1, 2, 3], 2, ignore_eos=True)
    engine.add(one)
    engine.step()
    engine.step()
    engine.check()
    assert (engine.has_work, engine._pipeline.flights) == (True, ())
    (last,) = engine.step().finished
    assert last.choices == alone(one).choices
    in_flight = 0
    for event, plan in zip(runner.events, [plan for plan in runner.plans for _ in range(2)], strict=True):
        in_flight += 1 if event.startswith("launch") else -1
        assert in_flight <= 1 or plan.slices[0].seq.request.id != CANARY_ID


def test_a_request_dropped_before_a_check_has_no_further_output() -> None:
    engine, _ = make_engine(overlap=True)
    one = request("a", [1, 2, 3], 9, ignore_eos=True)
    engine.add(one)
    engine.step()
    engine.drop("a")
    engine.check()
    assert not engine.step()
    expect_idle(engine)


def test_a_request_that_raises_is_run_alone_with_no_step_in_flight() -> None:
    engine, runner = make_engine(overlap=True)
    runner.raises.add("r1")
    launch, alone_beside = runner.launch, list[int]()

    def watched(plan: Plan) -> Flight:
        if engine._suspects:
            alone_beside.append(len(runner._in_flight))
        return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    requests = [request(f"r{i}", [i + 1] * 3, 6, ignore_eos=True) for i in range(3)]
    finished = run(engine, *requests)
    assert finished["r1"].fault is Fault.INTERNAL
    assert set(alone_beside) == {0}
    for i in (0, 2):
        assert finished[f"r{i}"].choices == alone(requests[i]).choices


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slots", [0, 100])
def test_a_sequence_preempted_while_its_step_is_in_flight_keeps_its_text(slots: int) -> None:
    engine, runner = make_engine(overlap=True, num_blocks=8, max_model_len=32, host_slots=slots)
    expect_short_outputs(engine)
    requests = [request(f"r{i}", [i + 1] * 5, 20, ignore_eos=True, n=1 + i % 2, seed=i) for i in range(4)]
    finished = run(engine, *requests)
    in_last: set[int] = set()
    caught = 0
    for plan in runner.plans:
        caught += sum(seq.uid in in_last for seq in plan.preempted)
        in_last = {seq.uid for seq in plan.sampling}
    assert caught > 0
    for one in requests:
        assert finished[one.id].choices == alone(one).choices, one.id


def test_the_blocks_of_a_sequence_that_ends_with_its_pending_id_are_taken_before_any_other() -> None:
    engine, runner = make_engine(overlap=True, num_blocks=4, block_size=4, max_model_len=16, watermark=0.0)
    expect_short_outputs(engine)
    requests = [request("first", [1] * 5, 4, ignore_eos=True), request("second", [2] * 5, 8, ignore_eos=True)]
    finished = run(engine, *requests)
    assert not any(plan.preempted for plan in runner.plans)
    assert engine.stats().preemptions_recompute == 0
    for one in requests:
        assert finished[one.id].choices == alone(one).choices


def test_a_prefix_is_found_once_the_ids_of_its_step_are_known() -> None:
    engine, _ = make_engine(overlap=True)
    prompt = list(range(1, 14))
    engine.add(request("a", prompt, 1))
    engine.step()
    assert engine.scheduler.blocks.device._index == {}
    engine.add(request("b", prompt, 1))
    finished = {last.request_id: last for output in steps(engine) for last in output.finished}
    assert finished["b"].cached_tokens == 12
    assert finished["b"].choices == finished["a"].choices


def test_a_request_that_waits_for_a_prefix_starts_while_the_sequence_that_computed_it_runs(overlap: bool) -> None:
    engine, _ = make_engine()
    prompt = list(range(1, 14))
    for name in ("a", "b"):
        engine.add(request(name, prompt, 20, ignore_eos=True))
    engine.step()
    assert engine.stats().waiting == 1
    engine.step()
    engine.step()
    assert engine.stats().running == 2
    finished = {last.request_id: last for output in steps(engine) for last in output.finished}
    assert [finished[name].cached_tokens for name in ("a", "b")] == [0, 12]
    assert finished["a"].choices == finished["b"].choices
    expect_idle(engine)


# ── the gate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_gate_may_hold_or_cancel_a_request_while_a_step_is_in_flight() -> None:
    engine, _ = make_engine(overlap=True)

    def gate(new: list[Request]) -> None:
        for one in new:
            if one.id == "held":
                engine.hold(one.id)
            if one.id == "cancelled":
                engine.cancel(one.id)

    engine.gate = gate
    requests = [request(name, [i + 1] * 4, 6, ignore_eos=True) for i, name in enumerate(("runs", "held", "cancelled"))]
    engine.add(requests[0])
    engine.step()
    engine.add(requests[1])
    engine.add(requests[2])
    seen = Collector()
    while "runs" not in seen.finished:
        seen.take(engine.step())
        engine.check_integrity()
        assert not engine.waits
    while not engine.waits:
        seen.take(engine.step())
    assert engine.computing == frozenset()
    engine.release("held")
    for output in steps(engine):
        seen.take(output)
    assert (seen.finished["cancelled"].outcome, seen.finished["cancelled"].completion_tokens) == (Outcome.CANCELLED, 0)
    for one in requests[:2]:
        assert seen.finished[one.id].choices == alone(one).choices
    expect_idle(engine)
