"""What the host hands to the device for a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor there. To a GPU it goes from pinned memory, so that the host waits for nothing."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
