"""Every option of the engine and its default. The worker's settings build these; nothing in the engine reads the
environment. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Backend = Literal["auto", "fused", "transformers"]
Quantize = Literal["none", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to load, on which device, in which precision."""

    model: str
    """`smollm2-135m` (the demo model), a safetensors directory, a `.gguf` file, or a Hugging Face hub name."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    """auto: bf16 if the device has it, else fp32 (fp16 on a GPU)."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output, in tokens; None: the model's own limit."""
    backend: Backend = "auto"
    """The config-driven decoder (fused), or the code of transformers; auto: fused if possible."""
    quantize: Quantize = "none"
    """int8, fp8: the linear layers of the fused decoder multiply 8-bit weights and inputs; fp8 on a GPU of compute
    capability 8.9 or newer."""
    batch_invariant: bool = False
    """Compute a request on a GPU with bits that do not depend on other requests, at a price. On the CPU they never
    do in the fused decoder; this makes loading fail where they would."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of scheduling and memory."""

    max_num_seqs: int = 128
    """Maximum number of running sequences."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens computed in one step, over all sequences."""
    max_model_len: int = 2048
    """Longest sequence, prompt and output, in tokens."""
    block_size: int = 16
    """Tokens in a KV block; 0: the preferred size of the attention backend, see `engine.build`."""
    num_blocks: int = 1024
    """Blocks in the KV pool."""
    watermark: float = 0.01
    """Share of the pool that an admission leaves free, so that running sequences can grow without a preemption."""
    prefix_caching: bool = True
    host_slots: int = 0
    """Blocks in the host tier; 0: preempted sequences are always recomputed."""
    max_overtakes: int = 16
    """How often other sequences may be admitted before a waiting sequence for which there is no room."""
    aging_seconds: float = 30
    """Seconds after which a waiting request is served before new requests of the next higher lane."""
    overlap: bool | None = None
    """Whether a step is scheduled and launched while the device computes the step before it. None: no; `engine.build`
    replaces None by yes on a GPU."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.block_size < 0:
            raise ValueError(f"block_size must be 0 or more, not {self.block_size}")

    @property
    def capacity(self) -> int:
        """Length of the longest sequence that can ever finish, in tokens: `max_model_len`, or what the pool holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


GPU_MEMORY_UTILIZATION = 0.9
"""Default share of a GPU's total memory that a worker may take."""
DEFAULTS = EngineConfig()
MODEL_DEFAULTS = ModelOptions(model="")
"""The default values, for the command line."""
