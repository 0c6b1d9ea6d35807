"""Divides the memory of a GPU: weights, the largest step and CUDA graphs are measured, the KV pool gets the remainder.

`--gpu-memory-utilization` is a share of the card's total memory. This process may take that much for everything
together, as in vLLM. Memory of other processes does not count towards the share, but the share must be free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import torch

from engine.config import EngineConfig, ModelOptions
from kernels.linear_cuda import FP8_CAPABILITY, INT8_CAPABILITY

log = structlog.get_logger()

GIB = 1 << 30
_MIB = 1 << 20
_SLACK = 256 << 20
"""Bytes by which a process may exceed its share without a warning: torch's allocator reserves more than it uses."""
_CONTEXT = GIB
"""Of the memory that is taken before the model is loaded, at most this much counts as the CUDA context of this process;
the other bytes belong to other processes. A context takes 0.3 to 0.6 GiB."""
_LARGE_STEP = 0.05
"""Share of the budget above which the advice names options that make the largest step smaller."""
_BF16 = (8, 0)
"""Minimum compute capability for bf16, below which it is emulated."""


class DoesNotFit(ValueError):
    """The model, one step or one KV block does not fit into the memory that this worker may take."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory of a GPU at one moment, in bytes."""

    total: int
    free: int
    reserved: int
    """Held by torch's allocator."""
    allocated: int
    """Held by tensors; a part of `reserved`."""

    @classmethod
    def of(cls, device: torch.device) -> Snapshot:
        """Measure the memory now."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    @property
    def outside(self) -> int:
        """Bytes that are taken, but not by torch's allocator: CUDA's context, libraries, other processes."""
        return max(0, self.total - self.free - self.reserved)

    @property
    def available(self) -> int:
        """Bytes that this process may still put into tensors."""
        return self.free + self.reserved - self.allocated


class DeviceMemory:
    """The account of one worker's memory on a GPU, from before the model is loaded until the KV pool is allocated."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        """Take the first measurement. `utilization`: share of the card's total memory for this worker, 0 to 1."""
        self.device = device
        self.utilization = utilization
        self.start = Snapshot.of(device)
        self.weights = 0
        """Bytes of the weights."""
        self.step = 0
        """Peak of the largest step, without the weights, in bytes."""
        self.libraries = min(self.start.outside, _CONTEXT)
        """Bytes of CUDA's context and of what libraries allocate themselves."""
        self.graphs = 0
        """Bytes of CUDA graphs."""

    @property
    def budget(self) -> int:
        """Bytes that this process may take."""
        return int(self.start.total * self.utilization)

    @property
    def elsewhere(self) -> int:
        """Bytes that other processes, and earlier engines of this process, held at the start."""
        return max(0, self.start.outside - _CONTEXT) + self.start.allocated

    @property
    def step_is_large(self) -> bool:
        """Whether a smaller largest step would leave noticeably more for the KV pool."""
        return self.step > _LARGE_STEP * self.budget

    @property
    def room(self) -> int:
        """Bytes that are left for the KV pool; negative if the parts take more than the budget."""
        return self.budget - self.weights - self.step - self.libraries - self.graphs

    def loaded(self) -> None:
        """Measure the weights, after freeing memory that only loading needed."""
        torch.cuda.empty_cache()
        self.weights = torch.cuda.memory_allocated(self.device) - self.start.allocated

    def measure(self, run: Callable[[], object]) -> None:
        """Measure the peak of `run`, which computes the largest step, beyond what is allocated before it."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        self.step = max(self.step, torch.cuda.max_memory_allocated(self.device) - before)
        grown = Snapshot.of(self.device).outside - self.start.outside
        self.libraries = min(self.start.outside, _CONTEXT) + max(0, grown)
        torch.cuda.empty_cache()

    def measure_graphs(self, capture: Callable[[], tuple[int, int]]) -> None:
        """Measure what CUDA graphs will take.

        Args:
            capture: captures the graphs with the most rows, whose pool the other graphs share; returns the number of
                captured graphs, and of all that will be captured. Each graph also takes memory of the driver.
        """
        torch.cuda.empty_cache()
        before = Snapshot.of(self.device)
        captured, planned = capture()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        after = Snapshot.of(self.device)
        pool = max(0, after.reserved - before.reserved)
        driver = max(0, after.outside - before.outside)
        self.graphs = pool + driver * planned // max(1, captured)

    def check_end(self, sized: bool) -> None:
        """Log a warning if this process takes more than its share once everything is allocated.

        Args:
            sized: whether the operator gave the size of the pool, so that the share does not count.
        """
        now = Snapshot.of(self.device)
        taken = now.total - now.free - self.elsewhere
        if not sized and taken > self.budget + _SLACK:
            log.warning(
                "gpu_share_exceeded",
                taken_mib=taken >> 20,
                budget_mib=self.budget >> 20,
                hint="lower --gpu-memory-utilization if other processes need the difference",
            )

    def fields(self) -> dict[str, float]:
        """Return the parts in MiB, for the log."""
        parts = {
            "total": self.start.total,
            "budget": self.budget,
            "weights": self.weights,
            "step": self.step,
            "libraries": self.libraries,
            "graphs": self.graphs,
            "kv_pool": max(0, self.room),
            "other_processes": self.elsewhere,
        }
        return {f"{name}_mib": round(size / _MIB, 1) for name, size in parts.items()}

    def check_start(self) -> None:
        """Check that the budget is free.

        Raises:
            DoesNotFit: other processes hold a part of it.
        """
        context = min(self.start.outside, _CONTEXT)
        if self.start.available + context >= self.budget:
            return
        most = math.floor(self._largest_share * 100) / 100
        raise DoesNotFit(
            f"{_gib(self.start.available)} of the GPU's {_gib(self.start.total)} are free, other processes hold "
            f"{_gib(self.elsewhere)}: end them, or set --gpu-memory-utilization {most:.2f} or lower "
            f"(it is {self.utilization:g}, {_gib(self.budget)})"
        )

    def check_room(self, name: str, block: str, block_bytes: int, advice: Seq[str]) -> None:
        """Check that the budget holds one KV block beside everything that was measured.

        Args:
            name: the model.
            block: describes a block, such as `a KV block of 16 tokens (2.0 MiB)`.
            block_bytes: bytes of a block.
            advice: options that make the parts smaller.

        Raises:
            DoesNotFit: it does not; the message says how much is missing, and what would help.
        """
        missing = block_bytes - self.room
        if missing <= 0:
            return
        share = math.ceil((self.budget + missing) / self.start.total * 100) / 100
        if share <= self._largest_share:
            advice = (f"--gpu-memory-utilization {share:.2f} or higher", *advice)
        limit = f"{_gib(self.budget)} (--gpu-memory-utilization {self.utilization:g} of {_gib(self.start.total)})"
        raise self._refusal(name, f"{block} in {limit}: {_mib(missing)} are missing", advice)

    @property
    def _largest_share(self) -> float:
        """The largest `--gpu-memory-utilization` that was free at the start."""
        context = min(self.start.outside, _CONTEXT)
        return max(0.0, min(1.0, (self.start.available + context) / self.start.total - 0.005))

    def _refusal(self, name: str, missing: str, advice: Seq[str]) -> DoesNotFit:
        """Return the error of a model that does not fit; `missing`: what does not fit, and where."""
        parts = [f"{_gib(self.weights)} weights"]
        for size, part in (
            (self.step, "largest step"),
            (self.libraries, "CUDA and libraries"),
            (self.graphs, "CUDA graphs"),
        ):
            if size:
                parts.append(f"{_gib(size)} {part}")
        held = f" (other processes hold {_gib(self.elsewhere)})" if self.elsewhere else ""
        return DoesNotFit(
            f"{name} does not fit on the GPU: {' + '.join(parts)} leave no room for {missing}{held}. "
            f"What would help: {', '.join(advice)}"
        )

    @contextmanager
    def guard(self, name: str, missing: str, advice: Seq[str]) -> Iterator[None]:
        """Turn an out-of-memory error inside the block into a `DoesNotFit` whose message says what would help.

        The GPU is full then, whatever share of it this worker may take.

        Args:
            name: the model.
            missing: what is allocated.
            advice: options that would help.

        Raises:
            DoesNotFit: the device is full.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            held = torch.cuda.memory_allocated(self.device) - self.start.allocated
            self.weights = self.weights or held
            raise self._refusal(name, f"{missing} in {_gib(self.start.total)}", advice) from error


def lighter_weights(options: ModelOptions, device: torch.device, *, fused: bool = True) -> tuple[str, ...]:
    """Return what makes the weights smaller, the most effective option first.

    Args:
        options: the operator's choices.
        device: the GPU; only what it can do is returned.
        fused: whether the fused decoder runs the model, as far as is known.
    """
    found = []
    capability = torch.cuda.get_device_capability(device)
    if options.dtype == "float32":
        found.append(f"--dtype {'bfloat16' if capability >= _BF16 else 'float16'} (half the weights)")
    if options.quantize == "none" and fused and options.backend != "transformers" and capability >= INT8_CAPABILITY:
        quantize = "fp8" if capability >= FP8_CAPABILITY else "int8"
        found.append(f"--quantize {quantize} (about half the weights of bf16)")
    return (*found, "a smaller model or a larger GPU")


def smaller_steps(options: ModelOptions, config: EngineConfig) -> tuple[str, ...]:
    """Return what makes the largest step smaller."""
    found = [
        f"{name} below {limit}"
        for name, limit in (
            ("--max-num-batched-tokens", config.max_num_batched_tokens),
            ("--max-num-seqs", config.max_num_seqs),
        )
        if limit > 1
    ]
    if options.max_model_len is None:
        found.append(f"--max-model-len below {config.max_model_len} (the model's own limit)")
    return tuple(found)


def smaller_pool(cache_option: str | None, utilization: float) -> tuple[str, ...]:
    """Return what makes the KV pool smaller.

    Args:
        cache_option: the option that gave its size; None: it was measured.
        utilization: share of the GPU of this worker.
    """
    if cache_option is None:
        return (f"--gpu-memory-utilization below {utilization:g}",)
    return (f"a lower {cache_option} or none, so that the size is measured",)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
