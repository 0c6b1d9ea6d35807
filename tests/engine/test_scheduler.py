"""What a step plans: which sequences, how many tokens of each, which blocks."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.scheduling.plan import Plan
from tests.engine.stub import StubRunner, alone, expect_idle, expect_short_outputs, make_engine, request, run, steps

pytestmark = pytest.mark.usefixtures("overlap")


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, start, count) of each slice."""
    return [(p.seq.request.id, p.start, p.num_tokens) for p in plan.slices]


def plans_of(runner: StubRunner) -> list[list[tuple[str, int, int]]]:
    return [shape(plan) for plan in runner.plans]


def drain(engine: Engine) -> None:
    for _ in steps(engine):
        pass
    expect_idle(engine)


def test_a_long_prompt_is_cut_into_chunks_and_sampled_only_at_its_last() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    engine.add(request("a", list(range(1, 21)), max_tokens=2, ignore_eos=True))
    drain(engine)
    assert plans_of(runner) == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)], [("a", 20, 1)]]
    assert [len(p.sampling) for p in runner.plans] == [0, 0, 1, 1]


def test_decodes_come_before_prefill_chunks_in_one_batch() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    engine.add(request("b", [1, 2, 3], max_tokens=4, ignore_eos=True))
    engine.step()
    engine.add(request("a", list(range(1, 21)), max_tokens=1, priority=0))
    drain(engine)
    assert plans_of(runner)[1:3] == [[("b", 3, 1), ("a", 0, 7)], [("b", 4, 1), ("a", 7, 7)]]


def test_no_plan_exceeds_the_token_budget_or_the_number_of_sequences() -> None:
    engine, runner = make_engine(max_num_batched_tokens=10, max_num_seqs=3)
    for i in range(9):
        engine.add(request(f"r{i}", [i + 1] * (3 + i), max_tokens=5))
    drain(engine)
    assert max(p.num_tokens for p in runner.plans) == 10
    assert max(len(p.slices) for p in runner.plans) == 3


def test_requests_are_admitted_by_lane_then_by_arrival() -> None:
    engine, runner = make_engine(max_num_seqs=1)
    for name, priority in (("low", 2), ("normal", 1), ("high", 0), ("high2", 0)):
        engine.add(request(name, [7], max_tokens=1, priority=priority))
    drain(engine)
    assert [s[0][0] for s in plans_of(runner)] == ["high", "high2", "normal", "low"]


def test_a_prefix_hit_shortens_the_prefill_to_what_is_new() -> None:
    engine, runner = make_engine()
    run(engine, request("a", list(range(1, 14)), max_tokens=1))
    finished = run(engine, request("b", [*range(1, 13), 50, 51], max_tokens=1))
    assert plans_of(runner) == [[("a", 0, 13)], [("b", 12, 2)]]
    assert finished["b"].cached_tokens == 12


def test_a_sequence_waits_for_a_running_one_that_computes_its_prefix() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    prefix = list(range(1, 17))
    requests = [request(f"r{i}", [*prefix, 40 + i], max_tokens=1) for i in range(4)]
    finished = run(engine, *requests)
    computed = sum(count for plan in plans_of(runner) for _, _, count in plan)
    assert computed == 16 + 4, plans_of(runner)
    for one in requests:
        assert finished[one.id].choices == alone(one).choices


def test_a_sequence_that_waits_for_a_prefix_runs_when_the_computing_request_is_cancelled() -> None:
    engine, _ = make_engine(max_num_batched_tokens=4)
    engine.add(request("first", list(range(1, 17))))
    second = request("second", list(range(1, 17)))
    engine.add(second)
    engine.step()
    engine.cancel("first")
    finished = {f.request_id: f for output in steps(engine) for f in output.finished}
    assert finished["second"].choices == alone(second).choices
    expect_idle(engine)


def test_when_blocks_run_out_the_last_sequence_is_preempted_and_every_text_stays_the_same() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=4, max_model_len=32)
    expect_short_outputs(engine)
    requests = [request(f"r{i}", [i + 1] * 5, max_tokens=20, ignore_eos=True) for i in range(4)]
    finished = run(engine, *requests)
    assert engine.stats().preemptions_recompute > 0
    for one in requests:
        assert finished[one.id].choices == alone(one).choices, one.id


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    engine, runner = make_engine(num_blocks=6, block_size=2, max_model_len=12, watermark=0.0)
    expect_short_outputs(engine)
    for i in range(5):
        engine.add(request(f"r{i}", [i + 1] * 3, max_tokens=8, ignore_eos=True))
    drain(engine)
    preempting = [p for p in runner.plans if p.preempted]
    assert preempting
    assert not any(p.admitted for p in preempting)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_pool_in_which_one_sequence_barely_fits_ends_all(block_size: int, spare: int) -> None:
    longest = 24
    num_blocks = -(-longest // block_size) + spare
    engine, _ = make_engine(num_blocks=num_blocks, block_size=block_size, max_model_len=longest)
    requests = [request(f"r{i}", [i + 1] * (3 + 2 * i), max_tokens=24 - 3 - 2 * i, ignore_eos=True) for i in range(6)]
    finished = run(engine, *requests, limit=2000)
    for one in requests:
        assert finished[one.id].choices == alone(one).choices, one.id


def test_an_abandoned_plan_leaves_no_trace() -> None:
    engine, _ = make_engine()
    engine.add(request("running", [1] * 6, ignore_eos=True))
    engine.step()
    engine.add(request("new", [2] * 6))
    scheduler = engine.scheduler
    before = (scheduler.blocks.num_free, [list(s.block_table) for s in scheduler.running], scheduler.num_waiting)
    plan = scheduler.schedule()
    scheduler.moved()
    assert len(plan.admitted) == 1
    scheduler.abandon(plan)
    engine.check_integrity()
    assert (
        scheduler.blocks.num_free,
        [list(s.block_table) for s in scheduler.running],
        scheduler.num_waiting,
    ) == before
    drain(engine)


def test_a_plan_is_not_changed_by_what_happens_later() -> None:
    engine, runner = make_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=6, ignore_eos=True))
    engine.step()
    kept = shape(runner.plans[0])
    drain(engine)
    assert shape(runner.plans[0]) == kept
