"""Every option of the worker, once: the command line, the environment and the engine's configuration come from here."""

from __future__ import annotations

import re
import socket
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from engine.config import EngineConfig, ModelOptions
from tokenmill.protocol.callback import AllowList
from tokenmill.protocol.environment import PREFIX
from tokenmill.protocol.job import MAX_TTL_MS
from tokenmill.protocol.url import check_url

_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
_LONGEST_TTL = MAX_TTL_MS // 1000
"""Seconds; Redis refuses an expiry of many digits, and with it the result that was to have it."""
_UNITS = {"": 1, "b": 1} | {
    unit: factor**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, factor in ((f"{prefix}ib", 1024), (prefix, 1024), (f"{prefix}b", 1000))
}


def parse_size(value: object) -> object:
    """Bytes from `2GiB`, `512MiB`, `1.5g`, `100MB` or a plain number; other types pass through to pydantic.

    Raises:
        ValueError: not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size such as 2GiB, 512MiB or 100MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes; written with a unit on the command line and in the environment."""
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A comma-separated list on the command line and in the environment."""


class Settings(BaseModel):
    """Immutable. A field `some_name` is the option `--some-name` and the variable `TOKENMILL_SOME_NAME`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    # What to serve
    model: str = Field(
        min_length=1,
        description="The model: `smollm2-135m` (the demo), a safetensors directory, a .gguf file or a hub name.",
    )
    served_model_name: Names = Field(
        default=(),
        description="Names that a job's `model` may give, comma-separated; the first is reported. "
        "Default: the model's own name.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Precision; auto: bf16 where the device computes in it, else fp32."
    )
    backend: Literal["auto", "fused", "transformers"] = Field(
        default="auto", description="Our fused decoder, or transformers' own model code over our attention."
    )
    attention: Literal["auto", "flash", "cpu", "reference"] = Field(
        default="auto",
        description="Attention kernels; auto: flash (flash-attn) on a GPU that has it, cpu on a CPU, else reference.",
    )
    quantize: Literal["none", "int8"] = Field(
        default="none", description="int8: 8-bit products in the fused decoder on the CPU; faster, a little less exact."
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the model. Default: torch's choice."
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Read special tokens that messages spell out, such as `</s>`, as such. Off: they are text.",
    )

    # Scheduling and memory
    max_num_seqs: int = Field(default=128, ge=1, description="Sequences running at once.")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Tokens computed in one step.")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest prompt plus output, in tokens. Default: the model's limit."
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="Most output tokens a job gets. Default: what the context leaves."
    )
    kv_cache_memory: Size | None = Field(
        default=None,
        ge=1,
        description="Memory of the KV pool, such as 2GiB. Default: 384 tokens a sequence, or one of full length, at "
        "most a quarter of the available memory; on a GPU 80 % of what the model leaves free.",
    )
    num_kv_blocks: int | None = Field(
        default=None, ge=1, description="KV pool in blocks, instead of --kv-cache-memory."
    )
    block_size: int | None = Field(
        default=None, ge=1, description="Tokens in a KV block. Default: 16; 256 with flash attention, which needs that."
    )
    swap_space: Size | None = Field(
        default=None,
        ge=0,
        description="Host memory for preempted sequences and evicted prefixes; 0: they are computed again. "
        "Default: a quarter of the KV pool, in a file all of it, at most 1GiB.",
    )
    swap_file: str | None = Field(
        default=None,
        description="Where to make a file that holds that host memory while the worker runs. Default: plain memory.",
    )
    max_overtakes: int = Field(
        default=16, ge=0, description="How often a job for which there is no room may be overtaken by smaller ones."
    )
    aging_seconds: float = Field(
        default=30, ge=0, description="How long a job of one lane may wait behind newcomers of the lane above."
    )
    enable_prefix_caching: bool = Field(default=True, description="Share KV blocks of equal prefixes.")

    # The queue
    redis: Annotated[str, AfterValidator(check_url)] = Field(
        default="redis://localhost:6379/0", description="URL of Redis or Valkey."
    )
    queue: str = Field(default="default", pattern=_NAME, description="Name of the queue.")
    prefix: str = Field(default="tokenmill", pattern=_NAME, description="First part of every key.")
    worker_name: str = Field(
        default_factory=lambda: re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "worker",
        pattern=_NAME,
        description="First part of this worker's name, before the process id and a random part. Default: the host.",
    )
    max_waiting: int = Field(
        default=64, ge=1, description="Jobs held that have not started yet; no more are read from the queue."
    )
    max_body_bytes: Size = Field(default=1 << 20, ge=1, description="Longest body of a job; a longer one is refused.")
    callback_hosts: Names = Field(
        default=(),
        description="What a job's `callback` may name, comma-separated: hosts for https, or whole origins such as "
        "http://collector.internal:8080. Default: nothing.",
    )
    max_attempts: int = Field(default=3, ge=1, description="Starts of a job before it is given up.")
    burst: bool = Field(default=False, description="Exit when the queue is empty.")

    # Times
    result_ttl_seconds: int = Field(default=86400, ge=1, le=_LONGEST_TTL, description="Life of a result.")
    stream_ttl_seconds: int = Field(
        default=900, ge=1, le=_LONGEST_TTL, description="Life of a job's token events after its end."
    )
    cancel_poll_ms: float = Field(default=50, gt=0, description="How often the cancel keys of held jobs are read.")
    lease_seconds: float = Field(
        default=30, ge=0.001, description="A job whose worker shows no sign of life for so long is taken over."
    )
    sweep_seconds: float | None = Field(
        default=None,
        gt=0,
        description="How often to look for jobs whose worker died; what was handed back is found at once. "
        "Default: half a lease.",
    )
    drain_seconds: float = Field(
        default=25, ge=0, description="After SIGTERM, how long running jobs may take before they are handed back."
    )
    stall_seconds: float = Field(
        default=120, gt=0, description="A single engine step longer than this ends the worker: its device hangs."
    )
    block_ms: int = Field(default=1000, ge=10, description="How long one read waits for new jobs.")

    # Watching
    http_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that --http-port listens on; 0.0.0.0 or :: for all. Whoever reaches it sees the metrics.",
    )
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of `/healthz`, `/readyz` and `/metrics`; 0 takes a free one. Default: none.",
    )

    # Logs
    log_format: Literal["console", "json"] = Field(default="console", description="Shape of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    log_prompts: bool = Field(
        default=False, description="Log the body of every job as it is read: prompts, which else are in no log."
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
        """Seconds between two sweeps."""
        return self.lease_seconds / 2 if self.sweep_seconds is None else self.sweep_seconds

    @property
    def lease_ms(self) -> int:
        return round(self.lease_seconds * 1000)

    @property
    def published(self) -> dict[Any, Any]:
        """What a worker writes into the queue's `meta`, for other workers and for clients."""
        return {
            "lease_ms": self.lease_ms,
            "result_ttl_seconds": self.result_ttl_seconds,
            "stream_ttl_seconds": self.stream_ttl_seconds,
        }

    def model_options(self) -> ModelOptions:
        return ModelOptions(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            backend=self.backend,
            quantize=self.quantize,
        )

    def engine_config(self) -> EngineConfig:
        """The number of blocks and the context are set once the model is known."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size or 0,
            prefix_caching=self.enable_prefix_caching,
            max_overtakes=self.max_overtakes,
            aging_seconds=self.aging_seconds,
        )


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def option(field: str) -> str:
    """The command-line option of a field."""
    return "--" + field.replace("_", "-")


VARIABLES = frozenset(map(variable, Settings.model_fields))
"""The environment variables of all fields."""
