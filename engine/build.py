"""From options to an engine that runs: load the model, choose a backend, size the pool."""

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
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.scheduling.policy import PreemptionCost
from kernels.attention import AUTO, get_backend
from kernels.attention.base import AttentionBackend

log = structlog.get_logger()

CANARY = "Hello"
"""What the engine runs to see whether it still computes."""
_DEVICE_SHARE = 0.8
"""The pool's default share on a GPU: of what is free once the weights are there. The rest is for a step's values."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheOptions:
    """How large the KV pool is: a number of blocks, or the memory that it may take."""

    num_blocks: int | None = None
    memory_bytes: int | None = None
    swap_bytes: int | None = 0
    """Memory of the host tier; None takes what suits the machine, see `engine.memory`."""
    swap_file: str | None = None
    """Keep the host tier in this file, memory-mapped, instead of in anonymous memory."""
    attention: str = AUTO
    """Name of an attention backend, see `kernels.attention`."""


def build_engine(model: ModelOptions, config: EngineConfig, cache: CacheOptions) -> tuple[Engine, LoadedModel]:
    """Load the model and allocate the pool. `num_blocks` and `max_model_len` of `config` are set from what is found,
    and `block_size` where it is 0.

    Raises:
        engine.models.loading.LoadError: the model cannot be loaded.
        ValueError: the pool would hold no block.
    """
    loaded = load_model(model)
    backend = get_backend(cache.attention, loaded.cache_spec(config.block_size))
    available = available_bytes()
    config = dataclasses.replace(config, block_size=backend.spec.block_size, max_model_len=loaded.max_model_len)
    num_blocks = _num_blocks(cache, backend, config, available)
    host_bytes = cache.swap_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(num_blocks * backend.block_bytes, cache.swap_file is not None)
    config = dataclasses.replace(config, num_blocks=num_blocks, host_slots=host_bytes // backend.block_bytes)
    pool = torch.empty((num_blocks, backend.block_bytes), dtype=torch.uint8, device=loaded.device)
    host = _host_tier(config.host_slots, backend.block_bytes, cache.swap_file, loaded.device)
    backend.bind(pool)
    num_ids = loaded.tokenizer.size
    runner = ModelRunner(
        loaded.bind(backend),
        Sampler(num_ids, loaded.device),
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
    if loaded.implementation != "fused" and loaded.implementation_reason != ASKED_FOR:
        log.warning(
            "fused_decoder_not_used",
            model=loaded.name,
            reason=loaded.implementation_reason,
            effect="transformers' code runs the model: slower, without --quantize, results may depend on the batch",
        )
    taken = pool.nbytes + (0 if cache.swap_file else host.nbytes)
    if loaded.device.type == "cpu" and available is not None and taken > available:
        log.warning(
            "memory_is_short",
            needed_mib=taken >> 20,
            available_mib=available >> 20,
            hint="KV pool and host tier may grow beyond what is available: lower --kv-cache-memory or --swap-space",
        )
    if config.capacity < config.max_model_len:
        log.warning("pool_smaller_than_model", capacity=config.capacity, max_model_len=config.max_model_len)
    log.info(
        "engine_ready",
        model=loaded.name,
        backend=loaded.implementation,
        attention=backend.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        blocks=num_blocks,
        block_size=config.block_size,
        pool_mib=num_blocks * backend.block_bytes >> 20,
        host_mib=config.host_slots * backend.block_bytes >> 20,
        batch_invariant=loaded.batch_invariant,
    )
    return engine, loaded


def _num_blocks(cache: CacheOptions, backend: AttentionBackend, config: EngineConfig, available: int | None) -> int:
    """How many blocks the pool has.

    Raises:
        ValueError: none.
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
            f"one of {backend.spec.block_size} tokens takes {backend.block_bytes}"
        )
    return num_blocks


def _device_memory(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _DEVICE_SHARE)


def _host_tier(slots: int, block_bytes: int, file: str | None, device: torch.device) -> Tensor:
    """uint8 `[slots, block_bytes]`: pinned where the device copies by itself, or mapped from a file that is made here.

    The file loses its name at once and its space with the process, so that no later start meets it.

    Raises:
        ValueError: the file exists, or cannot be made as large as that.
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
        raise ValueError(f"--swap-file: {file} exists, and may be somebody's: remove it or name another") from None
    except OSError as error:
        raise ValueError(f"{file} cannot hold {size} bytes of host tier: {error}") from error
    return mapped.view(slots, block_bytes)
