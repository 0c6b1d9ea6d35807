"""A GPU that is none: tensors that say they are on `cuda`, compute on the CPU, and refuse what a GPU refuses.

Inside `pretend_gpu()` torch sees one GPU that is as late as it may be: nothing runs before the host waits for it. An
upload from pinned memory reads its source then, and a download holds poison until then, so what the host overwrites or
reads too early is wrong each time. Every wait is noted, by name and line. Operations on tensors of both sides fail, and
so does asking for the address of one on the GPU. Graphs record operations, refuse waits and uploads, and replay on the
same tensors. Memory is counted as by PyTorch's allocator. Where `TRITON_INTERPRET=1`, Triton kernels run in Triton's
interpreter. Numbers are the CPU's: rounding and speed of a GPU are not shown. The parts are in `tests/pretended`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from transformers.generation import GenerationMixin  # noqa: F401 - it makes a type of torch.cuda.Event when imported

from tests.pretended.gpu import Gpu, Wait
from tests.pretended.graphs import CudaGraph, capture
from tests.pretended.streams import Event, Stream, on_stream
from tests.pretended.tensor import GpuTensor
from tests.pretended.triton import triton_on

__all__ = ["Gpu", "GpuTensor", "Wait", "pretend_gpu"]

_TOTAL = 1 << 25
_device_constructors()  # keeps the first `torch.tensor` that it sees, which must not be the one in the place of torch's


def _tensor(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` that reaches the GPU by way of an ordinary copy."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        on_host = real(data, **kwargs)
        return on_host if device is None else on_host.to(device)

    return made


def _functions(gpu: Gpu, capability: tuple[int, int], name: str) -> dict[str, Any]:
    """Return what stands in the place of functions and classes of `torch.cuda`."""
    memory = gpu.memory
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory.total, multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10, warp_size=32, L2_cache_size=50 << 20,
    )  # fmt: skip
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (memory.free(), memory.total),
        "memory_allocated": lambda device=None: memory.live,
        "memory_reserved": lambda device=None: memory.reserved(),
        "max_memory_allocated": lambda device=None: memory.peak,
        "max_memory_reserved": lambda device=None: memory.peak_reserved,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
        "empty_cache": memory.empty_cache,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "Event": partial(Event, gpu),
        "Stream": partial(Stream, gpu),
        "stream": partial(on_stream, gpu),
        "current_stream": lambda device=None: gpu.stream,
        "default_stream": lambda device=None: gpu.default_stream,
        "CUDAGraph": partial(CudaGraph, gpu),
        "graph": partial(capture, gpu),
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }


@contextmanager
def pretend_gpu(
    *,
    total: int = _TOTAL,
    others: int = 0,
    capability: tuple[int, int] = (9, 0),
    name: str = "Pretended GPU",
    stand_ins: bool = False,
) -> Iterator[Gpu]:
    """Let torch see one GPU until the end of the block.

    Args:
        total: bytes of its memory.
        others: bytes that the driver and other processes hold.
        capability: its compute capability.
        name: its name.
        stand_ins: play Triton kernels in torch where this process does not interpret them (`tests/pretended/kernels`).
    """
    gpu = Gpu(total, others)
    with ExitStack() as stack:
        for function, stand_in in _functions(gpu, capability, name).items():
            stack.enter_context(mock.patch(f"torch.cuda.{function}", stand_in))
        stack.enter_context(triton_on(gpu, stand_ins=stand_ins))
        for function in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch(f"torch.{function}", _tensor(getattr(torch, function))))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda x, device=None: gpu.pinned.copy(x)))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda x, device=None: gpu.pinned.holds(x)))
        stack.enter_context(torch.inference_mode())  # autograd would look for the device before an operation gets here
        stack.enter_context(gpu)
        yield gpu
