"""Cancel against finish in the orders in which threads may run: the parts of a worker are called one by one.

The engine is the real one over a stub model, so that blocks are counted; Redis is a real protocol peer.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from engine.engine import Engine
from tests.engine.stub import expect_idle, make_engine
from tests.worker.harness import Queue, Refusal
from tokenmill.protocol.scripts import Scripts
from worker.cli import settings_from
from worker.inbox import Inbox
from worker.jobs.held import Held
from worker.jobs.logprobs import LogprobsWriter
from worker.jobs.results import Results
from worker.jobs.translate import Translator
from worker.loop import EngineLoop
from worker.ops.links import Contact, RedisClock
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Mailbox
from worker.queue.canceller import Canceller
from worker.queue.gate import Gate
from worker.queue.intake import Intake
from worker.queue.keeper import Keeper
from worker.queue.outbox import Outbox
from worker.queue.publisher import Publisher
from worker.queue.quarantine import Quarantine
from worker.queue.sweeper import Sweeper

SEEDS = 1000
FOR_EVER = 1e18
"""A lease end in the far future."""


@pytest.fixture
def seeds(queue: Queue, request: pytest.FixtureRequest) -> int:
    """Return the number of seeds: all on a real server, a tenth on fakeredis, which is several times slower."""
    return SEEDS if "real" in request.node.callspec.id else SEEDS // 10


class Shaky(Scripts):
    """Breaks the connection now and then, before a command, or after it: then Redis has done it, and no reply came."""

    odds = 0.0
    rng = random.Random(0)

    def _shaken(self, call: Callable[[], Any]) -> Any:
        if self.rng.random() < self.odds:
            if self.rng.random() < 0.5:
                call()
            raise redis.ConnectionError("shaken")
        return call()

    def read(self, count: int) -> Any:
        return self._shaken(lambda: Scripts.read(self, count))

    def start_all(self, starts: Any) -> Any:
        return self._shaken(lambda: Scripts.start_all(self, starts))

    def publish(self, batch: Any) -> Any:
        return self._shaken(lambda: Scripts.publish(self, batch))

    def end_all(self, ends: Any) -> Any:
        return self._shaken(lambda: Scripts.end_all(self, ends))

    def renew(self, refs: Any) -> Any:
        return self._shaken(lambda: Scripts.renew(self, refs))


class Parts:
    """A worker without threads: each call is one turn of a thread."""

    def __init__(self, queue: Queue, engine: Engine, name: str = "w") -> None:
        settings = settings_from(
            {"model": "stub", "redis": queue.url, "max_waiting": "2", "block_ms": "10", "max_attempts": "1000"}
        )
        self.queue, self.engine = queue, engine
        self.scripts = Shaky(queue.client, queue.keys, name)
        self.scripts.ensure_groups()
        self.held, self.stop, contact, clock = Held(), threading.Event(), Contact(), RedisClock()
        inbox, outbox, telemetry = Inbox(), Outbox(), Telemetry()
        self.loop = EngineLoop(engine, self.stop, inbox, outbox, telemetry)  # type: ignore[arg-type]
        model = SimpleNamespace(name="stub", tokenizer=None, generation=None)
        translator = Translator(settings, engine, model, Refusal)
        contact.ok()
        quarantine = Quarantine(self.scripts, self.held, 30)
        self.thief = Sweeper(self.scripts, self.held, contact, 0, 0, quarantine)
        sweeper = Sweeper(self.scripts, self.held, contact, 30, 15, quarantine)
        engine.gate = self.gate = Gate(
            self.scripts, self.held, self.loop, inbox, outbox, telemetry, contact, quarantine, grace_seconds=0
        )
        self.intake = Intake(
            settings, self.scripts, queue.client, self.held, inbox, outbox, telemetry, translator, sweeper, quarantine,
            clock, contact, Mailbox(), self.stop,
        )  # fmt: skip
        self.keeper = Keeper(
            settings, self.scripts, self.held, self.loop, inbox, telemetry, clock, contact, self.stop, dict
        )
        self.keeper.sync_clock()
        self.canceller = Canceller(queue.client, queue.keys, self.held, inbox, contact, self.stop, 0.05)
        results = Results("stub", name, clock, LogprobsWriter(lambda token: b""))
        self.publisher = Publisher(
            self.scripts, results, self.held, inbox, outbox, telemetry, contact, self.stop, lambda job, error: None
        )

    def read(self) -> None:
        room = self.held.wait_for_place(2, 0)
        if room:
            self.intake._accept(self.scripts.read(room) or [], FOR_EVER)

    def steal(self) -> None:
        """Take over all pending entries, as a sweep does after a lease without a sign of life."""
        room = self.held.wait_for_place(2, 0)
        if room:
            self.intake._accept(self.thief.sweep(room), FOR_EVER)

    def turn(self) -> None:
        """Make one turn of the engine's thread; STARTs wait for `gate.starter.turn`."""
        self.loop.turn(wait=False)
        self.engine.check_integrity()

    def step(self) -> None:
        """Make a step whose STARTs return in time."""
        self.turn()
        if self.gate.starter.turn():
            self.turn()

    def collect(self) -> None:
        self.publisher.collect(block=False)

    def publish(self) -> None:
        self.collect()
        self.publisher.flush()


def play(parts: Parts, rng: random.Random, jobs: list[str]) -> None:
    """Call turns in a random order, with a cancel now and then, until no job is left."""
    queue = parts.queue
    turns: list[Callable[[], Any]] = [parts.read, parts.turn, parts.turn, parts.publish, parts.canceller.poll]
    turns += [parts.gate.starter.turn]
    turns += [parts.collect, parts.keeper.renew]
    cancels = {job: rng.randrange(40) for job in jobs if rng.random() < 0.7}
    for turn in range(10_000):
        for job in [job for job, at in cancels.items() if at == turn]:
            queue.cancel(job, "seeded")
        rng.choice(turns)()
        if turn > 40 and turn % 8 == 0 and queue.depth() == 0:
            break
    else:
        raise AssertionError("jobs are left after 10,000 turns")
    for _ in range(3):
        parts.publish()
        parts.step()


@pytest.mark.timeout(600)
def test_a_cancel_at_any_moment_leaves_one_ending_no_later_token_and_all_blocks_free(queue: Queue, seeds: int) -> None:
    engine, _ = make_engine(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=8)
    parts = Parts(queue, engine)
    seen: dict[str, int] = {}
    for seed in range(seeds):
        rng = random.Random(seed)
        jobs = []
        for _ in range(rng.randint(1, 3)):
            body = {
                "prompt": [rng.randrange(1, 60) for _ in range(rng.randint(1, 20))],
                "max_tokens": rng.randint(1, 8),
            }
            body |= {"ignore_eos": True, "n": rng.choice([1, 1, 2])}
            jobs.append(queue.add(body, rng.choice(["high", "normal", "low"])))
        play(parts, rng, jobs)
        for job in jobs:
            late = queue.result(job, 0)["status"] == "succeeded"
            if late:  # a cancel after the finish changes nothing, and its key is its sender's to expire
                queue.client.delete(queue.keys.cancel(job))
            result = queue.check_ending(job)
            assert result["status"] in ("succeeded", "cancelled"), (seed, result)
            assert (result.get("cancel_reason") == "seeded") == (not late)
            seen[result["status"]] = seen.get(result["status"], 0) + 1
        assert len(parts.held) == 0, seed
        assert (queue.depth(), queue.pending()) == (0, 0), seed
        expect_idle(engine)
        assert parts.publisher._pending == {}
        assert parts.publisher._finals == {}
    assert min(seen["succeeded"], seen["cancelled"]) > seeds // 10, seen


def attempt(turn: Callable[[], Any]) -> None:
    """Make a turn, and ignore a broken connection, as the thread would."""
    try:
        turn()
    except redis.ConnectionError:
        return


@pytest.mark.timeout(600)
def test_with_lost_replies_and_takeovers_each_id_still_gets_one_right_result(
    queue: Queue, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "worker.queue.gate.RETRY_SECONDS", 0.002
    )  # turns take no time here, so pauses would take them all
    pair = [Parts(queue, make_engine(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=8)[0], n) for n in "ab"]
    for seed in range(seeds // 4):
        rng = Shaky.rng = random.Random(seed)
        Shaky.odds = 0.15
        body = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
        jobs = [queue.add({"prompt": [rng.randrange(1, 60) for _ in range(9)], **body}) for _ in range(3)]
        for turn in range(10_000):
            parts = rng.choice(pair)
            turns = [parts.read, parts.turn, parts.turn, parts.turn, parts.publish, parts.publish, parts.keeper.renew]
            turns += [parts.gate.starter.turn]
            attempt(rng.choice(turns) if rng.random() < 0.97 else parts.steal)
            if turn % 8 == 0 and queue.depth() == 0:
                break
        else:
            raise AssertionError(f"seed {seed}: jobs are left after 10,000 turns")
        Shaky.odds = 0.0
        for parts in pair:
            # What came to its end elsewhere is reported lost, and dropped.
            parts.loop._later_at = 0.0
            for turn_ in (parts.keeper.renew, parts.publish, parts.step, parts.publish, parts.step, parts.publish):
                turn_()
            assert len(parts.held) == 0, (seed, parts.held.all())
            expect_idle(parts.engine)
            assert parts.publisher._pending == {}
        for job in jobs:
            assert queue.check_ending(job)["status"] == "succeeded", seed
        assert (queue.depth(), queue.pending()) == (0, 0), seed


def test_a_stream_that_vanishes_is_written_again_under_a_new_fence(queue: Queue) -> None:
    engine, _ = make_engine()
    parts = Parts(queue, engine)
    job = queue.add({"prompt": [1, 2, 3], "max_tokens": 12, "ignore_eos": True, "temperature": 0})
    parts.read()
    for vanish in (False, True, False, True):
        for _ in range(2):
            parts.step()
            parts.publish()
        if vanish:
            queue.client.delete(queue.keys.out(job))
    while parts.engine.has_work:
        parts.step()
    for _ in range(3):
        parts.publish()
    assert queue.check_ending(job)["usage"]["completion_tokens"] == 12


def test_past_its_own_lease_end_nothing_is_published_until_it_is_renewed(queue: Queue) -> None:
    engine, _ = make_engine()
    parts = Parts(queue, engine)
    job = queue.add({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})
    parts.read()
    parts.step()
    parts.held.all()[0].lease_until = 0.0
    parts.step()
    parts.publish()
    assert [fields["type"] for _, fields in queue.events(job)] == ["start"]
    while parts.engine.has_work:
        parts.step()
    parts.publish()
    assert queue.client.get(queue.keys.result(job)) is None
    parts.keeper.renew()
    parts.publish()
    assert queue.check_ending(job)["status"] == "succeeded"


def test_a_worker_that_lost_a_job_overwrites_nothing_of_the_next_worker(queue: Queue) -> None:
    first = Parts(queue, make_engine()[0], "first")
    second = Parts(queue, make_engine()[0], "second")
    job = queue.add({"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "temperature": 0})
    first.read()
    first.step()
    first.publish()
    second.steal()
    second.step()
    before = queue.events(job)
    first.step()
    first.publish()
    assert queue.events(job) == before
    assert len(first.held) == 0
    first.step()
    expect_idle(first.engine)
    while second.engine.has_work:
        second.step()
        second.publish()
    second.publish()
    result = queue.check_ending(job)
    assert (result["worker"], result["attempt"]) == ("second", 2)
