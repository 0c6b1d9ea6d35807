"""Builds an engine from options: loads the model, chooses the attention backend, allocates the KV pool.

On a GPU: load → check the kernels → measure the largest step → allocate the pool → capture graphs and check them →
check overlapped steps (`engine.start.prepare`).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import structlog
import torch
from torch import Tensor

from engine.checks.selfcheck import SelfCheck, checked_backend
from engine.config import EngineConfig, ModelOptions
from engine.device.host_tier import HostTier
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.models.loading import ASKED_FOR, LoadedModel, choose_device, load_model
from engine.models.precision import check_backend
from engine.runner import ModelRunner, Runner
from engine.sampling.device import sampler_on
from engine.scheduling.policy import PreemptionCost
from engine.start.device_memory import DeviceMemory, lighter_weights, smaller_pool
from engine.start.host_memory import host_pieces
from engine.start.memory import available_bytes
from engine.start.pool_size import CacheOptions, measured_bytes, with_sizes
from engine.start.prepare import prepare
from kernels.attention.base import AttentionBackend

__all__ = ["CacheOptions", "build_engine"]

log = structlog.get_logger()

CANARY = "Hello"
"""Text of the canary's prompt, see `engine.canary`."""


def build_engine(model: ModelOptions, config: EngineConfig, cache: CacheOptions) -> tuple[Engine, LoadedModel]:
    """Load the model, allocate the KV pool and create the engine.

    Args:
        model: which model, where, in which precision.
        config: `num_blocks` and `max_model_len` are replaced by those of the pool and the model; so is `block_size` if
            it is 0, by that of the attention backend.
        cache: size of the pool, and the attention backend.

    Raises:
        engine.models.loading.LoadError: the model cannot be loaded.
        engine.checks.selfcheck.GpuFails: a part is wrong on this GPU even in plain torch, or the GPU was lost.
        ValueError: the model or one block does not fit, the swap file cannot be created, or the attention backend
            cannot run the model.
    """
    memory = _account(model, cache)
    loaded = _load(model, config, memory)
    backend, checks = _checked(loaded, config, cache, memory, model)
    loaded.batch_invariant = loaded.batch_invariant and backend.batch_invariant
    replaced = loaded.serving.fallbacks.get("attention", "")
    check_backend(model, backend, shown=loaded.batch_invariant, replaced=replaced)
    available = available_bytes()
    config = _with_defaults(config, loaded, backend)

    def on_device() -> int:
        assert memory is not None  # which a GPU always has
        make = partial(_runner, loaded, backend, config, [])
        return measured_bytes(memory, loaded, model, config, cache, backend, make)

    config = with_sizes(config, cache, backend, available, on_device)
    pool, host = _allocate(config, cache, backend, loaded, memory)
    runner = _runner(loaded, backend, config, host, pool)
    if checks is not None and memory is not None:
        config = _prepared(runner, config, cache, loaded, backend, checks, memory)
    loaded.serving.overlap = bool(config.overlap)
    engine = _engine(config, runner, loaded, backend)
    taken = pool.nbytes + (0 if cache.swap_file else runner.host.nbytes)
    _warn(loaded, config, taken, available)
    _log(loaded, config, backend)
    return engine, loaded


def _account(model: ModelOptions, cache: CacheOptions) -> DeviceMemory | None:
    """Measure a GPU before the model is loaded; None on a CPU.

    Raises:
        engine.start.device_memory.DoesNotFit: other processes hold memory that this one may take.
    """
    device = choose_device(model.device)
    if device.type != "cuda":
        return None
    memory = DeviceMemory(device, cache.utilization)
    if not cache.sized:
        memory.check_start()
    return memory


def _load(model: ModelOptions, config: EngineConfig, memory: DeviceMemory | None) -> LoadedModel:
    """Load the model, and measure its weights on a GPU."""
    if memory is None:
        return load_model(model)
    with memory.guard(model.model, "all weights", lighter_weights(model, memory.device)):
        loaded = load_model(model)
    memory.loaded()
    return loaded


def _checked(
    loaded: LoadedModel, config: EngineConfig, cache: CacheOptions, memory: DeviceMemory | None, model: ModelOptions
) -> tuple[AttentionBackend, SelfCheck | None]:
    """Return the attention backend, and on a GPU the checks that it and the other kernels passed."""
    if memory is None:
        return checked_backend(loaded, cache.attention, config.block_size)
    lighter = lighter_weights(model, memory.device, fused=loaded.decoder is not None)
    with memory.guard(loaded.name, "the check of the kernels", lighter):
        return checked_backend(loaded, cache.attention, config.block_size)


def _with_defaults(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend) -> EngineConfig:
    """Return `config` with the block size of the backend, the length of the model, and `overlap` by the device."""
    overlap = loaded.device.type == "cuda" if config.overlap is None else config.overlap
    return dataclasses.replace(
        config, block_size=backend.spec.block_size, max_model_len=loaded.max_model_len, overlap=overlap
    )


def _allocate(
    config: EngineConfig,
    cache: CacheOptions,
    backend: AttentionBackend,
    loaded: LoadedModel,
    memory: DeviceMemory | None,
) -> tuple[Tensor, list[Tensor]]:
    """Allocate the KV pool, and the pieces of the host tier."""
    shape = (config.num_blocks, backend.block_bytes)
    if memory is None:
        pool = torch.empty(shape, dtype=torch.uint8)
    else:
        missing = f"{config.num_blocks} KV blocks ({shape[0] * shape[1] / (1 << 30):.2f} GiB)"
        with memory.guard(loaded.name, missing, smaller_pool(cache.option, cache.utilization)):
            pool = torch.empty(shape, dtype=torch.uint8, device=loaded.device)
    return pool, host_pieces(config.host_slots, backend.block_bytes, cache.swap_file, loaded.device)


def _runner(
    loaded: LoadedModel, backend: AttentionBackend, config: EngineConfig, host: list[Tensor], pool: Tensor
) -> ModelRunner | DeviceRunner:
    """Bind the model to a pool, and return its runner. `host`: pieces of the host tier."""
    backend.bind(pool)
    model = loaded.bind(backend)
    sampler = sampler_on(loaded.device, loaded.tokenizer.size, config.max_num_seqs)
    if loaded.device.type == "cpu":
        return ModelRunner(
            model,
            sampler,
            pool=pool,
            host=host[0],
            block_size=config.block_size,
            eos_token_ids=loaded.generation.eos_token_ids,
            bucket=loaded.bucket,
        )
    return DeviceRunner(
        model,
        sampler,
        backend=backend,
        pool=pool,
        host=HostTier(host),
        eos_token_ids=loaded.generation.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )


def _prepared(
    runner: ModelRunner | DeviceRunner,
    config: EngineConfig,
    cache: CacheOptions,
    loaded: LoadedModel,
    backend: AttentionBackend,
    checks: SelfCheck,
    memory: DeviceMemory,
) -> EngineConfig:
    """Prepare the runner of a GPU; return `config` with what is in use, see `engine.start.prepare`."""
    assert isinstance(runner, DeviceRunner)  # which `_runner` makes for a GPU

    def make(overlap: bool) -> Engine:
        return _engine(dataclasses.replace(config, overlap=overlap), runner, loaded, backend)

    step = f"a step of {config.max_num_batched_tokens} tokens beside a KV pool of {runner.pool.nbytes >> 20} MiB"
    with memory.guard(loaded.name, step, smaller_pool(cache.option, cache.utilization)):
        overlap = prepare(runner, config, loaded, checks, make, graphs=cache.cuda_graphs)
    memory.check_end(cache.sized)
    return dataclasses.replace(config, overlap=overlap)


def _engine(config: EngineConfig, runner: Runner, loaded: LoadedModel, backend: AttentionBackend) -> Engine:
    return Engine(
        config,
        runner,
        cost=PreemptionCost.on(loaded.device.type, backend.block_bytes, config.block_size, loaded.num_parameters),
        token_bytes=loaded.tokenizer.token_bytes,
        num_ids=loaded.tokenizer.size,
        eos_token_ids=loaded.generation.eos_token_ids,
        canary=loaded.tokenizer.encode(CANARY)[:4] or (0,),
    )


def _log(loaded: LoadedModel, config: EngineConfig, backend: AttentionBackend) -> None:
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
        overlap=config.overlap,
    )


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
