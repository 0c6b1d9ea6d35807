"""Builds an engine from options: loads the model, chooses the attention backend, allocates the KV pool."""

from __future__ import annotations

import dataclasses
import os

import structlog
import torch
from torch import Tensor

from engine.config import EngineConfig, ModelOptions
from engine.engine import Engine
from engine.memory import available_bytes, default_host_bytes, default_pool_blocks
from engine.models.loading import ASKED_FOR, LoadedModel, load_model
from engine.models.precision import check_backend
from engine.runner import ModelRunner
from engine.sampling.device import sampler_on
from engine.scheduling.policy import PreemptionCost
from kernels.attention import AUTO, get_backend
from kernels.attention.base import AttentionBackend

log = structlog.get_logger()

CANARY = "Hello"
"""Text of the canary's prompt, see `engine.canary`."""
_DEVICE_SHARE = 0.8
"""Default share of the pool, on a GPU, of the memory that is free after the weights are loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheOptions:
    """Size of the KV pool, as a number of blocks or of bytes, and of the host tier."""

    num_blocks: int | None = None
    """Blocks in the pool; None: see `memory_bytes`."""
    memory_bytes: int | None = None
    """Bytes that the pool may take; None: a default for this machine, see `engine.memory`."""
    swap_bytes: int | None = 0
    """Bytes of the host tier; None: a default for this machine, see `engine.memory`."""
    swap_file: str | None = None
    """Path of a new file that holds the host tier, memory-mapped; None: anonymous memory."""
    attention: str = AUTO
    """Name of an attention backend, see `kernels.attention`."""


def build_engine(model: ModelOptions, config: EngineConfig, cache: CacheOptions) -> tuple[Engine, LoadedModel]:
    """Load the model, allocate the KV pool and create the engine.

    Args:
        model: which model, where, in which precision.
        config: `num_blocks` and `max_model_len` are replaced by those of the pool and the model; so is `block_size` if
            it is 0, by that of the attention backend.
        cache: size of the pool, and the attention backend.

    Raises:
        engine.models.loading.LoadError: the model cannot be loaded.
        ValueError: the pool would hold no block, the swap file cannot be created, or the attention backend cannot run
            the model.
    """
    loaded = load_model(model)
    backend = get_backend(cache.attention, loaded.cache_spec(config.block_size))
    loaded.batch_invariant = loaded.batch_invariant and backend.batch_invariant
    check_backend(model, backend, shown=loaded.batch_invariant)
    available = available_bytes()
    overlap = loaded.device.type == "cuda" if config.overlap is None else config.overlap
    config = dataclasses.replace(
        config, block_size=backend.spec.block_size, max_model_len=loaded.max_model_len, overlap=overlap
    )
    config = _sized(config, cache, backend, available)
    pool = torch.empty((config.num_blocks, backend.block_bytes), dtype=torch.uint8, device=loaded.device)
    host = _host_tier(config.host_slots, backend.block_bytes, cache.swap_file, loaded.device)
    backend.bind(pool)
    num_ids = loaded.tokenizer.size
    runner = ModelRunner(
        loaded.bind(backend),
        sampler_on(loaded.device, num_ids, config.max_num_seqs),
        pool=pool,
        host=host,
        block_size=config.block_size,
        eos_token_ids=loaded.generation.eos_token_ids,
        bucket=loaded.bucket,
    )
    engine = Engine(
        config,
        runner,
        cost=PreemptionCost.on(loaded.device.type, backend.block_bytes, config.block_size, loaded.num_parameters),
        token_bytes=loaded.tokenizer.token_bytes,
        num_ids=num_ids,
        eos_token_ids=loaded.generation.eos_token_ids,
        canary=loaded.tokenizer.encode(CANARY)[:4] or (0,),
    )
    taken = pool.nbytes + (0 if cache.swap_file else host.nbytes)
    _warn(loaded, config, taken, available)
    log.info(
        "engine_ready",
        model=loaded.name,
        backend=loaded.implementation,
        attention=backend.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        blocks=config.num_blocks,
        block_size=config.block_size,
        pool_mib=config.num_blocks * backend.block_bytes >> 20,
        host_mib=config.host_slots * backend.block_bytes >> 20,
        batch_invariant=loaded.batch_invariant,
        overlap=overlap,
    )
    return engine, loaded


def _warn(loaded: LoadedModel, config: EngineConfig, taken: int, available: int | None) -> None:
    """Log what makes this engine slower or smaller than the operator may expect.

    Args:
        loaded: the model.
        config: limits of the engine.
        taken: bytes of KV pool and host tier in memory.
        available: bytes that were available before they were allocated; None: unknown.
    """
    if loaded.implementation != "fused" and loaded.implementation_reason != ASKED_FOR:
        log.warning(
            "fused_decoder_not_used",
            model=loaded.name,
            reason=loaded.implementation_reason,
            effect="transformers' code runs the model: slower, without --quantize, results may depend on the batch",
        )
    if loaded.device.type == "cpu" and available is not None and taken > available:
        log.warning(
            "memory_is_short",
            needed_mib=taken >> 20,
            available_mib=available >> 20,
            hint="KV pool and host tier may grow beyond what is available: lower --kv-cache-memory or --swap-space",
        )
    if config.capacity < config.max_model_len:
        log.warning("pool_smaller_than_model", capacity=config.capacity, max_model_len=config.max_model_len)


def _sized(config: EngineConfig, cache: CacheOptions, backend: AttentionBackend, available: int | None) -> EngineConfig:
    """Return `config` with the numbers of blocks of the KV pool and the host tier."""
    num_blocks = _num_blocks(cache, backend, config, available)
    host_bytes = cache.swap_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(num_blocks * backend.block_bytes, cache.swap_file is not None)
    return dataclasses.replace(config, num_blocks=num_blocks, host_slots=host_bytes // backend.block_bytes)


def _num_blocks(cache: CacheOptions, backend: AttentionBackend, config: EngineConfig, available: int | None) -> int:
    """Return the number of blocks of the pool, at least 1.

    Raises:
        ValueError: the memory does not hold one block.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    device = backend.spec.device
    if cache.memory_bytes is not None or device.type == "cuda":
        budget = _device_memory(device) if cache.memory_bytes is None else cache.memory_bytes
        num_blocks = budget // backend.block_bytes
    else:
        budget = available or 0
        num_blocks = default_pool_blocks(config, config.max_model_len, backend.block_bytes, available)
    if num_blocks < 1:
        raise ValueError(
            f"{budget} bytes of KV cache hold no block: "
            f"a block of {backend.spec.block_size} tokens takes {backend.block_bytes} bytes"
        )
    return num_blocks


def _device_memory(device: torch.device) -> int:
    """Return the default size of the pool on a GPU, in bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _DEVICE_SHARE)


def _host_tier(slots: int, block_bytes: int, file: str | None, device: torch.device) -> Tensor:
    """Allocate the host tier, uint8 `[slots, block_bytes]`: pinned memory beside a GPU, or a memory-mapped new file.

    The file is unlinked at once, so its space is free when the process ends, however it ends.

    Raises:
        ValueError: the file exists, or the file system has no room for it.
    """
    if file is None or not slots:
        return torch.empty((slots, block_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    size = slots * block_bytes
    try:
        with open(file, "xb") as made:
            try:
                os.posix_fallocate(made.fileno(), 0, size)
                mapped = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.unlink(file)
    except FileExistsError:
        raise ValueError(f"--swap-file: {file} exists and is not overwritten: remove it or name another file") from None
    except OSError as error:
        raise ValueError(f"{file} cannot hold {size} bytes of host tier: {error}") from error
    return mapped.view(slots, block_bytes)
