"""Random schedules: requests with every option, on a small engine, and what happens to them between the steps."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import torch

from engine.canary import CANARY_ID
from engine.engine import Engine
from engine.outputs import ChoiceResult, Fault, Finished, Outcome
from engine.request import Bans, Request
from engine.sampling.structured import Grammar
from engine.scheduling.plan import Plan
from engine.scheduling.policy import PreemptionCost
from tests.engine.grammars import letters
from tests.engine.stub import (
    VOCAB,
    Collector,
    Flight,
    StubRunner,
    expect_idle,
    expect_short_outputs,
    make_engine,
    request,
    steps,
)

LONGEST = 24
"""Tokens of the longest sequence."""


@functools.cache
def _grammar(pattern: str) -> Grammar:
    return letters(pattern)


def random_request(chance: random.Random, name: str, common: list[int]) -> Request:
    """A request with a few of all options; half of them begin with `common`, or a part of it."""

    def draw_id() -> int:
        return chance.randrange(1, VOCAB)

    options: dict[str, object] = {
        "stop": tuple(chr(97 + draw_id()) for _ in range(chance.randint(1, 12))),
        "stop_token_ids": frozenset(draw_id() for _ in range(8)),
        "min_tokens": 2,
        "n": chance.randint(2, 3),
        "logprobs": chance.randint(0, 2),
        "prompt_logprobs": chance.randint(0, 2),
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": ((draw_id(), 8.0), (0, 4.0)),
        "bans": Bans(
            frozenset({draw_id()}), frozenset({draw_id()}), tuple((one, draw_id()) for one in range(1, VOCAB))
        ),
        "top_k": 5,
        "top_p": 0.7,
        "min_p": 0.2,
        "ignore_eos": True,
    }
    chosen = chance.sample(sorted(options), chance.randint(0, 4))
    prompt = common[: chance.choice([0, 0, 4, 8])] + [draw_id() for _ in range(chance.randint(1, 6))]
    one = request(
        name,
        prompt,
        chance.randint(2, min(10, LONGEST - len(prompt))),
        priority=chance.randrange(3),
        salt=chance.choice(["", "", "x"]),
        temperature=chance.choice([0.0, 0.0, 1.0]),
        seed=chance.randrange(1000),
        **{option: options[option] for option in chosen},
    )
    if chance.random() < 0.1:
        one = dataclasses.replace(one, deadline=float(chance.randint(1, 20)))
    if chance.random() < 0.06:
        one = dataclasses.replace(one, grammar=_grammar("[a-f]{1,4}g"))
    return one


class Schedule:
    """One random schedule, which follows from its seed; `run` plays it."""

    def __init__(self, seed: int, overlap: bool) -> None:
        chance = self.chance = random.Random(seed)
        common = [chance.randrange(1, VOCAB) for _ in range(8)]
        self.requests = {f"r{i}": random_request(chance, f"r{i}", common) for i in range(chance.randint(1, 6))}
        self.block_size = chance.choice([1, 2, 3, 4, 8])
        self.now = 0.0
        self.engine, self.runner = self._engine(seed, overlap)
        self.seen = Collector()
        self.later: list[tuple[float, Request, float | None]] = [
            (float(chance.choice([0, 0, 0, 2, 5])), one, None) for one in self.requests.values()
        ]
        """(step, request, turn before a drop) of the requests to add."""
        self.held: dict[str, float] = {}
        """Id → step at which a request on hold is released."""
        self.ended: dict[str, set[Outcome]] = {name: {Outcome.SUCCEEDED} for name in self.requests}
        """Id → outcomes that are right."""
        self.dropped: set[str] = set()
        self.disturbs = chance.random() < 0.6
        self.raising = chance.choice([0.0, 0.0, 0.05])
        self.happened = Counter[str]()
        self._plant_faults()

    def _engine(self, seed: int, overlap: bool) -> tuple[Engine, StubRunner]:
        chance = self.chance
        engine, runner = make_engine(
            garbage=seed,
            overlap=overlap,
            block_size=self.block_size,
            num_blocks=-(-LONGEST // self.block_size) + chance.choice([0, 0, 1, 30]),
            host_slots=chance.choice([0, 3, 100]),
            max_model_len=LONGEST,
            max_num_batched_tokens=chance.choice([3, 8, 64]),
            max_num_seqs=chance.choice([2, 5, 64]),
            max_overtakes=chance.choice([0, 16]),
            prefix_caching=chance.random() < 0.8,
            watermark=chance.choice([0.0, 0.01]),
        )
        engine._clock = lambda: self.now
        engine.scheduler.cost = PreemptionCost(copy=chance.choice([0.0, 0.0, 2.0]))
        engine.gate = self._gate
        if chance.random() < 0.7:
            expect_short_outputs(engine)
        return engine, runner

    def _plant_faults(self) -> None:
        """Let a request raise or have logits that are not finite, and steps raise now and then."""
        launch, chance = self.runner.launch, self.chance
        victim, kind = chance.choice(sorted(self.requests)), chance.random()
        if kind < 0.08:
            self.runner.raises.add(victim)
            self.ended[victim] = {Outcome.FAILED}
        elif kind < 0.16:
            self.ended[victim].add(Outcome.FAILED)
        since = chance.randint(0, 12)

        def disturbed(plan: Plan) -> Flight:
            if 0.08 <= kind < 0.16 and self.now >= since:
                self.runner.poisons.add(victim)
            if plan.slices[0].seq.request.id != CANARY_ID and chance.random() < self.raising:
                self.happened["launch raised"] += 1
                for piece in plan.slices:
                    self.ended[piece.seq.request.id].add(Outcome.FAILED)
                raise chance.choice([RuntimeError("a passing fault"), torch.OutOfMemoryError("no room")])
            return launch(plan)

        self.runner.launch = disturbed  # type: ignore[method-assign]

    def _gate(self, new: list[Request]) -> None:
        for one in new:
            kind = self.chance.random() if self.disturbs else 1.0
            if kind < 0.1:
                self.engine.hold(one.id)
                self.held[one.id] = self.now + self.chance.randint(1, 6)
            elif kind < 0.13:
                self._cancel(one.id)
            elif kind < 0.16:
                self._drop(one.id)

    # ── between the steps ─────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Counter[str]:
        """Play the schedule, check it after each step, and compare each output with that of an undisturbed engine.

        Returns:
            How often what happened.
        """
        while self.later or self.engine.has_work:
            self.now += 1
            assert self.now < 2000, "no end"
            self._before_step()
            before = set(self.engine._live.endings)
            output = self.engine.step()
            self.engine.check_integrity()
            self.seen.take(output)
            for last in output.finished:
                assert last.request_id not in before or last.outcome is not Outcome.SUCCEEDED
        expect_idle(self.engine)
        assert set(self.seen.finished) == set(self.requests) - self.dropped
        for name, whole in self._undisturbed().items():
            if name in self.seen.finished:
                self._compare(self.requests[name], self.seen.finished[name], whole)
        self._count()
        return self.happened

    def _before_step(self) -> None:
        for item in [item for item in self.later if item[0] <= self.now and self.engine.turn(item[1].id) is None]:
            self.later.remove(item)
            self.dropped.discard(item[1].id)
            self.engine.add(item[1], item[2])
        for name in [name for name, until in self.held.items() if until <= self.now]:
            del self.held[name]
            self.engine.release(name)
        live = sorted(self.engine._live.by_id)
        if not self.disturbs or not live:
            return
        kind = self.chance.random()
        if kind < 0.04:
            self._cancel(self.chance.choice(live))
        elif kind < 0.07:
            self._drop(self.chance.choice(live))
        if self.chance.random() < 0.01:
            self.engine.check()

    def _cancel(self, name: str) -> None:
        self.happened["cancel"] += 1
        self.ended[name].add(Outcome.CANCELLED)
        self.engine.cancel(name)

    def _drop(self, name: str) -> None:
        self.happened["drop"] += 1
        self.dropped.add(name)
        turn = self.engine.turn(name)
        self.engine.drop(name)
        self.seen.deltas.pop(name, None)
        if self.chance.random() < 0.5:
            again = self.engine._live.by_id[name].request
            params = dataclasses.replace(again.params, seed=again.noise_seed)
            copy = dataclasses.replace(again, params=params)
            self.later.append((self.now + self.chance.randint(1, 3), copy, turn))

    # ── the outputs ───────────────────────────────────────────────────────────────────────────────────────────────

    def _undisturbed(self) -> dict[str, Finished]:
        """The outputs of the same requests on an engine with room for all, without overlap."""
        engine, _ = make_engine(garbage=1, overlap=False, num_blocks=400, max_model_len=LONGEST)
        for one in self.requests.values():
            engine.add(dataclasses.replace(one, deadline=None))
        return {last.request_id: last for output in steps(engine) for last in output.finished}

    def _compare(self, one: Request, last: Finished, whole: Finished) -> None:
        right = self.ended[one.id] | ({Outcome.EXPIRED} if one.deadline is not None else set())
        assert last.outcome in right, f"{one.id} ended as {last.outcome}"
        self.happened[last.outcome.value] += 1
        if last.outcome is Outcome.SUCCEEDED:
            assert last.choices == whole.choices
            assert last.completion_tokens == whole.completion_tokens
            return
        if last.outcome is Outcome.FAILED:
            assert last.fault in (Fault.INTERNAL, Fault.OUT_OF_MEMORY, Fault.NON_FINITE_LOGITS)
        if one.params.stop:  # the end of a text that was cut short may be the beginning of a stop string
            params = dataclasses.replace(one.params, stop=(), seed=one.noise_seed)
            engine, _ = make_engine(overlap=False, num_blocks=400, max_model_len=LONGEST)
            engine.add(dataclasses.replace(one, params=params, deadline=None))
            (whole,) = [last for output in steps(engine) for last in output.finished]
        for mine, all_of_it in zip(last.choices, whole.choices, strict=True):
            check_beginning(mine, all_of_it)

    def _count(self) -> None:
        stats = self.engine.stats()
        self.happened["swap"] += stats.preemptions_swap
        self.happened["recompute"] += stats.preemptions_recompute
        self.happened["prefix hit"] += stats.prefix_hits
        self.happened["fork"] += sum(len(piece.forks) for plan in self.runner.plans for piece in plan.slices)
        in_flight = 0
        for event in self.runner.events:
            launched = event.startswith("launch")
            self.happened["launch"] += launched
            self.happened["overlap"] += launched and in_flight
            in_flight += 1 if launched else -1


def check_beginning(mine: ChoiceResult, whole: ChoiceResult) -> None:
    """Check that an output which was cut short is the beginning of the whole output."""
    count = len(mine.token_ids)
    assert mine.token_ids == whole.token_ids[:count]
    assert whole.text.startswith(mine.text)
    if mine.logprobs is not None and whole.logprobs is not None:
        assert mine.logprobs == whole.logprobs[:count]
    if mine.prompt_logprobs is not None and whole.prompt_logprobs is not None:
        assert mine.prompt_logprobs == whole.prompt_logprobs[: len(mine.prompt_logprobs)]
