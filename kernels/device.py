"""Copies between host and device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device; see `upload`. On a CPU they share memory: do not change it."""
    return _moved(torch.from_numpy(values), device)


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on the device, copied to a GPU from pinned memory, so that the host does not wait."""
    return _moved(torch.tensor(values, dtype=dtype), device)


def _moved(made: Tensor, device: torch.device) -> Tensor:
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def aligned(count: int) -> int:
    """Round a number of int32 up to 16 bytes: Triton compiles a kernel again for an address of another alignment."""
    return -(-count // 4) * 4


class Download:
    """Copies tensors of a device to pinned host memory, after all work that was launched before.

    On a CPU there is nothing to copy, and `wait` returns the tensors themselves.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._copies = tensors
            return
        self._copies = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors)
        for copy, source in zip(self._copies, tensors, strict=True):
            copy.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the copies are done, and return them: tensors of the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copies
