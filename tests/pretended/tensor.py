"""A tensor that says it is on `cuda`, and whose values only the pretended GPU can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.pretended.memory import Block

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu

CUDA = torch.device("cuda", 0)


class GpuTensor(Tensor):
    """Holds a tensor of the CPU. To torch's C++ it is on `meta`, where nothing can read it by mistake."""

    gpu: Gpu
    block: Block
    raw: Tensor
    """The tensor of the CPU, which is written when the queue gets to it."""
    number: bool
    """Made from a number of Python: on a GPU it would be a scalar of the host."""

    @staticmethod
    def __new__(cls, raw: Tensor, gpu: Gpu, block: Block, number: bool = False) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device="meta",
        )
        made.raw, made.gpu, made.block, made.number = raw, gpu, block, number
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def held(self) -> Tensor:
        """The values, for assertions: everything that was launched has run. Not counted as a wait."""
        self.gpu.queue.drain()
        return self.raw

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a pretended GPU that is gone")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_indices(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_indices(key), value)

    def tolist(self) -> Any:
        self.gpu.wait("tolist")
        return self.raw.tolist()

    def data_ptr(self) -> int:
        raise RuntimeError("the address of a tensor on the GPU is asked for")

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.block.read[stream] = self.gpu.queue.launched

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({[*self.shape]}, {self.dtype})"


def _indices(key: Any) -> Any:
    """Lists as tensors of the host: torch would make one on what it takes for the device."""
    if isinstance(key, tuple):
        return tuple(_indices(part) for part in key)
    return torch.tensor(key, dtype=torch.int64) if isinstance(key, list) else key
