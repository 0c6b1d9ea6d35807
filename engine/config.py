"""Every option of the engine and its default. The worker's settings build these; nothing in the engine reads the
environment. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, where, in what precision."""

    model: str
    """`smollm2-135m` (the demo model), a safetensors directory, a `.gguf` file, or a Hugging Face hub name."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    dtype: str = "auto"
    """`auto`, `bfloat16`, `float16` or `float32`; auto takes bf16 where the device computes in it, else fp32."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output, in tokens; None takes the model's own limit."""
    backend: str = "auto"
    """`auto`, `fused` (the config-driven decoder) or `transformers` (any model it can run)."""
    quantize: str = "none"
    """`none`, or `int8`: the fused decoder's linears on the CPU multiply 8-bit weights and inputs."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of scheduling and memory."""

    max_num_seqs: int = 128
    """Sequences running at once."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, over all sequences."""
    max_model_len: int = 2048
    """Longest sequence, prompt and output, in tokens."""
    block_size: int = 16
    """Tokens in a KV block; 0 takes what suits the attention backend, see `engine.build`."""
    num_blocks: int = 1024
    """Blocks in the KV pool."""
    watermark: float = 0.01
    """Share of the pool kept free when admitting, so that what runs can grow a little before it preempts."""
    prefix_caching: bool = True
    host_slots: int = 0
    """Blocks in the host tier; 0 means that preempted sequences are always recomputed."""
    max_overtakes: int = 16
    """How often a waiting sequence for which there is no room may be overtaken by smaller ones."""
    aging_seconds: float = 30
    """How much longer each lower lane waits at most: after that it goes before newcomers of the lane above."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.block_size < 0:
            raise ValueError(f"block_size must not be negative, as {self.block_size} is")

    @property
    def capacity(self) -> int:
        """The longest sequence that can ever finish, in tokens: what the model allows and the whole pool holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


DEFAULTS = EngineConfig()
"""The defaults, for the command line; a value that is set nowhere else has its only home above."""
