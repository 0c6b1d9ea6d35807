"""Rows 5 to 8: graphs against eager steps, overlap against none, waits of the host, and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_check import models
from bench.gpu_check.models import SHAPES
from bench.gpu_check.steps import graphs_of, set_mode
from bench.gpu_check.table import Line, Setup, check
from bench.gpu_check.waits import count_waits

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.models.loading import LoadedModel
    from engine.request import Request

_POISON = 1 << 30
"""Index of a block, a row or an id that does not exist."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 7},
    "filters": {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.9,
        "seed": 9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.1,
    },
    "bias, min_tokens": {"logit_bias": ((11, 4.0), (12, -3.0)), "min_tokens": 4, "stop_token_ids": frozenset({11})},
    "choices": {"temperature": 0.7, "seed": 10, "n": 3},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}
"""Kinds of requests → sampling parameters."""


def _engine(setup: Setup, dtype: torch.dtype, **limits: Any) -> tuple[Engine, LoadedModel]:
    model = models.Random(setup.pick("135M", "tiny"), dtype)
    return models.build(setup, model, attention="triton", **limits)


def start(setup: Setup) -> Iterator[Line]:
    """Row 3c: yield whether the worker's own check at start found every kernel, the graphs and overlap right."""
    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "bfloat16": (torch.bfloat16, {}),
        "bfloat16, batch-invariant": (torch.bfloat16, {"batch_invariant": True}),
        "bfloat16, fp8": (torch.bfloat16, {"quantize": "fp8"}),
        "bfloat16, int8": (torch.bfloat16, {"quantize": "int8"}),
        "float32": (torch.float32, {}),
        "float16": (torch.float16, {}),
    }
    for name in setup.pick(tuple(kinds), ("float32",)):
        yield check(f"check at start {name}", partial(_start, setup, *kinds[name]))


def _start(setup: Setup, dtype: torch.dtype, precision: dict[str, Any]) -> str:
    model = models.Random(setup.pick("small", "tiny"), dtype, **precision)
    engine, loaded = models.build(setup, model, attention="triton", max_num_seqs=setup.pick(32, 2), checked=True)
    if precision.get("batch_invariant") and not loaded.batch_invariant:
        raise ValueError("the worker does not report batch_invariant")
    fallbacks = loaded.serving.fallbacks
    if fallbacks:
        raise ValueError("; ".join(f"{part} fell back: {reason}" for part, reason in fallbacks.items()))
    return f"no fallback, {graphs_of(engine)}"


# ── graphs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def graphs(setup: Setup) -> Iterator[Line]:
    """Row 5: yield for each number of sequences whether graphs give the logits of eager steps, bit by bit."""
    counts = setup.pick((1, 2, 3, 17, 128), (1, 3))
    for dtype in setup.pick((torch.bfloat16, torch.float32), (torch.float32,)):
        engine, _ = _engine(setup, dtype, max_num_seqs=max(counts))
        for count in counts:
            name = str(dtype).removeprefix("torch.")
            yield check(f"graph = eager, {count} sequences, {name}", partial(_same, setup, engine, count))


def _same(setup: Setup, engine: Engine, count: int) -> str:
    length = setup.pick(100, 6)
    found = {}
    for mode in ("eager", "graphs"):
        set_mode(engine, mode)
        poison(engine)
        with _logits(engine) as found[mode], _replays(engine) as replays:
            prompts = [prompt[: length - i % 5] for i, prompt in enumerate(models.prompts(count, length))]
            models.run(engine, [models.greedy(f"{mode}{count}-{i}", p, 6) for i, p in enumerate(prompts)])
    if not replays:
        raise ValueError(f"no step ran as a graph: {graphs_of(engine)}")
    pairs = list(zip(found["eager"], found["graphs"], strict=True))
    differ = sum(int((a != b).sum()) for a, b in pairs)
    total = sum(a.numel() for a, _ in pairs)
    if differ or any(bool(a.isnan().any()) for a, _ in pairs):
        raise ValueError(f"{differ} of {total} logits differ")
    return f"yes, {total} logits of {len(pairs)} steps, {len(replays)} of them replayed"


@contextlib.contextmanager
def _logits(engine: Engine) -> Iterator[list[Tensor]]:
    """Return a list that gets the logits of every step, as tensors of the host."""
    found: list[Tensor] = []
    sampler = engine.runner.sampler  # type: ignore[attr-defined]
    sample: Callable[..., Any] = sampler.sample

    def kept(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(logits.cpu())
        return sample(logits, *args, **kwargs)

    with mock.patch.object(sampler, "sample", kept):
        yield found


@contextlib.contextmanager
def _replays(engine: Engine) -> Iterator[list[int]]:
    """Return a list that gets the number of rows of every step that runs as a graph."""
    found: list[int] = []
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    find = graphs.find

    def noted(rows: int, longest: int) -> Any:
        graph = find(rows, longest)
        if graph is not None:
            found.append(rows)
        return graph

    with mock.patch.object(graphs, "find", noted):
        yield found


@torch.inference_mode()
def poison(engine: Engine) -> None:
    """Fill all that a step must not read, of an engine without requests: pool, block tables, staging and outputs."""
    runner: Any = engine.runner
    runner.pool.fill_(0xFF)
    runner.staging.buffer.fill_(_POISON)
    runner._tables.fill_(_POISON)
    runner.block_tables.forget()
    for graph in runner.graphs._graphs.values():
        graph.logits.fill_(torch.nan)


# ── overlap ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def overlap(setup: Setup) -> Iterator[Line]:
    """Row 6: yield whether requests of every kind get the same ids with one step in flight as without."""
    engine, _ = _engine(setup, torch.float32, max_num_seqs=setup.pick(32, 12))
    yield check("ids with overlap = without", partial(_overlap, setup, engine))


def crowd(setup: Setup) -> list[Request]:
    """Return requests of every kind; their prompts and the lengths of their texts differ."""
    repeats, length, tokens = setup.pick((6, 300, 40), (1, 9, 4))
    kinds = [*KINDS.items()] * repeats
    prompts = models.prompts(len(kinds), length)
    return [
        models.greedy(f"{kind} {i}", prompts[i][: length - 7 * i % length], tokens + i % 3, **params)
        for i, (kind, params) in enumerate(kinds)
    ]


def _overlap(setup: Setup, engine: Engine) -> str:
    found = {}
    for mode in ("graphs", "overlap"):
        set_mode(engine, mode)
        found[mode], _ = models.run(engine, crowd(setup))
    wrong = [name for name, ids in found["graphs"].items() if found["overlap"][name] != ids]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(found['graphs'])} requests get other ids: {', '.join(wrong[:5])}")
    count = sum(len(choice) for choices in found["graphs"].values() for choice in choices)
    return f"yes, {count} ids of {len(found['graphs'])} requests"


# ── waits and memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def waits(setup: Setup) -> Iterator[Line]:
    """Row 7: yield how often a decode step waits for the device, per kind of request."""
    engine, _ = _engine(setup, setup.pick(torch.bfloat16, torch.float32), max_num_seqs=16)
    set_mode(engine, "overlap")
    for kind in KINDS:
        yield check(f"waits, {kind}", partial(_waits, setup, engine, kind))


def _waits(setup: Setup, engine: Engine, kind: str) -> str:
    tokens = setup.pick(20, 6)
    prompts = models.prompts(setup.pick(8, 2), setup.pick(50, 5))
    for i, prompt in enumerate(prompts):
        engine.add(models.greedy(f"{kind} {i}", prompt, tokens, **KINDS[kind]))
    for _ in range(3):  # prefill, forks of choices, the first decode
        engine.step()
    most: dict[str, int] = {}
    steps = 0
    while engine.has_work:
        with count_waits(setup) as found:
            engine.step()
        steps += 1
        for what, count in found.items():
            most[what] = max(most.get(what, 0), count)
    others = {what: count for what, count in most.items() if what != "event"}
    if others or most.get("event", 0) > 2:  # the last steps of the requests may settle two steps
        raise ValueError(f"a step waits more than once: {most}")
    return f"at most {most.get('event', 0)} event a step, no other wait, in {steps} steps"


def memory(setup: Setup) -> Iterator[Line]:
    """Row 8: yield the peak of a full step, the memory of the graphs, and the share of the KV pool."""
    yield check("memory", partial(_memory, setup))


def _memory(setup: Setup) -> Line:
    from engine.device.graphs import Graphs

    captured: list[int] = []
    capture = Graphs.capture

    def measured(self: Graphs, *args: Any) -> None:
        before = torch.cuda.memory_reserved()
        capture(self, *args)
        captured.append(torch.cuda.memory_reserved() - before)

    name = setup.pick("1B", "tiny")
    with mock.patch.object(Graphs, "capture", measured):
        engine, _ = models.build(
            setup, models.Random(name), attention="triton", pool=None, max_num_seqs=setup.pick(128, 3)
        )
    pool: Tensor = engine.runner.pool  # type: ignore[attr-defined]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    count, length = setup.pick((128, 500), (3, 9))
    prompts = models.prompts(count, length, SHAPES[name].vocab)
    models.run(engine, [models.greedy(str(i), p, 4, **KINDS["filters"]) for i, p in enumerate(prompts)])
    peak = torch.cuda.max_memory_allocated() - before
    free, total = torch.cuda.mem_get_info()
    mib = {"step": peak, "graphs": sum(captured), "pool": pool.nbytes, "free": free}
    said = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in mib.items())
    values = {name: float(size) for name, size in mib.items()} | {"share": pool.nbytes / total}
    return Line("memory", f"{said}; the pool is {pool.nbytes / total:.1%} of {total / 2**30:.1f} GiB", "ok", values)
