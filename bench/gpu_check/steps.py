"""Row 10: decode steps of whole models, eager, with graphs, and with graphs and overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from bench.gpu_check import models
from bench.gpu_check.models import SHAPES, Shape
from bench.gpu_check.parity import DEMO, demo_path
from bench.gpu_check.table import Line, Setup, Skip, check
from bench.gpu_check.timing import copy_bandwidth

if TYPE_CHECKING:
    from engine.engine import Engine

MODES = {"eager": (False, False), "graphs": (True, False), "overlap": (True, True)}
"""Name → whether steps may use graphs, and whether a step is launched before the one before it is settled."""
_PROMPT, _WARM, _STEPS, _PROFILED = 256, 4, 24, 6


def demo(setup: Setup) -> Iterator[Line]:
    """Yield the steps of the demo model, or of a random model of its shape."""
    try:
        demo_path()
        model: Any = DEMO
    except Skip as reason:
        yield Line("demo model", f"{reason}: a random model of its shape", "skipped")
        model = None
    yield from _steps(setup, SHAPES[setup.pick("135M", "tiny")], None if setup.reduced else model)


def one(setup: Setup) -> Iterator[Line]:
    """Yield the steps of a random model of 1B."""
    yield from _steps(setup, SHAPES[setup.pick("1B", "tiny")])


def eight(setup: Setup) -> Iterator[Line]:
    """Yield the steps of a random model of 8B."""
    yield from _steps(setup, SHAPES[setup.pick("8B", "tiny")])


def _steps(setup: Setup, shape: Shape, model: str | None = None) -> Iterator[Line]:
    copy = copy_bandwidth(setup)
    begun = time.perf_counter()
    batches = setup.pick((1, 8, 32, 128), (3,))
    source = model or models.Random(shape.name)
    try:
        limits = {"pool": None, "checked": not setup.reduced, "max_num_seqs": max(batches)}
        engine, loaded = models.build(setup, source, attention="triton", **limits)
    except Skip as reason:
        yield Line(f"{shape.name} start", str(reason), "skipped")
        return
    detail = f"{loaded.num_parameters / 1e6:.0f} M parameters, ready after {time.perf_counter() - begun:.1f} s"
    yield Line(f"{shape.name} start", f"{detail}; {graphs_of(engine)}", "")
    for count in batches:
        yield check(f"{shape.name} x {count}", partial(_batch, setup, engine, shape, count, copy))


def graphs_of(engine: Engine) -> str:
    """Return the number of graphs, or why there are none."""
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    return f"{graphs.count} graphs" if graphs.reason is None else f"no graphs: {graphs.reason}"


def set_mode(engine: Engine, mode: str) -> None:
    """Let the next steps run eager, with graphs, or with graphs and overlap."""
    engine.runner.graphs.active, engine.overlap = MODES[mode]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Measured:
    """Steps of one mode."""

    step: float
    """Seconds from one step to the next."""
    host: float
    """Seconds of a step in which the host does not wait for the device."""
    idle: float | None
    """Share of the time in which the device computes nothing; None: unknown."""

    def __str__(self) -> str:
        idle = "?" if self.idle is None else f"{self.idle:.1%}"
        return f"{self.step * 1e3:.2f} ms, host {self.host * 1e3:.2f}, idle {idle}"


def _batch(setup: Setup, engine: Engine, shape: Shape, count: int, copy: float) -> Line:
    """Measure decode steps of `count` sequences in each mode."""
    steps, warm, profiled = setup.pick((_STEPS, _WARM, _PROFILED), (2, 1, 1))
    length = setup.pick(_PROMPT, 8)
    every = len(MODES) * (steps + warm + profiled) + 3
    for i, prompt in enumerate(models.prompts(count, length)):
        engine.add(models.greedy(f"{count}-{i}", prompt, every + setup.pick(100, 20)))
    set_mode(engine, "eager")
    while engine.stats().waiting:
        engine.step()
    measured: dict[str, Measured] = {}
    context = 0.0
    for mode in MODES:
        set_mode(engine, mode)
        measured[mode], context = _measure(setup, engine, warm, steps, profiled), context + steps + warm + profiled
    for i in range(count):
        engine.cancel(f"{count}-{i}")
    while engine.has_work:
        engine.step()
    best = measured["overlap"]
    floor = (2 * shape.step_weights + count * (length + context) * shape.token_bytes) / copy
    values = {f"step {mode} {shape.name} {count}": x.step for mode, x in measured.items()}
    values |= {f"host {mode} {shape.name} {count}": x.host for mode, x in measured.items()}
    values |= {f"rate {shape.name} {count}": count / best.step}
    if count <= 32:  # above, arithmetic may take longer than the memory
        values[f"floor {shape.name} {count}"] = floor / best.step
    if best.idle is not None:
        values[f"idle {shape.name} {count}"] = best.idle
    said = "; ".join(f"{mode} {x}" for mode, x in measured.items())
    rate = f"{count / best.step:.0f} tok/s, {floor / best.step:.0%} of the floor of {floor * 1e3:.2f} ms"
    return Line(f"{shape.name} x {count}", f"{said}; {rate}", "", values)


def _measure(setup: Setup, engine: Engine, warm: int, steps: int, profiled: int) -> Measured:
    from kernels.device import Download

    waited = 0.0
    wait = Download.wait

    def timed(self: Download) -> Any:
        nonlocal waited
        begun = time.perf_counter()
        try:
            return wait(self)
        finally:
            waited += time.perf_counter() - begun

    for _ in range(warm):
        engine.step()
    torch.cuda.synchronize()
    with mock.patch.object(Download, "wait", timed):
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        host = time.perf_counter() - begun - waited
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    idle = None if setup.reduced else _idle(lambda: [engine.step() for _ in range(profiled)])
    return Measured(seconds / steps, host / steps, idle)


def _idle(run: Callable[[], Any]) -> float | None:
    """Return the idle share of the device while `run` runs, as the profiler sees it; None if it sees nothing."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == torch._C._autograd.DeviceType.CUDA
    ]
    return idle_share(spans)


def idle_share(spans: list[tuple[int, int]]) -> float | None:
    """Return the share of the time from the first start to the last end that no span covers; None without spans."""
    if not spans:
        return None
    spans = sorted(spans)
    first, last = spans[0][0], max(end for _, end in spans)
    busy, until = 0, first
    for start, end in spans:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / max(1, last - first)
