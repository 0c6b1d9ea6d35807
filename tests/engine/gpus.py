"""Engines on the pretended GPU, and what they return."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.models.loading import LoadedModel
from engine.outputs import Finished, TokenLogprobs
from engine.request import Request
from tests.engine.stub import expect_idle
from tests.engine.test_gpu import build
from tests.pretend_gpu import Gpu


def engine_on_gpu(path: str, *, overlap: bool, graphs: bool, **config: Any) -> tuple[Engine, LoadedModel]:
    """Build an engine on the pretended GPU that torch sees."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    engine, loaded = build(path, "cuda", overlap=overlap, graphs=graphs, **limits)
    runner = runner_of(engine)
    assert (engine.overlap, bool(runner.graphs.count)) == (overlap, graphs)
    return engine, loaded


def runner_of(engine: Engine) -> DeviceRunner:
    """Return the runner of an engine on a GPU."""
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


@dataclass
class Played:
    """What came of requests."""

    finished: dict[str, Finished] = field(default_factory=dict)
    waits: list[list[str]] = field(default_factory=list)
    """For each step, what the host waited for."""
    replays: int = 0
    """Number of replays of graphs."""

    @property
    def ids(self) -> dict[str, list[tuple[int, ...]]]:
        return {name: [choice.token_ids for choice in done.choices] for name, done in self.finished.items()}

    @property
    def logprobs(self) -> list[float]:
        """All log-probabilities, in the order of the requests' names."""
        found: list[TokenLogprobs] = []
        for _, done in sorted(self.finished.items()):
            for choice in done.choices:
                found += [x for x in (*(choice.logprobs or ()), *(choice.prompt_logprobs or ())) if x is not None]
        return [one.logprob for x in found for one in (x.chosen, *x.top)]


def play(engine: Engine, asked: list[Request], gpu: Gpu | None = None) -> Played:
    """Add the requests, run the engine until it is idle, and note what it waits for."""
    played = Played()
    replays = 0 if gpu is None else gpu.replays
    for one in asked:
        engine.add(one)
    while engine.has_work:
        before = len(gpu.waited) if gpu is not None else 0
        output = engine.step()
        played.finished.update({done.request_id: done for done in output.finished})
        if gpu is not None:
            played.waits.append([wait.what for wait in gpu.waited[before:]])
    played.replays = 0 if gpu is None else gpu.replays - replays
    expect_idle(engine)
    return played


def expect_one_event_a_step(played: Played) -> None:
    """Check that the host waited for one event in each step that sampled, and for nothing else."""
    assert set(map(tuple, played.waits)) <= {(), ("event",)}, (
        [*played.finished],
        Counter(map(tuple, played.waits)),
    )
