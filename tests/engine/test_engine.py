"""The step as a whole: endings, faults, the gate, limits."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.canary import CANARY_ID
from engine.engine import Engine
from engine.outputs import EngineBroken, Fault, Outcome, StepOutput
from engine.request import InvalidRequest, PromptTooLong, Request
from engine.scheduling.block_pool import IntegrityError
from engine.scheduling.plan import Plan
from engine.sequence import FinishReason
from tests.engine.stub import (
    Collector,
    Flight,
    alone,
    expect_idle,
    expect_short_outputs,
    make_engine,
    request,
    run,
    steps,
)

pytestmark = pytest.mark.usefixtures("overlap")


def test_a_request_ends_with_its_text_and_all_blocks_back() -> None:
    engine, _ = make_engine()
    last = run(engine, request("a", [1, 2, 3], max_tokens=5, ignore_eos=True))["a"]
    assert last.outcome is Outcome.SUCCEEDED
    assert last.choices[0].finish_reason is FinishReason.LENGTH
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (3, 5, 0)


def test_requests_that_end_early_do_not_change_other_texts() -> None:
    engine, _ = make_engine()
    requests = [request(f"r{n}", [n] * n, max_tokens=n, ignore_eos=True) for n in range(1, 9)]
    finished = run(engine, *requests)
    for one in requests:
        assert finished[one.id].choices == alone(one).choices


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_text_does_not_depend_on_lengths_around_block_edges(block_size: int) -> None:
    for length in (block_size - 1, block_size, block_size + 1, 2 * block_size):
        for max_tokens in (1, block_size, block_size + 1):
            if length:
                one = request("r", [5] * length, max_tokens, ignore_eos=True)
                engine, _ = make_engine(block_size=block_size)
                assert run(engine, one)["r"].choices == alone(one).choices


def test_eos_ends_a_choice_and_is_counted_but_not_shown() -> None:
    engine, _ = make_engine()
    one = request("a", [1], max_tokens=3, logit_bias=((0, 1000.0),))
    choice = run(engine, one)["a"].choices[0]
    assert (choice.text, choice.finish_reason, choice.stop, choice.token_ids) == ("", FinishReason.STOP, None, (0,))


def test_min_tokens_holds_eos_and_stop_ids_back() -> None:
    engine, _ = make_engine()
    bias = ((0, 1000.0), (7, 900.0), (9, 800.0))
    one = request("a", [1], 5, logit_bias=bias, min_tokens=2, stop_token_ids=frozenset({7}))
    assert run(engine, one)["a"].choices[0].token_ids == (9, 9, 0)


def test_ignore_eos_goes_on_after_eos() -> None:
    engine, _ = make_engine()
    choice = run(engine, request("a", [1], 4, logit_bias=((0, 1000.0),), ignore_eos=True))["a"].choices[0]
    assert (choice.token_ids, choice.finish_reason) == ((0, 0, 0, 0), FinishReason.LENGTH)


def test_a_stop_id_is_named_and_not_shown() -> None:
    engine, _ = make_engine()
    choice = run(engine, request("a", [1], 4, logit_bias=((7, 1000.0),), stop_token_ids=frozenset({7})))["a"].choices[0]
    assert (choice.text, choice.stop, choice.finish_reason) == ("", 7, FinishReason.STOP)


def test_a_stop_string_across_tokens_cuts_the_text() -> None:
    free = alone(request("a", [1, 2, 3], 12, ignore_eos=True)).choices[0].text
    stop = free[4:7]
    engine, _ = make_engine()
    choice = run(engine, request("a", [1, 2, 3], 12, ignore_eos=True, stop=(stop,)))["a"].choices[0]
    assert choice.text == free[: free.index(stop)]
    assert (choice.stop, choice.finish_reason) == (stop, FinishReason.STOP)


def test_choices_share_the_prompt_and_differ_in_noise() -> None:
    engine, runner = make_engine()
    one = request("a", list(range(1, 14)), 6, n=4, temperature=1.0, seed=1, ignore_eos=True)
    last = run(engine, one)["a"]
    assert [c.index for c in last.choices] == [0, 1, 2, 3]
    assert len({c.token_ids for c in last.choices}) == 4
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (13, 24, 0)
    assert last.choices == alone(one).choices
    computed = sum(p.num_tokens for p in runner.plans)
    assert computed == 13 + 4 * 5, "the prompt is computed once, for all"


def test_a_seed_gives_the_same_text_beside_any_other_requests() -> None:
    one = request("a", [3, 1, 4], 10, temperature=0.9, seed=42, ignore_eos=True)
    expected = alone(one).choices
    for seed in (None, 7):
        engine, _ = make_engine(max_num_batched_tokens=5, num_blocks=20)
        others = [request(f"o{i}", [i + 1] * 4, 3 + i, temperature=1.2, seed=seed) for i in range(5)]
        assert run(engine, *others[:2], one, *others[2:])["a"].choices == expected


def test_unseeded_requests_differ() -> None:
    engine, _ = make_engine()
    texts = run(engine, *(request(f"r{i}", [1, 2], 20, temperature=1.0, ignore_eos=True) for i in range(8)))
    assert len({last.choices[0].text for last in texts.values()}) == 8


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_can_never_fit_is_refused_and_blocks_no_other() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=4)
    for length in (16, 17, 20):
        with pytest.raises(PromptTooLong, match=f"{length} tokens.* 16"):
            engine.add(request("a", [1] * length, 1))
    assert engine.limit_tokens(15, 100) == 1
    assert engine.limit_tokens(10, None) == 6
    with pytest.raises(PromptTooLong):
        engine.add(request("a2", [1] * 10, 20))
    assert run(engine, request("b", [1, 2, 3], 3))["b"].outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({"prompt": [61]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"stop_token_ids": frozenset({61})}, "stop_token_ids"),
        ({"logit_bias": ((999, 1.0),)}, "logit_bias"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_ids_out_of_range_are_refused_by_name(bad: dict[str, object], names: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match=names):
        engine.add(request("a", **{"prompt": [1], **bad}))  # type: ignore[arg-type]
    expect_idle(engine)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        request("a", [])


def test_the_id_of_a_live_request_is_refused() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(InvalidRequest, match="being worked on"):
        engine.add(request("a", [2]))


# ── cancel, drop, expiry ──────────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_of_a_waiting_request_computes_nothing_for_it() -> None:
    engine, runner = make_engine()
    engine.add(request("a", [1, 2, 3]))
    engine.cancel("a")
    (last,) = engine.step().finished
    assert (last.outcome, last.completion_tokens) == (Outcome.CANCELLED, 0)
    assert last.choices[0].finish_reason is FinishReason.CANCELLED
    assert runner.plans == []
    expect_idle(engine)


def test_cancel_between_two_chunks_frees_the_blocks_in_the_next_step() -> None:
    engine, _ = make_engine(max_num_batched_tokens=4)
    engine.add(request("a", [1] * 20))
    engine.step()
    assert engine.stats().free_blocks < engine.stats().total_blocks
    engine.cancel("a")
    output = engine.step()
    assert [f.outcome for f in output.finished] == [Outcome.CANCELLED]
    expect_idle(engine)


def test_cancel_keeps_and_flushes_what_was_generated() -> None:
    engine, _ = make_engine()
    free = alone(request("a", [1, 2, 3], 12, ignore_eos=True)).choices[0].text
    engine.add(request("a", [1, 2, 3], 12, ignore_eos=True, stop=(free[3:5] + "!",)))
    seen = Collector()
    for _ in range(5):
        seen.take(engine.step())
    engine.cancel("a")
    for output in steps(engine):
        seen.take(output)
    assert seen.finished["a"].choices[0].text == free[:5]
    expect_idle(engine)


def test_cancel_of_one_choice_less_request_ends_all_its_choices() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1, 2], 30, n=3, temperature=1.0, seed=3, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    (last,) = engine.step().finished
    assert [c.finish_reason for c in last.choices] == [FinishReason.CANCELLED] * 3
    expect_idle(engine)


def test_cancel_hits_only_its_own_request() -> None:
    engine, _ = make_engine()
    requests = [request(f"r{i}", [i + 1], 6, ignore_eos=True) for i in range(3)]
    for one in requests:
        engine.add(one)
    engine.step()
    engine.cancel("r0")
    finished = {f.request_id: f for output in steps(engine) for f in output.finished}
    assert [finished[f"r{i}"].outcome for i in range(3)] == [Outcome.CANCELLED, Outcome.SUCCEEDED, Outcome.SUCCEEDED]


def test_cancel_twice_of_unknown_and_of_ended_requests_changes_nothing() -> None:
    engine, _ = make_engine()
    engine.cancel("nobody")
    engine.add(request("a", [1], 2, ignore_eos=True))
    engine.cancel("a")
    engine.cancel("a")
    assert len(engine.step().finished) == 1
    engine.cancel("a")
    assert not engine.step()
    last = run(engine, request("a", [1], 2, ignore_eos=True))["a"]
    assert last.outcome is Outcome.SUCCEEDED, "an old cancel does not reach a later request of the same id"


def test_a_dropped_request_has_no_further_output() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1], 9, ignore_eos=True))
    engine.step()
    engine.drop("a")
    assert not engine.step()
    expect_idle(engine)


def test_expiry_ends_requests_in_any_state_and_keeps_their_text() -> None:
    now = [0.0]
    engine, _ = make_engine(max_num_seqs=1)
    engine._clock = lambda: now[0]
    engine.add(request("runs", [1], 20, ignore_eos=True, deadline=5.0))
    engine.add(request("waits", [1], 20, deadline=6.0))
    engine.add(request("stays", [1], 2, ignore_eos=True, deadline=1e9))
    engine.step()
    engine.step()
    now[0] = 7.0
    finished = {f.request_id: f for output in steps(engine) for f in output.finished}
    assert finished["runs"].outcome is Outcome.EXPIRED
    assert finished["runs"].choices[0].finish_reason is FinishReason.EXPIRED
    assert len(finished["runs"].choices[0].text) == 2
    assert (finished["waits"].outcome, finished["waits"].completion_tokens) == (Outcome.EXPIRED, 0)
    assert finished["stays"].outcome is Outcome.SUCCEEDED
    expect_idle(engine)


def test_an_old_deadline_does_not_reach_a_later_request_of_the_same_id() -> None:
    now = [0.0]
    engine, _ = make_engine()
    engine._clock = lambda: now[0]
    engine.add(request("other", [9], 30, ignore_eos=True))
    engine.add(request("a", [1], 1, deadline=5.0))
    while not engine.step().finished:
        pass
    engine.add(request("a", [1], 5, ignore_eos=True))
    now[0] = 6.0
    finished = {f.request_id: f for output in steps(engine) for f in output.finished}
    assert finished["a"].outcome is Outcome.SUCCEEDED


# ── the gate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_gate_gets_each_request_once_before_its_first_forward_pass() -> None:
    engine, runner = make_engine(num_blocks=8, max_model_len=32)
    seen: list[str] = []

    def gate(requests: list[Request]) -> None:
        computed = {p.seq.request.id for plan in runner.plans for p in plan.slices}
        for one in requests:
            assert one.id not in computed
            seen.append(one.id)

    engine.gate = gate
    expect_short_outputs(engine)
    run(engine, *(request(f"r{i}", [i + 1] * 5, 20, n=2, ignore_eos=True) for i in range(4)))
    assert engine.stats().preemptions_recompute > 0
    assert seen == ["r0", "r1", "r2", "r3"]


def test_a_request_that_the_gate_refuses_is_never_computed_and_changes_no_other_text() -> None:
    engine, runner = make_engine()

    def gate(requests: list[Request]) -> None:
        for one in requests:
            if one.id == "cancelled":
                engine.cancel(one.id)
            if one.id == "dropped":
                engine.drop(one.id)

    engine.gate = gate
    stays = request("stays", [4, 5, 6], 5, ignore_eos=True)
    finished = run(engine, request("cancelled", [1] * 9), request("dropped", [2] * 9), stays)
    assert {p.seq.request.id for plan in runner.plans for p in plan.slices} == {"stays"}
    assert finished["cancelled"].outcome is Outcome.CANCELLED
    assert "dropped" not in finished
    assert finished["stays"].choices == alone(stays).choices


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_logits_that_are_not_finite_end_that_one_request() -> None:
    engine, runner = make_engine()
    runner.poisons.add("r1")
    requests = [request(f"r{i}", [i + 1] * 3, 4, ignore_eos=True) for i in range(3)]
    finished = run(engine, *requests)
    assert (finished["r1"].outcome, finished["r1"].fault) == (Outcome.FAILED, Fault.NON_FINITE_LOGITS)
    for i in (0, 2):
        assert finished[f"r{i}"].choices == alone(requests[i]).choices


@pytest.mark.parametrize("num_blocks", [8, 64])
def test_a_request_that_makes_the_step_raise_is_found_and_ended_alone(num_blocks: int) -> None:
    engine, runner = make_engine(num_blocks=num_blocks, max_model_len=32)
    runner.raises.add("r2")
    requests = [request(f"r{i}", [i + 1] * 5, 12, ignore_eos=True) for i in range(5)]
    finished = run(engine, *requests)
    assert (finished["r2"].outcome, finished["r2"].fault) == (Outcome.FAILED, Fault.INTERNAL)
    assert "told to raise" in (finished["r2"].message or "")
    for i in (0, 1, 3, 4):
        assert finished[f"r{i}"].choices == alone(requests[i]).choices


def test_a_lost_device_ends_the_engine_and_fails_no_request() -> None:
    engine, runner = make_engine()
    engine.add(request("a", [1, 2, 3]))

    def lost(plan: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    runner.launch = lost  # type: ignore[assignment, method-assign]
    with pytest.raises(torch.AcceleratorError):
        engine.step()


class TestCanary:
    """The canary tells a fault of the engine from a fault of a request."""

    def test_an_engine_whose_every_step_raises_is_broken_and_blames_no_request(self) -> None:
        engine, runner = make_engine()
        runner.raises |= {"r0", "r1", "r2", CANARY_ID}
        for i in range(3):
            engine.add(request(f"r{i}", [1, 2, 3]))
        outputs: list[StepOutput] = []
        with pytest.raises(EngineBroken, match="told to raise"):
            outputs.extend(steps(engine))
        assert not any(output.finished for output in outputs)

    def test_an_engine_that_gives_nan_for_every_request_is_broken(self) -> None:
        engine, runner = make_engine()
        runner.poisons |= {"r0", "r1", CANARY_ID}
        for i in range(2):
            engine.add(request(f"r{i}", [1, 2, 3]))
        with pytest.raises(EngineBroken, match="not finite"):
            list(steps(engine))

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
    def test_an_engine_that_runs_out_of_memory_at_every_step_is_broken(self, error: Exception) -> None:
        engine, runner = make_engine()
        for i in range(4):
            engine.add(request(f"r{i}", [1, 2, 3]))

        def no_memory(plan: object) -> None:
            raise error

        runner.launch = no_memory  # type: ignore[assignment, method-assign]
        outputs: list[StepOutput] = []
        with pytest.raises(EngineBroken):
            outputs.extend(steps(engine))
        assert not any(output.finished for output in outputs)

    def test_an_engine_that_runs_out_of_memory_for_one_long_request_only_is_not_broken(self) -> None:
        engine, runner = make_engine()
        launch = runner.launch

        def small(plan: Plan) -> Flight:
            if any(piece.seq.num_tokens > 20 for piece in plan.slices):
                raise torch.OutOfMemoryError("too long")
            return launch(plan)

        runner.launch = small  # type: ignore[method-assign]
        finished = run(engine, request("long", [1] * 30), request("short", [2] * 5))
        assert finished["long"].fault is Fault.OUT_OF_MEMORY
        assert finished["short"].outcome is Outcome.SUCCEEDED

    def test_steps_that_raise_only_sometimes_end_no_request(self) -> None:
        engine, runner = make_engine()
        launch, turn = runner.launch, itertools.count()

        def flaky(plan: Plan) -> Flight:
            if plan.slices[0].seq.request.id != CANARY_ID and next(turn) % 2 == 0:
                raise RuntimeError("a passing fault")
            return launch(plan)

        runner.launch = flaky  # type: ignore[method-assign]
        finished = run(engine, *(request(f"r{i}", [i + 1] * 5, 6, ignore_eos=True) for i in range(3)))
        assert {last.outcome for last in finished.values()} == {Outcome.SUCCEEDED}

    def test_without_a_free_block_the_canary_passes(self) -> None:
        engine, runner = make_engine(num_blocks=8, max_model_len=32)
        engine.add(request("a", [1] * 27, 4, ignore_eos=True))
        while engine.scheduler.blocks.num_free:
            engine.step()
        runner.raises.add(CANARY_ID)
        engine.check()  # it cannot run, so nothing is known
        while engine.has_work:
            engine.step()
        with pytest.raises(EngineBroken):
            engine.check()
        expect_idle(engine)

    def test_the_canary_leaves_no_blocks_and_no_state(self) -> None:
        engine, _ = make_engine()
        engine.check()
        expect_idle(engine)

    def test_text_that_cannot_be_decoded_ends_its_request_alone(self) -> None:
        class Panic(BaseException):
            """A panic of Rust as pyo3 raises it: not an `Exception`."""

        engine, _ = make_engine()
        token_bytes, bad = engine._token_bytes, request("bad", [1, 2, 3], 5, ignore_eos=True)

        def panics(token: int, skip: bool) -> bytes:
            raise Panic("unreachable")

        engine._token_bytes = panics
        engine.add(bad)
        engine._token_bytes = token_bytes
        finished = run(engine, request("good", [1, 2, 3], 5, ignore_eos=True))
        assert (finished["bad"].outcome, finished["bad"].fault) == (Outcome.FAILED, Fault.INTERNAL)
        assert finished["good"].outcome is Outcome.SUCCEEDED

    def test_a_detokeniser_that_fails_for_every_request_breaks_the_engine(self) -> None:
        engine, _ = make_engine()

        def panics(token: int, skip: bool) -> bytes:
            raise RuntimeError("unreachable")

        engine._token_bytes = engine._canary._token_bytes = panics
        engine.add(request("a", [1, 2, 3]))
        with pytest.raises(EngineBroken, match="unreachable"):
            list(steps(engine))


class TestHold:
    """A request on hold keeps its place in the order of service, is not computed, and delays no other request."""

    def test_a_request_on_hold_is_not_computed_and_other_requests_are(self) -> None:
        engine, runner = make_engine()
        engine.gate = lambda new: [engine.hold(one.id) for one in new if one.id == "far"]  # type: ignore[assignment]
        requests = [request("near", [1, 2, 3], 6, ignore_eos=True), request("far", [4, 5, 6], 6, ignore_eos=True)]
        for one in requests:
            engine.add(one)
        collector = Collector()
        while "near" not in collector.finished:
            collector.take(engine.step())
            engine.check_integrity()
        assert not engine.waits
        assert not engine.step()
        assert engine.waits
        assert all(piece.seq.request.id == "near" for plan in runner.plans for piece in plan.slices)
        assert engine.release("far")
        for output in steps(engine):
            collector.take(output)
        assert collector.finished["far"].choices == alone(requests[1]).choices
        expect_idle(engine)

    @pytest.mark.parametrize("end", ["cancel", "drop"])
    def test_a_request_on_hold_can_be_ended(self, end: str) -> None:
        engine, _ = make_engine()
        engine.gate = lambda new: [engine.hold(one.id) for one in new]  # type: ignore[assignment]
        engine.add(request("a", [1, 2, 3]))
        engine.step()
        getattr(engine, end)("a")
        assert not engine.release("a")
        assert len(engine.step().finished) == (end == "cancel")
        expect_idle(engine)

    def test_a_request_on_hold_is_preempted_before_running_requests(self) -> None:
        engine, _ = make_engine(num_blocks=12, max_model_len=44)
        expect_short_outputs(engine)
        requests = [request("runs", [1] * 4, 40, ignore_eos=True), request("far", [2] * 20, 4, ignore_eos=True)]
        engine.gate = lambda new: [engine.hold(one.id) for one in new if one.id == "far"]  # type: ignore[assignment]
        finished = {}
        for one in requests:
            engine.add(one)
        while "runs" not in finished:
            finished |= {last.request_id: last for last in engine.step().finished}
            engine.check_integrity()
        assert finished["runs"].choices == alone(requests[0], max_model_len=44).choices
        assert engine.release("far")
        finished |= {last.request_id: last for output in steps(engine) for last in output.finished}
        assert finished["far"].choices == alone(requests[1], max_model_len=44).choices
        expect_idle(engine)

    def test_a_step_that_raises_for_another_request_does_not_fail_one_on_hold(self) -> None:
        engine, runner = make_engine()
        engine.gate = lambda new: [engine.hold(one.id) for one in new if one.id == "far"]  # type: ignore[assignment]
        runner.raises.add("bad")
        good = request("far", [4, 5, 6], 6, ignore_eos=True)
        engine.add(request("bad", [1, 2, 3]))
        engine.add(good)
        finished = {}
        while "bad" not in finished:
            finished |= {last.request_id: last for last in engine.step().finished}
            engine.check_integrity()
        engine.release("far")
        finished |= {last.request_id: last for output in steps(engine) for last in output.finished}
        assert finished["far"].choices == alone(good).choices
        expect_idle(engine)


def test_blocks_that_cannot_be_copied_are_no_requests_fault() -> None:
    engine, runner = make_engine()
    engine.add(request("a", [1, 2, 3], n=2))

    def full(plan: Plan) -> None:
        raise OSError("no space left on the swap file's device")

    runner.move = full  # type: ignore[method-assign]
    with pytest.raises(EngineBroken, match="no space left"):
        list(steps(engine))


def test_a_leaked_block_is_reported_as_long_as_the_longest_request_fits() -> None:
    engine, _ = make_engine(num_blocks=20, max_model_len=64, host_slots=4)
    run(engine, request("a", list(range(1, 20))))
    assert engine.check_idle() is None
    engine.scheduler.blocks.host.take()
    for leaked in range(1, 5):
        engine.scheduler.blocks.device.take()
        leak = engine.check_idle()
        assert leak is not None
        assert f"{leaked} of 20 device blocks" in leak
        assert "1 of 4 host blocks" in leak
    engine.scheduler.blocks.device.take()
    with pytest.raises(IntegrityError, match="64 tokens no longer fits"):
        engine.check_idle()


def check_often(engine: Engine) -> None:
    """Check an idle engine as often as a pool of 1,000 blocks needs."""
    for _ in range(4):
        assert engine.check_idle() is None


def test_successive_checks_of_an_idle_engine_find_a_wrong_hash_anywhere_in_the_pool() -> None:
    engine, _ = make_engine(num_blocks=1000)
    run(engine, request("a", list(range(1, 20))))
    device = engine.scheduler.blocks.device
    for block in (0, 999):
        digest, device._hashes[block] = device._hashes[block], b"of another prefix"
        with pytest.raises(IntegrityError, match=f"block {block} "):
            check_often(engine)
        device._hashes[block] = digest
    check_often(engine)


def test_a_check_of_an_idle_engine_finds_a_hash_that_a_reused_block_has_lost() -> None:
    """No block has this hash any more, so that checks of the blocks' own hashes cannot find it."""
    engine, _ = make_engine(num_blocks=1000)
    run(engine, request("a", list(range(1, 20))))
    device = engine.scheduler.blocks.device
    device._index[b"of an evicted prefix"] = 999
    with pytest.raises(IntegrityError, match="device blocks are findable"):
        engine.check_idle()
