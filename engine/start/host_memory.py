"""Allocates the memory of the host tier: plain, pinned beside a GPU, or a memory-mapped file."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_MAX_PIECE = 1 << 29
"""Bytes of the largest piece of pinned memory, unless a block is larger."""


def host_pieces(slots: int, block_bytes: int, file: str | None, device: torch.device) -> list[Tensor]:
    """Allocate the host tier beside a pool on `device`.

    Pinned memory is allocated in pieces of powers of two: torch's allocator rounds up to them, so a single tensor could
    take twice its size (pytorch/pytorch, issue 95823). A file is unlinked at once, so its space is free when the
    process ends, however it ends.

    Returns:
        Tensors uint8 `[some slots, block_bytes]`, together `slots` slots; one tensor, unless the memory is pinned.

    Raises:
        ValueError: the file exists, or the file system has no room for it.
    """
    if file is not None and slots:
        return [_mapped(slots, block_bytes, file)]
    if device.type != "cuda" or not slots:
        return [torch.empty((slots, block_bytes), dtype=torch.uint8)]
    pieces = []
    for size in piece_sizes(slots, block_bytes):
        fits = min(size // block_bytes, slots)
        slots -= fits
        piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pieces.append(piece[: fits * block_bytes].view(fits, block_bytes))
    return pieces


def piece_sizes(slots: int, block_bytes: int) -> list[int]:
    """Return the sizes in bytes, powers of two, of pieces that together hold `slots` whole blocks.

    Each piece wastes less than a block.
    """
    smallest = 1 << (block_bytes - 1).bit_length()
    sizes = []
    while slots > 0:
        wanted = slots * block_bytes
        size = max(smallest, min(max(_MAX_PIECE, smallest), 1 << (wanted.bit_length() - 1)))
        sizes.append(size)
        slots -= size // block_bytes
    return sizes


def _mapped(slots: int, block_bytes: int, file: str) -> Tensor:
    """Create a file and map it, uint8 `[slots, block_bytes]`."""
    size = slots * block_bytes
    try:
        with open(file, "xb") as made:
            try:
                os.posix_fallocate(made.fileno(), 0, size)
                mapped = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.unlink(file)
    except FileExistsError:
        raise ValueError(f"--swap-file: {file} exists and is not overwritten: remove it or name another file") from None
    except OSError as error:
        raise ValueError(f"{file} cannot hold {size} bytes of host tier: {error}") from error
    return mapped.view(slots, block_bytes)
