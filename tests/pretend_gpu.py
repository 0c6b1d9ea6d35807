"""A GPU that is none: tensors that say they are on `cuda`, compute on the CPU, and refuse what a GPU refuses.

Inside `pretend_gpu()` torch sees one GPU. An operation on tensors of both sides fails, as on the real thing, and so
does asking for the address of one that is on the GPU, which compiled CPU kernels would take for theirs. How often the
host waits for the device is counted. Numbers are the CPU's: rounding, memory, streams and speed of a GPU are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_GPU = torch.device("cuda", 0)
_FREE = 1 << 24
"""Bytes that seem to be free."""
_COPIES = ("to", "_to_copy", "copy_")
"""Operations that may see both sides."""
_INDEXED = ("index", "index_put_", "index_put")
"""Operations whose indices may be on the host."""
_WAITS = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal")
"""Operations whose result, or its shape, the host must know."""


class GpuTensor(Tensor):
    """Holds a tensor of the CPU. To torch's C++ it is on `meta`, where nothing can read it by mistake."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, gpu: Gpu) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held, made.gpu = held, gpu
        return made

    gpu: Gpu
    device = property(lambda self: _GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a pretended GPU that is gone")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_indices(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_indices(key), value)

    def tolist(self) -> Any:
        self.gpu.waits += 1
        return self.held.tolist()

    def data_ptr(self) -> int:
        raise RuntimeError("the address of a tensor on the GPU is asked for")

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.held})"


class Gpu(TorchDispatchMode):
    """Runs every operation of torch while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        """How often the host had to wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = _asked_device(args, kwargs)
        if device is not None and device.type == "meta" and name != "scalar_tensor":
            return func(*args, **kwargs)  # models are laid out there first; a number that is assigned is for the GPU
        if name == "_has_compatible_shallow_copy_type":
            return isinstance(args[0], GpuTensor) == isinstance(args[1], GpuTensor)
        if name in _COPIES:
            self._count_copy(name, args, kwargs)
        else:
            _refuse_mix(name, args, tensors)
        if name in _WAITS and any(isinstance(x, GpuTensor) for x in tensors):
            self.waits += 1
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        here = device is None and any(isinstance(x, GpuTensor) for x in tensors)
        there = here or (device is not None and device.type != "cpu")
        if name == "copy_":
            there = isinstance(args[0], GpuTensor)
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        return tree_map(lambda x: GpuTensor(x, self) if there and isinstance(x, Tensor) else x, out)

    def _count_copy(self, name: str, args: Any, kwargs: Any) -> None:
        """A copy between the two sides is waited for unless it is asked not to be."""
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
        device = _asked_device(args, kwargs)
        was = isinstance(source, GpuTensor)
        becomes = was if device is None else device.type != "cpu"
        if target is not None:
            becomes = isinstance(target, GpuTensor)
        flags = [x for x in args if isinstance(x, bool)] + [kwargs.get("non_blocking")]
        if was != becomes and not flags[0]:
            self.waits += 1


def _refuse_mix(name: str, args: Any, tensors: list[Tensor]) -> None:
    if name in _INDEXED:
        tensors = [args[0], *args[2:]] if len(args) > 2 else [args[0]]
        tensors = [x for x in tensors if isinstance(x, Tensor)]
    sides = {isinstance(x, GpuTensor) for x in tensors if x.dim() or isinstance(x, GpuTensor)}
    if len(sides) > 1:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


def _indices(key: Any) -> Any:
    """Lists as tensors of the host: torch would make one on what it takes for the device."""
    if isinstance(key, tuple):
        return tuple(_indices(part) for part in key)
    return torch.tensor(key, dtype=torch.int64) if isinstance(key, list) else key


def _asked_device(args: Any, kwargs: Any) -> torch.device | None:
    asked = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
    return None if asked is None else torch.device(asked)


def _held(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.held if isinstance(x, GpuTensor) else x


def _tensor(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` that reaches the GPU by way of an ordinary copy."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        on_host = real(data, **kwargs)
        return on_host if device is None else on_host.to(device)

    return made


def _itself(x: Tensor) -> Tensor:
    return x


@contextmanager
def pretend_gpu() -> Iterator[Gpu]:
    """One GPU for torch, until the end of the block."""
    gpu = Gpu()
    with (
        mock.patch("torch.cuda._lazy_init", return_value=None),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.mem_get_info", return_value=(_FREE, 2 * _FREE)),
        mock.patch("kernels.attention.triton._kernels", side_effect=ValueError("Triton compiles for no pretended GPU")),
        mock.patch("kernels.triton._installed", return_value=False),
        mock.patch("torch.tensor", _tensor(torch.tensor)),
        mock.patch.object(Tensor, "pin_memory", _itself),
        torch.inference_mode(),  # autograd would look for the device before an operation gets here
        gpu,
    ):
        yield gpu
