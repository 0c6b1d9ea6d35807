"""Engines whose steps go through a `DeviceRunner`, on the CPU."""

from __future__ import annotations

from typing import Any

from engine.device_runner import DeviceRunner
from engine.engine import Engine
from engine.host_tier import HostTier
from engine.runner import ModelRunner


def on_device(engine: Engine, **changes: Any) -> DeviceRunner:
    """Give an engine that has not run a `DeviceRunner` over its model and pool, and return that."""
    runner, config = engine.runner, engine.config
    assert isinstance(runner, ModelRunner)
    half = runner.host.shape[0] // 2
    made = DeviceRunner(
        runner.model,
        runner.sampler,
        **{
            "backend": runner.model.backend,  # type: ignore[attr-defined]
            "pool": runner.pool,
            "host": HostTier([runner.host[:half], runner.host[half:]]),
            "eos_token_ids": runner.eos_token_ids,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            **changes,
        },
    )
    engine.runner = engine._canary._runner = engine._pipeline._runner = engine._live._runner = made
    return made
