"""The engine under arbitrary sequences of submit, cancel, drop, expire and step; a mistake changes the stub's text."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.outputs import Finished, Outcome
from engine.request import Request
from tests.engine.stub import Collector, alone, expect_idle, expect_short_outputs, make_engine, request


class EngineMachine(RuleBasedStateMachine):
    """In any order of events the engine is consistent, and each request ends once, with the text that it has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.dropped: set[str] = set()
        self.seen = Collector()

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare=st.integers(0, 12),
        budget=st.integers(1, 24),
        seqs=st.integers(1, 6),
        caching=st.booleans(),
        host_slots=st.sampled_from([0, 1, 3, 40]),
        max_overtakes=st.integers(0, 3),
        aging=st.sampled_from([0.0, 5.0, 100.0]),
        careless=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        budget: int,
        seqs: int,
        caching: bool,
        host_slots: int,
        max_overtakes: int,
        aging: float,
        careless: bool,
        overlap: bool,
    ) -> None:
        self.engine, self.runner = make_engine(
            garbage=1,
            block_size=block_size,
            num_blocks=-(-24 // block_size) + spare,
            max_model_len=24,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            prefix_caching=caching,
            host_slots=host_slots,
            max_overtakes=max_overtakes,
            aging_seconds=aging,
            overlap=overlap,
        )
        self.engine._clock = lambda: self.now
        if careless:
            expect_short_outputs(self.engine)

    @rule(
        # A tiny alphabet, so that prompts share prefixes.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 10),
        priority=st.integers(0, 2),
        n=st.integers(1, 3),
        ttl=st.none() | st.integers(1, 30),
        temperature=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from(["", "x"]),
        stop=st.sampled_from([(), ("b",), ("cd", "e")]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        n: int,
        ttl: int | None,
        temperature: float,
        salt: str,
        stop: tuple[str, ...],
    ) -> None:
        one = request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            priority=priority,
            salt=salt,
            deadline=None if ttl is None else self.now + ttl,
            n=n,
            temperature=temperature,
            seed=len(prompt),
            stop=stop,
            repetition_penalty=1.1,
        )
        self.requests[one.id] = one
        self.engine.add(one)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id not in self.seen.finished:
            self.dropped.add(request_id)
            self.engine.drop(request_id)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 1
            self.seen.take(self.engine.step())
            self.engine.check_integrity()

    @precondition(lambda self: self.requests)
    @rule()
    def abandoned_step(self) -> None:
        self.engine._pipeline.settle()
        self.seen.take(self.engine._live.take_output())  # as a step that settles does
        plan = self.engine.scheduler.schedule()
        self.runner.move(plan)
        self.engine.scheduler.moved()
        self.engine.scheduler.abandon(plan)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.seen.take(self.engine.step())
            self.engine.check_integrity()
        expect_idle(self.engine)
        assert set(self.seen.finished) == set(self.requests) - self.dropped
        for request_id, last in self.seen.finished.items():
            if last.outcome is Outcome.SUCCEEDED:
                assert last.choices == alone(self.requests[request_id]).choices
            else:
                self.expect_beginnings(self.requests[request_id], last)

    def expect_beginnings(self, one: Request, last: Finished) -> None:
        """What was cut short is the beginning of the undisturbed text; that may be the beginning of a stop string, too,
        which the undisturbed text lacks, so it is compared with the text that nothing stops."""
        params = dataclasses.replace(one.params, stop=(), seed=one.noise_seed)
        endless = Request(one.id, one.prompt, params, cache_salt=one.cache_salt)
        for mine, whole in zip(last.choices, alone(endless).choices, strict=True):
            assert mine.token_ids == whole.token_ids[: len(mine.token_ids)]
            assert whole.text.startswith(mine.text)
            assert not any(stop in mine.text for stop in one.params.stop)


TestMachine = EngineMachine.TestCase
TestMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("block", range(10))
@pytest.mark.usefixtures("overlap")
def test_a_cancel_that_races_the_finish_leaves_one_ending(block: int) -> None:
    """1,000 seeded interleavings of cancels with steps; each request has exactly one ending."""
    for seed in range(100 * block, 100 * block + 100):
        chance = random.Random(seed)
        engine, _ = make_engine(
            num_blocks=chance.randint(6, 20), max_model_len=24, max_num_batched_tokens=chance.randint(2, 20)
        )
        requests = [
            request(
                f"r{i}",
                [1 + i % 2] * chance.randint(1, 12),
                chance.randint(1, 6),
                n=chance.randint(1, 2),
                ignore_eos=True,
            )
            for i in range(chance.randint(1, 5))
        ]
        for one in requests:
            engine.add(one)
        seen = Collector()
        cancelled: set[str] = set()
        while engine.has_work:
            if chance.random() < 0.3:
                target = chance.choice(requests).id
                if target not in seen.finished:
                    cancelled.add(target)
                engine.cancel(target)
            output = engine.step()
            engine.check_integrity()
            seen.take(output)
            for last in output.finished:
                # A cancel that was there before the step wins; one that came after the end changes nothing.
                assert (last.outcome is Outcome.CANCELLED) == (last.request_id in cancelled)
        assert set(seen.finished) == {one.id for one in requests}
        expect_idle(engine)
