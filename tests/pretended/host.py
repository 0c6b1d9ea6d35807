"""Pinned memory of the host, and the poison that shows what was read too early."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

_POISON = 0xA5
"""Byte of poisoned integers: neither a small number nor -1, which means something to kernels."""


class Pinned:
    """Knows which tensors of the host are in pinned memory."""

    def __init__(self) -> None:
        self._at: dict[int, weakref.ref[np.ndarray]] = {}  # type: ignore[type-arg]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a pinned tensor."""
        count = int(np.prod(shape, dtype=np.int64))
        memory = np.empty(max(1, count) * dtype.itemsize, dtype=np.uint8)
        address = memory.__array_interface__["data"][0]
        self._at[address] = weakref.ref(memory, lambda _: self._at.pop(address, None))
        return torch.from_numpy(memory)[: count * dtype.itemsize].view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy of a tensor of the host."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is pinned."""
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._at


def poison(tensor: Tensor) -> None:
    """Fill a tensor with what is certainly wrong: NaN, or a large negative integer."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.uint8:
        tensor.fill_(0xFF)  # NaN in every floating-point format that bytes of a KV pool are viewed as
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.fill_(int.from_bytes(bytes([_POISON] * tensor.element_size()), "little", signed=True))


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the byte behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start
