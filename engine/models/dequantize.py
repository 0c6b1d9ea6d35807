"""Dequantises GGUF tensors, with the same bits as the library `gguf`.

A few thousand blocks at a time go through a small buffer, which stays in the CPU's cache, into the result's own type.
The most common types are computed in torch; the library computes the others.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.models.gguf_reader import GgufTensor
from engine.models.weights import LoadError

_AT_ONCE = 1 << 15
"""Numbers that are computed at once: a multiple of each block size, and so few that torch uses one thread."""
_PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize(tensor: GgufTensor, part: int | None, dtype: torch.dtype) -> Tensor:
    """Dequantise a tensor; each number is rounded once, from fp32 to `dtype`.

    Args:
        part: which slice of the first dimension; None: all of it.

    Raises:
        LoadError: no code here or in `gguf` reads this type.
    """
    data, shape = tensor.data, tensor.shape
    if part is not None:
        data, shape = data[part], shape[1:]
    out = torch.empty(shape, dtype=dtype)
    if tensor.type in _PLAIN:
        return out.copy_(torch.from_numpy(np.ascontiguousarray(data)).view(_PLAIN[tensor.type]).view(shape))
    block, size = GGML_QUANT_SIZES[tensor.type]
    blocks, flat = torch.from_numpy(data.reshape(-1, size)), out.view(-1, block)
    step = _AT_ONCE // block
    compute = _FAST.get(tensor.type) or _of_library(tensor)
    buffer = torch.empty(step, block)
    for start in range(0, flat.shape[0], step):
        some = blocks[start : start + step]
        flat[start : start + step] = compute(some, buffer[: some.shape[0]])
    return out


def _of_library(tensor: GgufTensor) -> Callable[[Tensor, Tensor], Tensor]:
    kind = tensor.type

    def compute(blocks: Tensor, buffer: Tensor) -> Tensor:
        try:
            # As one row, since the library loops over rows in Python.
            return torch.from_numpy(gguf.dequantize(blocks.numpy().reshape(1, -1), kind)).view_as(buffer)
        except NotImplementedError as error:
            raise LoadError(f"tensor {tensor.name!r} is quantised as {kind.name}, which can't be read") from error

    return compute


def _scales(blocks: Tensor, count: int) -> Tensor:
    """Return the `count` fp16 numbers at the beginning of each block, fp32 `[blocks, count]`."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, start: int, out: Tensor) -> Tensor:
    """Return the 4-bit numbers from byte `start` of each block: all low halves, then all high halves."""
    packed = blocks[:, start:].contiguous().view(torch.int32)  # four bytes at a time
    halves = torch.stack((packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F), 1)
    return out.copy_(halves.view(torch.uint8).view(out.shape))


def _q4_0(blocks: Tensor, out: Tensor) -> Tensor:
    return _nibbles(blocks, 2, out).sub_(8).mul_(_scales(blocks, 1))


def _q4_1(blocks: Tensor, out: Tensor) -> Tensor:
    scales = _scales(blocks, 2)
    return _nibbles(blocks, 4, out).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> Tensor:
    return out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_scales(blocks, 1))


_FAST: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
