"""Measures the CPU time of the scheduler alone: schedule and commit of a step, without model, text and sampling."""

from __future__ import annotations

import statistics
import time

from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.sampling.text import TextStream
from engine.scheduling.scheduler import Scheduler
from engine.sequence import RequestState, Sequence


def _request(number: int, prompt: int, output: int) -> RequestState:
    ids = [1 + (number * 7919 + i) % 30_000 for i in range(prompt)]
    state = RequestState(Request(str(number), ids, SamplingParams(max_tokens=output)), number, float(number))
    state.sequences = [Sequence(state, 0, TextStream(lambda token, skip: b""))]
    return state


def step_times(running: int, waiting: int, steps: int = 400, block_size: int = 16) -> list[float]:
    """Return the CPU seconds of `steps` decode-only steps of `running` sequences, while `waiting` more wait."""
    config = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=1 << 20,
        max_model_len=1 << 16,
        block_size=block_size,
        num_blocks=running * (64 + steps) // block_size + 2 * running,
    )
    scheduler = Scheduler(config)
    for number in range(running + waiting):
        scheduler.add(_request(number, 32 + number % 16, 1 << 15))
        scheduler.lengths.learn(1)
    times: list[float] = []
    for number in range(steps + 20):
        begin = time.thread_time()
        plan = scheduler.schedule()
        scheduler.moved()
        scheduler.launched(plan)
        scheduler.settled(plan)
        if number >= 20:
            times.append(time.thread_time() - begin)
        for seq in plan.sampling:
            seq.tokens.append(number)
    if len(scheduler.running) != running:
        raise RuntimeError(f"{len(scheduler.running)} sequences run, not {running}")
    return times


def report() -> None:
    """Print a table of step times by the number of running and waiting sequences."""
    print("running  waiting   median µs   p99 µs   µs a sequence   (schedule + commit, decode only, block size 16)")
    for running, waiting in ((16, 0), (64, 0), (256, 0), (512, 0), (256, 10_000)):
        times = sorted(step_times(running, waiting))
        median, p99 = statistics.median(times) * 1e6, times[int(len(times) * 0.99)] * 1e6
        print(f"{running:7}  {waiting:7}   {median:9.0f}   {p99:6.0f}   {median / running:13.2f}")
