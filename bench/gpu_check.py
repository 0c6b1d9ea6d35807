"""Checks backends, engine and throughput on the GPU of this machine, as one table; `bench/gpu_check.sh` runs it.

Each check is independent: if a package, a model or the GPU is missing, its row is `skipped`, with the reason. The first
checks need only torch, so nothing else is imported at the top.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels.attention import backend_names
from kernels.attention.base import CacheSpec

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.models.loading import LoadedModel

_SECONDS = 230
"""Seconds after which no check begins."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TANH = 2.0**-11
"""Relative error of the GPU's own tanh (PTX ISA, `tanh.approx.f32`), which flash-attn uses for soft-caps."""
_DEMO = "smollm2-135m"
_POOL_BYTES = 2 << 30
_OURS = ("bench", "engine", "kernels", "tests", "worker", "producer")


class Skip(Exception):
    """A check cannot run here; the message says why."""


class Table:
    """Prints a row as each check ends."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.failed = 0
        self.done = 0

    def run(self, part: str, what: str, check: Callable[[], str]) -> None:
        """Run a check and print its row. `check` returns a text, raises `Skip`, or raises anything else if it fails."""
        begun = time.monotonic()
        try:
            if begun - self.start > _SECONDS:
                raise Skip("no time is left")
            result, said = "ok", check()
        except Skip as reason:
            result, said = "skipped", str(reason)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            result, said = ("FAILED" if missing in _OURS else "skipped"), str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are to run
            traceback.print_exc()
            result, said = "FAILED", f"{type(error).__name__}: {error}"
        self.failed += result == "FAILED"
        self.done += result == "ok"
        said = " ".join(said.split())
        print(f"{part:<11}{what:<40}{result:<9}{time.monotonic() - begun:>6.1f} s  {said[:160]}", flush=True)


# ── backends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 5}, {"window": 300}, {"softcap": 8.0})
_SHAPES = ((9, 3, 64), (8, 8, 128), (4, 1, 80), (2, 1, 256))
"""Query heads, KV heads, head size."""


def attention(name: str, dtype: str, device: torch.device, shapes: tuple[tuple[int, int, int], ...]) -> str:
    """Compare mixed batches and decodes, on a pool full of NaN, with an oracle in fp64, within rounding errors."""
    worst = 0.0
    for heads, kv_heads, dim in shapes:
        for error in _errors(name, CacheSpec(2, kv_heads, dim, 0, _DTYPES[dtype], device), heads):
            worst = max(worst, error)
    if not worst <= 1:
        raise ValueError(f"an output is off by {worst:.2f} times what rounding explains")
    return f"largest error {worst:.2f} of what rounding explains"


def _errors(name: str, spec: CacheSpec, heads: int) -> Iterator[float]:
    import dataclasses

    from kernels.attention import get_backend
    from tests.kernels.cache import Cache

    try:
        spec = dataclasses.replace(spec, block_size=get_backend(name, spec).spec.block_size)
    except ValueError as refused:
        raise Skip(str(refused)) from refused
    lengths = [150, 1, 37, 300, 257, 256]
    cache = Cache(spec, lengths, heads, name=name)
    cache.run([(0, 0, 100), (3, 0, 260), (4, 0, 256), (5, 0, 127)])
    mixed = [(0, 100, 149), (1, 0, 1), (2, 0, 36), (3, 260, 299), (4, 256, 257), (5, 127, 255)]
    decodes = [(0, 149, 150), (2, 36, 37), (3, 299, 300), (5, 255, 256)]
    for options in _OPTIONS:
        cap = options.get("softcap")
        for work in (mixed, decodes):
            for item, out in zip(work, cache.run(work, padding=3, **options), strict=True):
                error = float((out.double() - cache.oracle(*item, **options)).abs().nan_to_num(torch.inf).max())
                yield error / cache.bound(item[0], cap, rounded_weights=spec.dtype != torch.float32, tanh=_TANH)


# ── engine ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(path: str, device: str, dtype: str, name: str, **limits: Any) -> tuple[Engine, LoadedModel]:
    """Build an engine with a pool of `_POOL_BYTES` over the attention backend `name`."""
    from engine.build import CacheOptions, build_engine
    from engine.config import EngineConfig, ModelOptions

    options = ModelOptions(path, device=device, dtype=dtype, max_model_len=1024)  # type: ignore[arg-type]
    cache = CacheOptions(memory_bytes=_POOL_BYTES, attention=name)
    try:
        return build_engine(options, EngineConfig(block_size=0, **limits), cache)
    except ValueError as refused:
        raise Skip(str(refused)) from refused


def generate(engine: Engine, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Return the greedy ids of each prompt, EOS ignored, and the seconds of all prompts together."""
    from engine.request import Request, SamplingParams

    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    begun = time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params, cache_salt=f"{begun}"))
    ids: dict[str, list[int]] = {}
    while engine.has_work:
        for ended in engine.step().finished:
            if ended.fault is not None:
                raise RuntimeError(f"{ended.fault}: {ended.message}")
            ids[ended.request_id] = list(ended.choices[0].token_ids)
    return [ids[str(number)] for number in range(len(prompts))], time.monotonic() - begun


def parity(make: Callable[[], tuple[str, Any]], device: str, dtype: str, prompts: list[list[int]], count: int) -> str:
    """Compare greedy ids with those of transformers in fp32, except where rounding may swap its two highest logits.

    The reference backend, which `attention` checks, shows how much rounding changes logits.
    """
    from tests.models.driver import Driver
    from tests.models.reference import near_ties

    path, reference = make()
    engine, loaded = build(path, device, dtype, "auto", max_num_batched_tokens=200)
    driver = Driver(loaded, backend="reference", num_blocks=64)
    ours = driver.prefill(driver.add(prompts[0])).cpu()
    gap = max(1e-4, 2 * float((ours - reference.logits(prompts[0])).abs().max()))
    got, _ = generate(engine, prompts, count)
    equal = parted = 0
    for prompt, ids in zip(prompts, got, strict=True):
        want, logits = reference.generate(prompt, count)
        parted += near_ties(ids, want, logits, gap)
        equal += next((i for i, pair in enumerate(zip(ids, want, strict=True)) if pair[0] != pair[1]), count)
    if 4 * equal < count * len(prompts):
        raise ValueError(f"only {equal} ids are equal before texts part at near-ties (< {gap:.2g})")
    used = engine.runner.model.backend.name  # type: ignore[attr-defined]
    return f"{used}: {equal} of {count * len(prompts)} ids equal, {parted} texts part at a near-tie (< {gap:.2g})"


def _random_prompts(lengths: list[int]) -> list[list[int]]:
    import random

    draw = random.Random(1)
    return [[draw.randrange(8, 300) for _ in range(n)] for n in lengths]


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


def tiny_model(folder: Path, name: str) -> tuple[str, Any]:
    """Write a random model; return its path and the model of transformers."""
    from tests.models.reference import Reference
    from tests.models.tiny import build as write

    family, config = _TINY[name]
    path = folder / name
    if not path.exists():
        write(path, family, **config)
    return str(path), Reference(path)


def demo_file() -> Path:
    """Return the file of the demo model; skip if it is not installed."""
    from engine.models import files
    from engine.models.weights import LoadError

    try:
        return files.demo_file()
    except LoadError as error:
        raise Skip(str(error)) from error


def demo_model() -> tuple[str, Any]:
    """Return the name of the demo model and the model that transformers reads from its file."""
    from tests.models.reference import Reference

    return _DEMO, Reference.of_gguf(demo_file())


# ── throughput ────────────────────────────────────────────────────────────────────────────────────────────────────────


def throughput(path: Callable[[], str], device: str, name: str, requests: int, tokens: int) -> str:
    """Measure the output tokens per second of `requests` prompts of 256 tokens, after a warm-up."""
    engine, loaded = build(path(), device, "auto", name)
    prompts = [[8 + (7 * i + 13 * j) % 250 for j in range(256)] for i in range(requests)]
    generate(engine, prompts, 2)
    _, seconds = generate(engine, prompts, tokens)
    used, dtype = engine.runner.model.backend.name, str(loaded.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
    made = requests * tokens
    rates = f"{made / seconds:.0f} output tok/s, {(made + 256 * requests) / seconds:.0f} in all"
    return f"{used} {dtype}, {loaded.num_parameters / 1e6:.0f} M parameters, {requests} at once: {rates}"


def random_135m(folder: Path) -> str:
    """Write a random model of the shape of the demo model, with another vocabulary; return its path."""
    from tests.models.tiny import build as write

    path = folder / "135m"
    if not path.exists():
        shape: dict[str, Any] = {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
        }
        write(path, "llama", **shape, num_key_value_heads=3, max_position_embeddings=2048)
    return str(path)


def main(arguments: list[str]) -> int:
    """Run all checks; return 0 if none failed, else 1."""
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description="Checks tokenmill on this machine's GPU.")
    parser.add_argument("--cpu", action="store_true", help="the reduced form, on the CPU")
    reduced = parser.parse_args(arguments).cpu or not torch.cuda.is_available()
    device = "cpu" if reduced else "cuda"
    _quiet()
    if reduced:
        torch.set_num_threads(min(2, torch.get_num_threads()))
    table = Table()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {_device_name(device)}")
    print(f"{'part':<11}{'what':<40}{'result':<9}{'time':>8}  detail")
    if reduced:
        table.run("device", "cuda", _no_cuda)
    with tempfile.TemporaryDirectory() as folder:
        check_all(table, device, Path(folder), reduced)
    print(f"{table.done} checks passed, {table.failed} failed, {time.monotonic() - table.start:.0f} s")
    return 1 if table.failed else 0


def check_all(table: Table, device: str, folder: Path, reduced: bool) -> None:
    """Run each check of the full or the reduced form."""
    for name in backend_names():
        if device == "cuda" and name == "cpu":
            continue
        for dtype in _DTYPES:
            shapes = _SHAPES[:1] if reduced else _SHAPES
            table.run("backend", f"{name} {dtype}", partial(attention, name, dtype, torch.device(device), shapes))
    models: dict[str, Callable[[], tuple[str, Any]]] = {name: partial(tiny_model, folder, name) for name in _TINY}
    if reduced:
        models = {"llama": models["llama"]}
    prompts = _random_prompts([40, 255, 31, 257] if reduced else [300, 255, 31, 520, 257, 1])
    for model, make in {**models, _DEMO: demo_model}.items():
        for dtype in ("float32",) if reduced else _DTYPES:
            table.run("engine", f"{model} {dtype}", partial(parity, make, device, dtype, prompts, 4 if reduced else 16))
    requests, tokens = (2, 8) if reduced else (128, 128)
    paths: dict[str, Callable[[], str]] = {_DEMO: _demo_path, "random 135M": partial(random_135m, folder)}
    if reduced:
        del paths["random 135M"]
    for kind, path in paths.items():
        for name in ("auto",) if reduced else ("flash", "reference"):
            table.run("throughput", f"{kind} {name}", partial(throughput, path, device, name, requests, tokens))


def _demo_path() -> str:
    demo_file()
    return _DEMO


def _no_cuda() -> str:
    raise Skip("not asked for" if torch.cuda.is_available() else "torch sees no GPU: the reduced form runs")


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


def _quiet() -> None:
    """Log errors only, so that the output is the table."""
    logging.basicConfig(level=logging.ERROR)
    try:
        import structlog
    except ModuleNotFoundError:
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
