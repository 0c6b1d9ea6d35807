"""Memory of the pretended GPU: bytes of live tensors, as PyTorch's caching allocator counts them."""

from __future__ import annotations

import torch

_GRAIN = 512
"""Sizes are rounded up to a multiple of this, as by PyTorch's allocator."""


class Block:
    """The memory of a tensor and its views. It is free when the last of them is deleted."""

    def __init__(self, share: Share, size: int, shape: tuple[int, ...]) -> None:
        self.share = share
        self.size = size
        self.shape = shape
        self.computed = True
        """False from a capture until the graph's first replay."""
        self.written: tuple[object, int] | None = None
        """Stream and ticket of the last operation that wrote."""
        self.read: dict[object, int] = {}
        """Stream → ticket of its last operation that read."""

    def __del__(self) -> None:
        self.share.free(self.size)


class Share:
    """A part of the memory that is reserved as one: the ordinary cache, or the pool of graphs."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.live = 0
        self.reserved = 0
        self.graphs = 0
        """Graphs that were captured into this pool and live."""

    def allocate(self, nbytes: int, shape: tuple[int, ...]) -> Block:
        """Return a block.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """
        size = -(-nbytes // _GRAIN) * _GRAIN
        more = self.live + size - self.reserved
        if more > 0 and more > self.memory.free():
            self.memory.empty_cache()
            more = self.live + size - self.reserved
        if more > 0 and more > self.memory.free():
            free = self.memory.free()
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes; {free} are free.")
        self.live += size
        self.memory.live += size
        self.memory.peak = max(self.memory.peak, self.memory.live)
        if more > 0:
            self.reserved += more
            self.memory.peak_reserved = max(self.memory.peak_reserved, self.memory.reserved())
        return Block(self, size, shape)

    def free(self, size: int) -> None:
        """Count bytes as free; they stay reserved."""
        self.live -= size
        self.memory.live -= size

    def drop_graph(self) -> None:
        """Return the reserved memory of a pool when its last graph is deleted."""
        self.graphs -= 1
        if not self.graphs:
            self.reserved = self.live


class Memory:
    """The memory of the device."""

    def __init__(self, total: int, others: int) -> None:
        """Args:
        total: bytes of the device.
        others: bytes that the driver and other processes hold.
        """
        self.total = total
        self.others = others
        self.general = Share(self)
        self.pools: dict[object, Share] = {}
        self.live = 0
        """Bytes of live tensors."""
        self.peak = 0
        self.peak_reserved = 0

    def pool(self, handle: object) -> Share:
        """Return the pool of a handle."""
        return self.pools.setdefault(handle, Share(self))

    def reserved(self) -> int:
        """Return the bytes that are taken from the device."""
        return self.general.reserved + sum(pool.reserved for pool in self.pools.values())

    def free(self) -> int:
        """Return the bytes that the device has left."""
        return self.total - self.others - self.reserved()

    def reset_peak(self) -> None:
        """Count the peaks from now on."""
        self.peak, self.peak_reserved = self.live, self.reserved()

    def empty_cache(self) -> None:
        """Give back what no tensor holds; pools of live graphs keep theirs."""
        self.general.reserved = self.general.live
