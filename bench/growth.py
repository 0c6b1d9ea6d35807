"""Measures how decode steps slow down with running sequences, context length and waiting jobs."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.batch import Batch, Model
from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner

_PROMPT = 64
_RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8000)
_WAITING = (0, 100, 1_000, 10_000, 100_000)
_STEPS = 12
_OUTPUT = 64
"""`max_tokens` of each sequence: the first ones decode while later ones are prefilled."""


@dataclass(frozen=True, slots=True)
class Point:
    """Medians over decode-only steps."""

    x: int
    rate: float
    """Tokens per second."""
    overhead: float
    """Milliseconds of a step outside of the forward pass: plan, arrays, sampling, text, commit."""
    step: float
    """Milliseconds of the whole step."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    axis: str
    points: tuple[Point, ...]


def report(model: str, folder: Path) -> None:
    """Measure the three series, print them and draw each as `growth-<name>.png` in `folder`."""
    for series in _measure(model):
        print(f"{series.axis:>40}   tok/s   step ms   outside the forward ms")
        for p in series.points:
            print(f"{p.x:40,}   {p.rate:5.0f}   {p.step:7.2f}   {p.overhead:.2f}", flush=True)
        draw(series, folder / f"growth-{series.name}.png")


def draw(series: Series, file: Path) -> None:
    """Draw tokens per second (left axis) and milliseconds outside of the forward pass (right axis)."""
    from matplotlib.figure import Figure  # part of the extra `dev`

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    left: Any = figure.subplots()
    right = left.twinx()
    x = [max(p.x, 1) for p in series.points]
    left.plot(x, [p.rate for p in series.points], "o-", color="tab:blue")
    right.plot(x, [p.overhead for p in series.points], "s--", color="tab:red")
    left.set(xscale="log", xlabel=series.axis, ylim=(0, None))
    left.set_ylabel("tokens a second", color="tab:blue")
    right.set_ylabel("ms of a step outside the forward", color="tab:red")
    right.set_ylim(0, max(1.0, 1.2 * max(p.overhead for p in series.points)))
    left.set_xticks(x, [f"{p.x:,}" for p in series.points])
    left.minorticks_off()
    left.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _measure(model: str) -> Iterator[Series]:
    many = Bench(model, max(_RUNNING))
    running = tuple(many.point(count, count=count, prompt=_PROMPT) for count in _RUNNING)
    yield Series("running", f"running sequences (context about {_PROMPT + _STEPS})", running)
    contexts = tuple(many.point(length, count=4, prompt=length) for length in _CONTEXTS)
    yield Series("context", "context of each of 4 running sequences, tokens", contexts)
    few = Bench(model, 64)
    waiting = tuple(few.point(count, count=64, prompt=_PROMPT, waiting=count) for count in _WAITING)
    yield Series("waiting", "waiting jobs beside 64 running sequences", waiting)


class Bench:
    """An engine whose forward pass is timed."""

    def __init__(self, model: str, max_num_seqs: int, context: int = max(_CONTEXTS)) -> None:
        config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, prefix_caching=False)
        blocks = max(4 * (context + _OUTPUT), max_num_seqs * (_PROMPT + _OUTPUT)) // config.block_size
        self.engine, _ = build_engine(ModelOptions(model), config, CacheOptions(num_blocks=blocks + 2 * max_num_seqs))
        runner = self.engine.runner
        if not isinstance(runner, ModelRunner):
            raise TypeError(f"the engine runs on a {type(runner).__name__}")
        self.model = runner.model = _Timed(runner.model)

    def point(self, x: int, *, count: int, prompt: int, waiting: int = 0) -> Point:
        """Measure decode-only steps of `count` sequences after `prompt` tokens each, while `waiting` more wait."""
        source = random.Random(0)
        names = [str(number) for number in range(count + waiting)]
        for name in names:
            self.engine.add(_request(name, [source.randrange(1_000, 40_000) for _ in range(prompt)]))
        self.model.rows = 0
        while self.model.rows != count:
            self.engine.step()
        gc.collect()
        steps, outside = [], []
        for _ in range(_STEPS):
            before, begin = self.model.seconds, time.perf_counter()
            self.engine.step()
            steps.append(time.perf_counter() - begin)
            outside.append(steps[-1] - (self.model.seconds - before))
        for name in names:
            self.engine.drop(name)
        self.engine.step()
        step = statistics.median(steps)
        return Point(x, count / step, statistics.median(outside) * 1e3, step * 1e3)


class _Timed:
    """A model that adds up the time of its forward passes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.seconds = 0.0
        self.rows = 0
        """Number of tokens of the last batch."""

    def forward(self, batch: Batch) -> Tensor:
        begin = time.perf_counter()
        logits = self._model.forward(batch)
        self.seconds += time.perf_counter() - begin
        self.rows = batch.attention.num_rows
        return logits


def _request(name: str, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=_OUTPUT, min_tokens=_OUTPUT, temperature=0.0, ignore_eos=True)
    return Request(id=name, prompt=tuple(prompt), params=params)
