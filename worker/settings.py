"""All settings of a worker: the command line, the environment and the engine's configuration come from them."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from engine.config import (
    DEFAULTS,
    GPU_MEMORY_UTILIZATION,
    MODEL_DEFAULTS,
    Backend,
    Device,
    Dtype,
    EngineConfig,
    ModelOptions,
    Quantize,
)
from kernels.attention import AUTO, backend_names
from tokenmill.cli.settings import CommandSettings, Names, Size, variable
from tokenmill.protocol.callback import AllowList
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.job import MAX_TTL_MS
from tokenmill.protocol.keys import MAX_BODY_BYTES, NAME, RESULT_TTL_S, STREAM_TTL_S, Keys
from tokenmill.protocol.meta import PUBLISHED
from tokenmill.protocol.url import check_url

_KEYS = Keys()
"""Has the default names."""
_NAME = f"^{NAME.pattern}$"
_LONGEST_TTL = MAX_TTL_MS // 1000
"""Seconds. Redis refuses a longer expiry, and with it the result."""


if TYPE_CHECKING:  # a type checker does not know what the registry holds
    Attention = str
else:
    Attention = Literal[(AUTO, *backend_names())]


class Settings(CommandSettings):
    """The settings of a worker."""

    # What to serve
    model: str = Field(
        min_length=1,
        description="Model: `smollm2-135m` (the demo), a safetensors directory, a .gguf file or a hub name.",
    )
    served_model_name: Names = Field(
        default=(),
        description="Names that a job's `model` may have, comma-separated; results carry the first name. "
        "Default: the model's own name.",
    )
    device: Device = Field(default=MODEL_DEFAULTS.device, description="Device that runs the model.")
    dtype: Dtype = Field(
        default=MODEL_DEFAULTS.dtype,
        description="Precision; auto: bf16 if the device computes in it, else fp32, or fp16 on a GPU.",
    )
    backend: Backend = Field(
        default=MODEL_DEFAULTS.backend,
        description="Model code: our fused decoder, or transformers' code over our attention; auto: fused if it can "
        "run the model.",
    )
    attention: Attention = Field(
        default=AUTO,
        description=f"Attention backend; auto: the first of {', '.join(backend_names())} that runs the model on the "
        "device (triton and flash need a GPU; flash needs the package flash-attn).",
    )
    quantize: Quantize = Field(
        default=MODEL_DEFAULTS.quantize,
        description="8-bit matrix products in the fused decoder: int8, or fp8 on a GPU of compute capability 8.9 or "
        "newer; faster, slightly less exact.",
    )
    batch_invariant: bool = Field(
        default=MODEL_DEFAULTS.batch_invariant,
        description="Give each job the same bits whatever else is in the batch; slower on a GPU. On the CPU the fused "
        "decoder always does. Refused where it cannot hold.",
    )
    cuda_graphs: Literal["on", "off"] = Field(
        default="on",
        description="Run decode steps on a GPU as CUDA graphs, which are captured at the start. off: each kernel is "
        "launched by itself; slower.",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads that run the model. Default: torch's choice."
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Read special tokens in the text of messages, such as `</s>`, as special tokens. Off: as text.",
    )

    # Scheduling and memory
    max_num_seqs: int = Field(default=DEFAULTS.max_num_seqs, ge=1, description="Maximum number of running sequences.")
    max_num_batched_tokens: int = Field(
        default=DEFAULTS.max_num_batched_tokens, ge=1, description="Maximum number of tokens computed in one step."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Maximum length of prompt plus output, in tokens. Default: the model's limit."
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of output tokens of a job. Default: the rest of the context."
    )
    kv_cache_memory: Size | None = Field(
        default=None,
        ge=1,
        description="Memory of the KV pool, such as 2GiB. Default: 384 tokens for each of --max-num-seqs, or one "
        "sequence of full length, at most a quarter of the available memory; on a GPU what --gpu-memory-utilization "
        "leaves.",
    )
    gpu_memory_utilization: float = Field(
        default=GPU_MEMORY_UTILIZATION,
        gt=0,
        le=1,
        description="Share of the GPU's memory for weights, the largest step, CUDA graphs and KV pool together. What "
        "the first three take is measured at the start; the pool gets the rest.",
    )
    num_kv_blocks: int | None = Field(
        default=None, ge=1, description="Number of blocks in the KV pool, instead of --kv-cache-memory."
    )
    block_size: int | None = Field(
        default=None, ge=1, description="Tokens in a KV block. Default: 16; 256 with flash attention (required there)."
    )
    swap_space: Size | None = Field(
        default=None,
        ge=0,
        description="Host memory for preempted sequences and evicted prefixes; 0: these are computed again. "
        "Default: a quarter of the KV pool's size, with --swap-file the whole size, at most 1GiB.",
    )
    swap_file: str | None = Field(
        default=None,
        description="Path of a file to create for --swap-space; its space is freed at the worker's end. "
        "Default: plain memory.",
    )
    max_overtakes: int = Field(
        default=DEFAULTS.max_overtakes,
        ge=0,
        description="How often smaller jobs may overtake a job that does not fit into the KV pool yet.",
    )
    aging_seconds: float = Field(
        default=DEFAULTS.aging_seconds,
        ge=0,
        description="How long new jobs of the next higher lane are served before a waiting job.",
    )
    enable_prefix_caching: bool = Field(
        default=DEFAULTS.prefix_caching, description="Share the KV blocks of equal prompt prefixes."
    )
    overlap: Literal["on", "off"] | None = Field(
        default=None,
        description="Schedule a step while the device computes the step before it. Default: on for a GPU, else off.",
    )

    # The queue
    redis: Annotated[str, AfterValidator(check_url)] = Field(default=DEFAULT_URL, description="URL of Redis or Valkey.")
    queue: str = Field(default=_KEYS.queue, pattern=_NAME, description="Name of the queue.")
    prefix: str = Field(default=_KEYS.prefix, pattern=_NAME, description="Prefix of every Redis key.")
    worker_name: str = Field(
        default_factory=lambda: re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "worker",
        pattern=_NAME,
        description="First part of this worker's name; process id and a random part follow. Default: the host's name.",
    )
    max_waiting: int = Field(
        default=64, ge=1, description="Maximum number of jobs that are read from the queue ahead of their start."
    )
    max_body_bytes: Size = Field(
        default=MAX_BODY_BYTES, ge=1, description="Maximum size of a job's body; a larger body is refused."
    )
    callback_hosts: Names = Field(
        default=(),
        description="Hosts that a job's `callback` may name, comma-separated: a host for https, or a whole origin "
        "such as http://collector.internal:8080. Default: none.",
    )
    max_attempts: int = Field(default=3, ge=1, description="Number of starts after which a job is given up.")
    burst: bool = Field(default=False, description="Exit when the queue is empty.")

    # Times
    result_ttl_seconds: int = Field(
        default=RESULT_TTL_S, ge=1, le=_LONGEST_TTL, description="How long a result is kept."
    )
    stream_ttl_seconds: int = Field(
        default=STREAM_TTL_S,
        ge=1,
        le=_LONGEST_TTL,
        description="How long a job's token events are kept after its end.",
    )
    cancel_poll_ms: float = Field(
        default=50, gt=0, description="Interval at which the cancel keys of held jobs are read."
    )
    lease_seconds: float = Field(
        default=30,
        ge=0.001,
        description="Time without a sign of life of a worker after which other workers take its jobs over.",
    )
    sweep_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Interval of the search for jobs of dead workers; jobs that were handed back are found at once. "
        "Default: half a lease.",
    )
    drain_seconds: float = Field(
        default=25, ge=0, description="How long jobs may keep running after SIGTERM before they are handed back."
    )
    stall_seconds: float = Field(
        default=120,
        gt=0,
        description="Maximum duration of an engine step; a longer step means that the device hangs: the worker ends.",
    )
    block_ms: int = Field(default=1000, ge=10, description="How long one read waits for new jobs.")

    # Watching
    http_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that --http-port listens on; 0.0.0.0 or :: for all. Every host that reaches it can read "
        "the metrics.",
    )
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for `/healthz`, `/readyz` and `/metrics`; 0 takes a free one. Default: none.",
    )

    # Logs
    log_format: Literal["console", "json"] = Field(default="console", description="Format of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Minimum log level.")
    log_prompts: bool = Field(
        default=False, description="Log the body of every job that is read. Off: no prompt is logged."
    )

    @field_validator("callback_hosts")
    @classmethod
    def _callback_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        AllowList.of(entries)
        return entries

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ValueError("give --kv-cache-memory or --num-kv-blocks, not both")
        if self.stream_ttl_seconds > self.result_ttl_seconds:
            raise ValueError("--stream-ttl-seconds must not be longer than --result-ttl-seconds")
        return self

    @property
    def sweep_every(self) -> float:
        """Seconds between two searches for jobs of dead workers."""
        return self.lease_seconds / 2 if self.sweep_seconds is None else self.sweep_seconds

    @property
    def lease_ms(self) -> int:
        return round(self.lease_seconds * 1000)

    @property
    def published(self) -> dict[Any, Any]:
        """The fields that a worker writes into the queue's `meta`, for other workers and for clients."""
        return {name: getattr(self, name) for name in PUBLISHED}

    def model_options(self) -> ModelOptions:
        """Return the settings of the model: which model, on which device, in which precision."""
        return ModelOptions(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            backend=self.backend,
            quantize=self.quantize,
            batch_invariant=self.batch_invariant,
        )

    def engine_config(self) -> EngineConfig:
        """Return the engine's limits; the number of blocks and the context are set once the model is known."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size or 0,
            prefix_caching=self.enable_prefix_caching,
            max_overtakes=self.max_overtakes,
            aging_seconds=self.aging_seconds,
            overlap=None if self.overlap is None else self.overlap == "on",
        )


VARIABLES = frozenset(map(variable, Settings.model_fields))
"""The environment variables of all fields."""
