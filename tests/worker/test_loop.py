"""The engine's thread: messages in, outputs out, no request lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
import structlog

from engine.outputs import Finished, Outcome, StepOutput
from engine.request import Request, SamplingParams
from tests.engine.stub import expect_idle, make_engine
from tests.support import eventually
from tests.worker.fakes import FakeEngine
from worker.inbox import Add, Cancel, Do, Drop, Inbox
from worker.jobs.results import Answer
from worker.loop import EngineLoop
from worker.ops.telemetry import Telemetry
from worker.queue.outbox import BACKLOG, Outbox


def request(handle: str, tokens: int = 3) -> Request:
    return Request(handle, [1, 2], SamplingParams(max_tokens=tokens))


class Running:
    def __init__(self, **options: float) -> None:
        self.engine = FakeEngine(**options)  # type: ignore[arg-type]
        self.stop = threading.Event()
        self.inbox, self.outbox, self.telemetry = Inbox(), Outbox(), Telemetry()
        self.loop = EngineLoop(self.engine, self.stop, self.inbox, self.outbox, self.telemetry)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def finished(self, timeout: float = 5) -> Finished:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            output = self.outbox.get(timeout=timeout)[1]
            if isinstance(output, StepOutput) and output.finished:
                return output.finished[0]
        raise AssertionError("nothing finished")

    def close(self) -> None:
        self.stop.set()
        self.loop.wake()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


def test_an_added_request_comes_out_finished(running: Running) -> None:
    running.inbox.post(Add(request("a")))
    assert running.finished().outcome is Outcome.SUCCEEDED


def test_generated_tokens_are_counted_while_the_publisher_takes_nothing(running: Running) -> None:
    """While Redis is silent, the metric shows that decoding continues."""
    running.inbox.post(Add(request("a", tokens=7)))
    eventually(lambda: running.telemetry.generation_tokens == 7)
    assert running.outbox.qsize() > 0


def test_an_idle_engine_does_not_spin(running: Running) -> None:
    running.inbox.post(Add(request("a")))
    running.finished()
    eventually(lambda: not running.engine.has_work)
    steps = running.engine.steps
    running.stop.wait(0.2)
    assert running.engine.steps <= steps + 1


def test_a_request_that_the_engine_refuses_is_answered(running: Running) -> None:
    running.engine.step_seconds = 0.05
    running.inbox.post(Add(request("a", 100)))
    running.inbox.post(Add(request("a")))
    outputs = [running.outbox.get(timeout=5)[1] for _ in range(2)]
    assert any(isinstance(o, Answer) and o.error is not None and "runs already" in o.error.message for o in outputs)
    running.inbox.post(Drop("a"))


def test_a_cancelled_request_finishes_and_a_dropped_request_gives_no_output(running: Running) -> None:
    running.engine.step_seconds = 0.01
    running.inbox.post(Add(request("a", 200)))
    running.inbox.post(Add(request("b", 200)))
    running.inbox.post(Drop("b"))
    running.inbox.post(Cancel("a"))
    ended = running.finished()
    assert (ended.request_id, ended.outcome) == ("a", Outcome.CANCELLED)
    eventually(lambda: not running.engine.has_work)


def test_a_deferred_request_is_added_again_and_can_be_cancelled_meanwhile(running: Running) -> None:
    def gate(new: list[Request]) -> None:
        for one in new:
            if one.params.max_tokens != 7:
                running.engine.drop(one.id)
                again = dataclasses.replace(one, params=dataclasses.replace(one.params, max_tokens=7))
                running.loop.defer(again, 0.05 if one.id == "soon" else 3600)

    running.engine.gate = gate
    running.inbox.post(Add(request("soon")))
    assert running.finished().completion_tokens == 7
    running.inbox.post(Add(request("late")))
    eventually(lambda: not running.engine.has_work and running.loop._later)
    running.inbox.post(Cancel("late"))
    assert running.finished().outcome is Outcome.CANCELLED


def test_an_engine_whose_outputs_are_not_taken_goes_on_in_bounded_memory() -> None:
    running = Running(capacity=10 * BACKLOG)
    running.inbox.post(Add(request("a", 4 * BACKLOG)))
    eventually(lambda: running.engine.steps and not running.engine.has_work)
    handed_over = threading.Event()
    running.inbox.post(Do(handed_over.set))
    assert handed_over.wait(10)  # the next turn has begun, so the outputs of the last step are in the outbox
    outputs = []
    while not running.outbox.empty():
        outputs.append(running.outbox.get()[1])
    assert len(outputs) <= BACKLOG
    deltas = [delta for output in outputs if isinstance(output, StepOutput) for delta in output.deltas]
    (last,) = [last for output in outputs if isinstance(output, StepOutput) for last in output.finished]
    assert "".join(delta.text for delta in deltas) == last.choices[0].text
    assert tuple(i for delta in deltas for i in delta.token_ids) == last.choices[0].token_ids
    running.close()


def test_while_all_requests_are_on_hold_the_engine_sleeps_and_still_checks_deadlines() -> None:
    running = Running()
    held: list[str] = []

    def gate(new: list[Request]) -> None:
        for one in new:
            held.append(one.id)
            running.engine.hold(one.id)

    running.engine.gate = gate
    running.inbox.post(Add(dataclasses.replace(request("a"), deadline=time.monotonic() + 0.3)))
    eventually(lambda: held)
    steps = running.engine.steps
    assert running.finished().outcome is Outcome.EXPIRED
    assert running.engine.steps - steps < 30
    running.inbox.post(Add(request("b")))
    eventually(lambda: "b" in held)
    running.inbox.post(Do(lambda: running.engine.release("b")))  # type: ignore[arg-type, return-value]
    assert running.finished().outcome is Outcome.SUCCEEDED
    running.close()


@pytest.mark.parametrize("end", [Cancel, Drop])
def test_a_request_can_be_ended_in_the_turn_in_which_its_start_failed(end: type[Cancel | Drop]) -> None:
    """The real engine frees a dropped request in the next step, so until then it cannot be added again."""
    engine, _ = make_engine()
    engine.gate = lambda new: [engine.hold(one.id) for one in new]  # type: ignore[assignment]
    inbox, outbox = Inbox(), Outbox()
    loop = EngineLoop(engine, threading.Event(), inbox, outbox, Telemetry())
    one = request("a")

    def put_back() -> None:
        assert engine.release("a")
        engine.drop("a")
        loop.defer(one, 3600)

    inbox.post(Add(one))
    loop.turn(wait=False)
    for message in (Do(put_back), end("a"), end("a")):
        inbox.post(message)
    loop.turn(wait=False)
    assert outbox.empty()
    inbox.post(end("a"))
    loop.turn(wait=False)
    ended = [] if outbox.empty() else [last.outcome for last in outbox.get()[1].finished]  # type: ignore[union-attr]
    assert ended == ([Outcome.CANCELLED] if end is Cancel else [])
    assert loop._later == []
    expect_idle(engine)


def test_a_leak_is_reported_once_and_the_loop_goes_on() -> None:
    engine = FakeEngine()
    engine.check_idle = lambda: "3 of 64 device blocks are held by no sequence and not free"  # type: ignore[method-assign]
    inbox = Inbox()
    loop = EngineLoop(engine, threading.Event(), inbox, Outbox(), Telemetry())
    with structlog.testing.capture_logs() as logs:
        for handle in ("a", "b"):
            inbox.post(Add(request(handle)))
            loop.turn(wait=False)
            while engine.has_work:
                loop.turn(wait=False)
    assert [(line["event"], line["log_level"]) for line in logs] == [("blocks_leaked", "error")]
