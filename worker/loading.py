"""The slow part of a worker's start: importing torch, loading the model, making the KV pool."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.models.demo import DEMO_MODEL, demo_file
from engine.start.compile_cache import set_folder, warn_of_late_compiles
from engine.start.memory import resident_bytes
from worker.jobs.translate import ModelLike, Translator
from worker.loop import EngineLike
from worker.ops.exits import Exit
from worker.ops.threads import Fatal
from worker.settings import Settings

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.models.loading import LoadedModel
    from engine.runner import Runner

log = structlog.get_logger()

_WEIGHTS = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready to step, its model, and the translator of entries into its requests."""

    engine: EngineLike
    model: ModelLike
    translator: Translator
    facts: Mapping[str, str | int] = field(default_factory=dict)
    """Fields about the model that `worker_ready` and `tokenmill info` show."""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Replaced part of a GPU's kernels → the reason; for the metrics."""
    on_ready: Callable[[], None] = lambda: None
    """Called once, after the engine has passed its own check and before it serves."""


def settle_heap() -> None:
    """Exempt everything loaded so far from garbage collection, and collect less often.

    A step makes thousands of small objects without cycles. With Python's defaults the collector visits them, and
    sometimes all of torch, which takes a third of the time of publishing a token.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def _trim() -> None:
    """Return memory that only loading needed to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def calm_threads() -> None:
    """Make OpenMP's idle threads sleep after a short wait, unless the environment sets this; call before torch loads.

    By default they spin for milliseconds, on cores that Redis, readers and this worker's other threads need. Measured
    on 2 cores with a load average of 5: the demo makes 110 tokens/s with sleeping threads, 5 with spinning ones. With
    no spinning at all a single stream is a quarter slower, since a step is hundreds of short parallel parts.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # iterations of the waiting loop: tens of microseconds


def weights_size(model: str) -> str:
    """Return the size of a model's files on this machine, such as `93 MB`; a hub name may have to be fetched first."""
    path = demo_file() if model == DEMO_MODEL else Path(model).expanduser()
    try:
        if path is None or not path.exists():
            return "unknown: no file or folder here"
        files = [file for file in path.iterdir() if file.suffix.lower() in _WEIGHTS] if path.is_dir() else [path]
        size = float(sum(file.stat().st_size for file in files))
    except OSError as error:
        return f"unknown: {error.strerror}"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} GB"


def load(settings: Settings) -> Loaded:
    """Load the model and build the engine.

    Raises:
        Fatal: the model cannot be loaded, or a package is missing; with `Exit.LOAD` and the reason.
    """
    began = time.monotonic()
    log.info(
        "model_loading",
        model=settings.model,
        size=weights_size(settings.model),
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
    )
    calm_threads()
    set_folder()
    engine, model = _build(settings)
    from engine.models.chat import ChatError

    model.tokenizer.special_tokens_in_messages = settings.special_tokens_in_messages
    _trim()
    facts = _backend(model.implementation, model.implementation_reason) | model.serving.facts() | _memory(engine.runner)
    log.info(
        "model_loaded",
        model=model.name,
        parameters=model.num_parameters,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seconds=round(time.monotonic() - began, 1),
    )
    translator = Translator(settings, engine, model, ChatError)
    on_ready = warn_of_late_compiles if model.device.type == "cuda" else lambda: None
    return Loaded(engine, model, translator, facts, model.serving.fallbacks, on_ready)


def _build(settings: Settings) -> tuple[Engine, LoadedModel]:
    try:
        import torch

        from engine.build import CacheOptions, build_engine
        from engine.models.loading import LoadError
    except ImportError as error:
        message = f"the worker's packages are missing ({error}): in a clone of tokenmill, pip install '.[worker]'"
        raise Fatal(Exit.LOAD, message) from error
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    cache = CacheOptions(
        num_blocks=settings.num_kv_blocks,
        memory_bytes=settings.kv_cache_memory,
        swap_bytes=settings.swap_space,
        swap_file=settings.swap_file,
        attention=settings.attention,
        utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs == "on",
    )
    try:
        return build_engine(settings.model_options(), settings.engine_config(), cache)
    except (LoadError, ValueError, MemoryError, RuntimeError) as error:
        raise Fatal(Exit.LOAD, f"cannot load {settings.model}: {_line(error)}") from error
    except Exception as error:  # broken files that no check finds: the operator needs the model's name, not a traceback
        log.debug("load_failed", exc_info=True)
        raise Fatal(Exit.LOAD, f"cannot load {settings.model}: {type(error).__name__}: {_line(error)}") from error


def _backend(name: str, reason: str) -> dict[str, str | int]:
    return {"backend": name, "backend_reason": reason} if reason else {"backend": name}


def _memory(runner: Runner) -> dict[str, str | int]:
    """Return the bytes of memory that the process takes now, and takes once KV pool and host tier are full."""
    from engine.device.runner import DeviceRunner
    from engine.runner import ModelRunner

    assert isinstance(runner, ModelRunner | DeviceRunner)  # which `build_engine` makes
    facts: dict[str, str | int] = {
        "kv_cache_mib": runner.pool.nbytes >> 20,
        "swap_mib": runner.host.nbytes >> 20,
    }
    resident = resident_bytes()
    if resident is not None:
        # Beside a GPU the host tier is pinned, so all of it is resident.
        grows = runner.pool.nbytes + runner.host.nbytes if runner.pool.device.type == "cpu" else 0
        facts |= {"memory_mib": resident >> 20, "memory_full_mib": (resident + grows) >> 20}
    return facts


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
