"""Chooses the numbers of blocks of the KV pool and the host tier."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from torch import Tensor

from engine.config import GPU_MEMORY_UTILIZATION, EngineConfig, ModelOptions
from engine.device.runner import DeviceRunner
from engine.models.loading import LoadedModel
from engine.runner import Runner
from engine.start.device_memory import DeviceMemory, lighter_weights, smaller_steps
from engine.start.memory import default_host_bytes, default_pool_blocks
from engine.start.prepare import capture_largest
from engine.start.profile import run_largest
from kernels.attention import AUTO
from kernels.attention.base import AttentionBackend

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes of KV pool and host tier, the attention backend, and the options for GPUs."""

    num_blocks: int | None = None
    """Blocks in the pool; None: see `memory_bytes`."""
    memory_bytes: int | None = None
    """Bytes of the pool, at most; None: a default, see `engine.start.memory` and `engine.start.device_memory`."""
    swap_bytes: int | None = 0
    """Bytes of the host tier; None: a default for this machine, see `engine.start.memory`."""
    swap_file: str | None = None
    """Path of a new file that holds the host tier, memory-mapped; None: anonymous memory."""
    attention: str = AUTO
    """Name of an attention backend, see `kernels.attention`."""
    utilization: float = GPU_MEMORY_UTILIZATION
    """Share of a GPU's total memory for weights, steps, CUDA graphs and KV pool together, unless the pool's size is
    given."""
    cuda_graphs: bool = True
    """Whether steps of decodes are captured as CUDA graphs, where the backend can be captured."""

    @property
    def sized(self) -> bool:
        """Whether the operator gave the size of the pool."""
        return self.option is not None

    @property
    def option(self) -> str | None:
        """The option, as on the command line, that gives the size of the pool; None if it is not given."""
        if self.num_blocks is not None:
            return "--num-kv-blocks"
        return None if self.memory_bytes is None else "--kv-cache-memory"


MakeRunner = Callable[[Tensor], Runner]
"""Binds the model to a pool, uint8 `[num_blocks, block_bytes]`, and returns its runner."""


def with_sizes(
    config: EngineConfig,
    cache: CacheOptions,
    backend: AttentionBackend,
    available: int | None,
    on_device: Callable[[], int],
) -> EngineConfig:
    """Return `config` with the numbers of blocks of the KV pool and the host tier.

    Args:
        config: its block size and `max_model_len` are final.
        cache: the operator's choices.
        backend: knows the bytes of a block.
        available: bytes of memory that this process may still take; None: unknown.
        on_device: returns the bytes for the pool of a GPU; called if the operator gave no size.

    Raises:
        ValueError: the memory does not hold one block.
    """
    num_blocks = _num_blocks(config, cache, backend, available, on_device)
    host_bytes = cache.swap_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(num_blocks * backend.block_bytes, cache.swap_file is not None)
    return dataclasses.replace(config, num_blocks=num_blocks, host_slots=host_bytes // backend.block_bytes)


def _num_blocks(
    config: EngineConfig,
    cache: CacheOptions,
    backend: AttentionBackend,
    available: int | None,
    on_device: Callable[[], int],
) -> int:
    """Return the number of blocks of the pool, at least 1."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory_bytes is not None or backend.spec.device.type == "cuda":
        budget = on_device() if cache.memory_bytes is None else cache.memory_bytes
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


def measured_bytes(
    memory: DeviceMemory,
    loaded: LoadedModel,
    options: ModelOptions,
    config: EngineConfig,
    cache: CacheOptions,
    backend: AttentionBackend,
    make: MakeRunner,
) -> int:
    """Run the largest step over a pool of one block, and return the bytes that are left for the KV pool on a GPU.

    Raises:
        engine.start.device_memory.DoesNotFit: the step or one block does not fit; the message says what would help.
    """
    lighter = lighter_weights(options, memory.device, fused=loaded.decoder is not None)
    smaller = smaller_steps(options, config)
    kv_tokens = max(1, memory.room // backend.block_bytes) * config.block_size
    runners: list[Runner] = []

    def largest() -> None:
        runners.append(make(torch.zeros((1, backend.block_bytes), dtype=torch.uint8, device=memory.device)))
        run_largest(runners[0], config, kv_tokens, loaded.tokenizer.token_bytes)

    with memory.guard(loaded.name, f"a step of {config.max_num_batched_tokens} tokens", (*smaller, *lighter)):
        memory.measure(largest)
        runner = runners.pop()
        if cache.cuda_graphs and isinstance(runner, DeviceRunner):
            memory.measure_graphs(partial(capture_largest, runner))
        del runner
        gc.collect()  # the runner holds reference cycles, and the collector may be off while a worker loads
        torch.cuda.empty_cache()
    log.info("memory_measured", **memory.fields())
    block = f"a KV block of {config.block_size} tokens ({backend.block_bytes / (1 << 20):.1f} MiB)"
    helps = (*smaller, *lighter) if memory.step_is_large else lighter
    memory.check_room(loaded.name, block, backend.block_bytes, helps)
    return memory.room
