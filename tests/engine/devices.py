"""Engines whose steps go through a `DeviceRunner`, on the CPU or the pretended GPU, without the checks of a start."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from engine.config import EngineConfig, ModelOptions
from engine.device.host_tier import HostTier
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.models.loading import load_model
from engine.sampling.device import sampler_on
from engine.scheduling.policy import PreemptionCost
from kernels.attention import get_backend


def device_engine(
    path: str,
    device: str,
    *,
    attention: str = "reference",
    backend: str = "auto",
    slots: int = 0,
    precision: Mapping[str, Any] = MappingProxyType({}),
    **limits: Any,
) -> tuple[Engine, DeviceRunner]:
    """Return an engine, over a pool of NaN, and its runner.

    Args:
        path: the model.
        device: `cpu` or `cuda`.
        attention: the attention backend.
        backend: that of the model.
        slots: blocks of the host tier, which is in two pieces.
        precision: more fields of `ModelOptions`.
        limits: fields of `EngineConfig`.
    """
    loaded = load_model(ModelOptions(path, device=device, dtype="float32", backend=backend, **precision))
    config = EngineConfig(
        **{"block_size": 4, "num_blocks": 96, "max_num_batched_tokens": 64, "overlap": False, **limits},
        host_slots=slots,
        max_model_len=loaded.max_model_len,
    )
    kernels = get_backend(attention, loaded.cache_spec(config.block_size))
    pool = torch.full((config.num_blocks, kernels.block_bytes), 0xFF, dtype=torch.uint8, device=loaded.device)
    kernels.bind(pool)
    pieces = [
        torch.empty((count, kernels.block_bytes), dtype=torch.uint8, pin_memory=device == "cuda")
        for count in (slots // 2, slots - slots // 2)
    ]
    runner = DeviceRunner(
        loaded.bind(kernels),
        sampler_on(loaded.device, loaded.tokenizer.size, config.max_num_seqs),
        backend=kernels,
        pool=pool,
        host=HostTier(pieces),
        eos_token_ids=loaded.generation.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )
    engine = Engine(
        config,
        runner,
        cost=PreemptionCost.on(device, kernels.block_bytes, config.block_size, loaded.num_parameters),
        token_bytes=loaded.tokenizer.token_bytes,
        num_ids=loaded.tokenizer.size,
        eos_token_ids=loaded.generation.eos_token_ids,
    )
    return engine, runner
