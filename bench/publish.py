"""Measures the cost of publishing: a whole worker over a real Redis, with an engine that computes nothing.

Of two equal runs, one publishes no tokens. The difference in the process' CPU time, divided by the number of token
events, is the cost of publishing one event; the difference in the gaps between steps is the delay of the engine.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine.outputs import StepOutput
from tests.support import eventually, running_redis
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Inside, Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.loading import settle_heap

BUDGET_US = 8.0
BUDGET_GAP_MS = 1.0


class Paced(FakeEngine):
    """An engine that emits a token per step for each job, at a fixed rate."""

    def __init__(self, streams: int, rate: float, publish: bool) -> None:
        super().__init__(max_num_seqs=streams, capacity=1 << 30)
        self.period = 1 / rate
        self.publish = publish
        self.begun: list[float] = []
        """Time at which each step could begin, `time.perf_counter()`."""
        self._next = time.perf_counter()

    def step(self) -> StepOutput:
        self._next = max(self._next + self.period, time.perf_counter() - self.period)
        time.sleep(max(0.0, self._next - time.perf_counter()))
        self.begun.append(time.perf_counter())
        output = super().step()
        self.computed.clear()
        for live in self._live.values():
            del live.tokens[0][:-1]  # keeping all tokens of a long run would cost more than publishing
        return output if self.publish else StepOutput((), output.finished)


@dataclass(frozen=True)
class Measured:
    """Measurements of one run."""

    cpu: float
    """CPU seconds of the process in the measured window."""
    events: int
    gaps: list[float]
    """Seconds between steps, sorted."""
    backlog: int

    def gap_ms(self, share: float) -> float:
        return self.gaps[min(len(self.gaps) - 1, int(share * len(self.gaps)))] * 1000


def run(url: str, streams: int, rate: float, seconds: float, publish: bool) -> Measured:
    """Start server, worker and jobs, wait until all run, and measure for `seconds`."""
    client = command_client(url)
    queue = Queue(client, url, Keys(f"publish-{int(publish)}-{time.time_ns()}"))
    engine = Paced(streams, rate, publish)
    worker = Inside(queue, engine, max_waiting=str(streams), max_num_seqs=str(streams), drain_seconds="0")
    for number in range(streams):
        queue.add({"prompt": f"{number}", "max_tokens": 1 << 20})
    worker.start()
    eventually(lambda: engine.stats().running == streams, 60)
    time.sleep(1.0)
    first, cpu = len(engine.begun), time.process_time()
    before = worker.worker.telemetry.generation_tokens
    time.sleep(seconds)
    cpu, last = time.process_time() - cpu, len(engine.begun)
    events = worker.worker.telemetry.generation_tokens - before
    begun = engine.begun[first:last]
    backlog = worker.worker.telemetry.live.backlog()
    worker.stop()
    client.close()
    return Measured(cpu, events, sorted(b - a for a, b in itertools.pairwise(begun)), backlog)


def report(streams: int, rate: float, seconds: float) -> bool:
    """Run with and without publishing, and print; return whether CPU time and step delay are within their limits."""
    settle_heap()
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder)) as server:
        quiet = run(server.url, streams, rate, seconds, publish=False)
        loud = run(server.url, streams, rate, seconds, publish=True)
    cost = (loud.cpu - quiet.cpu) / max(1, loud.events) * 1e6
    grown = loud.gap_ms(0.99) - quiet.gap_ms(0.99)
    print(
        f"{streams} streams at {rate:g} steps/s for {seconds:g} s: {loud.events} token events, backlog {loud.backlog}"
    )
    print(f"worker CPU a token event: {cost:.2f} us (at most {BUDGET_US:g})")
    for name, one in (("without", quiet), ("with", loud)):
        print(f"gap between steps {name}: p50 {one.gap_ms(0.5):.2f} ms, p99 {one.gap_ms(0.99):.2f} ms")
    print(f"p99 grows by {grown:.2f} ms (at most {BUDGET_GAP_MS:g})")
    return cost <= BUDGET_US and grown <= BUDGET_GAP_MS
