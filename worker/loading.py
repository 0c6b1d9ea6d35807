"""The slow part of the start: torch, the model, the pool. Imported on the engine's thread only."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.memory import resident_bytes
from engine.models.demo import DEMO_MODEL, demo_file
from worker.jobs.translate import ModelLike, Translator
from worker.loop import EngineLike
from worker.ops.exits import Exit
from worker.ops.threads import Fatal
from worker.settings import Settings

if TYPE_CHECKING:
    from engine.runner import Runner

log = structlog.get_logger()

_WEIGHTS = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready, and who turns entries into requests for it."""

    engine: EngineLike
    model: ModelLike
    translator: Translator
    facts: Mapping[str, str | int] = field(default_factory=dict)
    """What `worker_ready` and `tokenmill info` show of the model."""


def settle_heap() -> None:
    """Take what is loaded out of the garbage collector's sight, and have it look less often.

    A step makes thousands of small objects that die by themselves; with the defaults the collector walked through them,
    and now and then through all of torch, for a third of what publishing a token costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def _trim() -> None:
    """Give the memory that loading needed for a while back to the system, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def calm_threads() -> None:
    """Let OpenMP's threads sleep after a short wait, unless the environment says otherwise; call it before torch loads.

    By default they spin for milliseconds, which takes the cores of whoever else is on the machine: Redis, readers, this
    worker's own threads. Measured on 2 cores beside a load of 5: the demo makes 110 tokens/s asleep, 5 spinning. To
    fall asleep at once costs a single stream a quarter of its speed: a step is hundreds of short parallel parts.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # rounds of a wait: tens of microseconds


def weights_size(model: str) -> str:
    """How large a model's files on this machine are, such as `93 MB`; a hub name may have to be fetched first."""
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
    """Load what `settings` name.

    Raises:
        Fatal: with `Exit.LOAD` and the reason.
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
    try:
        import torch

        from engine.build import CacheOptions, build_engine
        from engine.models.chat import ChatError
        from engine.models.loading import LoadError
    except ImportError as error:
        raise Fatal(
            Exit.LOAD, f"the worker's packages are missing ({error}): in a clone of tokenmill, pip install '.[worker]'"
        ) from error
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    cache = CacheOptions(
        num_blocks=settings.num_kv_blocks,
        memory_bytes=settings.kv_cache_memory,
        swap_bytes=settings.swap_space,
        swap_file=settings.swap_file,
        attention=settings.attention,
    )
    try:
        engine, model = build_engine(settings.model_options(), settings.engine_config(), cache)
    except (LoadError, ValueError, MemoryError, RuntimeError) as error:
        raise Fatal(Exit.LOAD, f"cannot load {settings.model}: {_line(error)}") from error
    except Exception as error:  # files that no check foresaw: the operator needs the name of the model, not a traceback
        log.debug("load_failed", exc_info=True)
        raise Fatal(Exit.LOAD, f"cannot load {settings.model}: {type(error).__name__}: {_line(error)}") from error
    model.tokenizer.special_tokens_in_messages = settings.special_tokens_in_messages
    _trim()
    facts = _backend(model.implementation, model.implementation_reason) | _memory(engine.runner)
    log.info(
        "model_loaded",
        model=model.name,
        parameters=model.num_parameters,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seconds=round(time.monotonic() - began, 1),
    )
    return Loaded(engine, model, Translator(settings, engine, model, ChatError), facts)


def _backend(name: str, reason: str) -> dict[str, str | int]:
    return {"backend": name, "backend_reason": reason} if reason else {"backend": name}


def _memory(runner: Runner) -> dict[str, str | int]:
    """What this process holds now, and what it holds once KV pool and host tier have filled."""
    from engine.runner import ModelRunner

    assert isinstance(runner, ModelRunner)  # what `build_engine` makes
    facts: dict[str, str | int] = {
        "kv_cache_mib": runner.pool.nbytes >> 20,
        "swap_mib": runner.host.nbytes >> 20,
    }
    resident = resident_bytes()
    if resident is not None:
        grows = sum(part.nbytes for part in (runner.pool, runner.host) if part.device.type == "cpu")
        facts |= {"memory_mib": resident >> 20, "memory_full_mib": (resident + grows) >> 20}
    return facts


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
