"""Ids of small random models, and of the demo model, beside those of transformers in fp32."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_check import models
from bench.gpu_check.table import Line, Setup, Skip, check, machine

DEMO = "smollm2-135m"
_LONG = {"max_position_embeddings": 1024}
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LONG),
    "qwen2-windows": (
        "qwen2",
        {**_LONG, "use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {**_LONG, "head_dim": 32, "sliding_window": 6}),
}
"""Name → family and config of random models with a few thousand parameters."""


def parity(setup: Setup) -> Iterator[Line]:
    """Yield for each model and dtype how many greedy ids are those of transformers."""
    lengths = setup.pick([300, 255, 31, 520, 257, 1], [40, 31])
    draw = random.Random(1)
    prompts = [[draw.randrange(8, 300) for _ in range(n)] for n in lengths]
    made: dict[str, Callable[[], tuple[str, Any]]] = {name: partial(tiny_model, setup.folder, name) for name in _TINY}
    if setup.reduced:
        made = {"llama": made["llama"]}
    else:
        made[DEMO] = demo_model
    dtypes = {"llama": "float32", "qwen2-windows": "float16", "gemma2": "bfloat16", DEMO: "bfloat16"}
    for name, make in made.items():  # one dtype each, since each takes seconds to compile
        yield check(f"{name} {dtypes[name]}", partial(compare, setup, make, dtypes[name], prompts, setup.pick(16, 3)))


def compare(setup: Setup, make: Callable[[], tuple[str, Any]], dtype: str, prompts: list[list[int]], count: int) -> str:
    """Compare greedy ids with those of transformers in fp32, except where rounding may swap its two highest logits.

    The reference backend, which row 2 checks, shows how much rounding changes logits.
    """
    path, reference = make()
    with machine(setup):
        return _compared(setup, path, reference, dtype, prompts, count)


def _compared(setup: Setup, path: str, reference: Any, dtype: str, prompts: list[list[int]], count: int) -> str:
    from tests.models.driver import Driver
    from tests.models.reference import near_ties

    engine, loaded = models.build(
        setup, path, dtype, max_num_batched_tokens=setup.pick(200, 32), max_num_seqs=len(prompts)
    )
    driver = Driver(loaded, backend="reference", num_blocks=64)
    ours = driver.prefill(driver.add(prompts[0])).cpu()
    gap = max(1e-4, 2 * float((ours - reference.logits(prompts[0])).abs().max()))
    requests = [models.greedy(str(i), prompt, count) for i, prompt in enumerate(prompts)]
    got, _ = models.run(engine, requests)
    equal = parted = 0
    for i, prompt in enumerate(prompts):
        (ids,) = got[str(i)]
        want, logits = reference.generate(prompt, count)
        parted += near_ties(ids, want, logits, gap)
        equal += next((at for at, pair in enumerate(zip(ids, want, strict=True)) if pair[0] != pair[1]), count)
    if 4 * equal < count * len(prompts):
        raise ValueError(f"only {equal} ids are equal before texts part at near-ties (< {gap:.2g})")
    used = engine.runner.model.backend.name  # type: ignore[attr-defined]
    return f"{used}: {equal} of {count * len(prompts)} ids equal, {parted} texts part at a near-tie (< {gap:.2g})"


def tiny_model(folder: Path, name: str) -> tuple[str, Any]:
    """Write a random model; return its path and the model of transformers."""
    from tests.models.reference import Reference
    from tests.models.tiny import build as write

    family, config = _TINY[name]
    path = folder / name
    if not path.exists():
        write(path, family, **config)
    return str(path), Reference(path)


def demo_model() -> tuple[str, Any]:
    """Return the name of the demo model and the model that transformers reads from its file."""
    from tests.models.reference import Reference

    return DEMO, Reference.of_gguf(demo_path())


def demo_path() -> Path:
    """Return the file of the demo model.

    Raises:
        Skip: the model, or the package that reads its file, is not installed.
    """
    from bench.gpu_check.bare import absent
    from engine.models import files
    from engine.models.weights import LoadError

    if absent("gguf"):
        raise Skip("the package gguf is not installed")
    try:
        return files.demo_file()
    except LoadError as error:
        raise Skip(str(error)) from error
