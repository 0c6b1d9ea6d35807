"""Copies from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on the device. The copy to a GPU is from pinned memory, so the host does not wait."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
