"""The plain layout of a block, for backends that need no layout of their own:

    pool   [num_blocks, layers, 2 (K, V), block_size, kv_heads, head_dim]

K of one layer is then a view `[num_blocks, block_size, kv_heads, head_dim]` whose blocks lie far apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec


class PlainBackend(AttentionBackend):
    """A backend with the plain layout; subclasses add `attend`."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._kv = torch.empty(0)
        self._placed: AttentionBatch | None = None
        self._places: tuple[Tensor, ...] = ()

    @property
    def block_bytes(self) -> int:
        spec = self.spec
        return spec.num_layers * 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def bind(self, pool: Tensor) -> None:
        spec = self.spec
        shape = (pool.shape[0], spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._kv = pool.view(spec.dtype).view(shape)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        rows = batch.num_rows
        if batch is not self._placed:  # computed once for all layers of a batch
            slots = batch.slots[:rows]
            self._placed, self._places = batch, (slots // self.spec.block_size, slots % self.spec.block_size)
        cache = self._kv[:, layer]
        cache[:, 0].index_put_(self._places, k[:rows].to(self.spec.dtype))
        cache[:, 1].index_put_(self._places, v[:rows].to(self.spec.dtype))

    def read(self, layer: int, block_table: tuple[int, ...], length: int) -> tuple[Tensor, Tensor]:
        table = torch.tensor(block_table, dtype=torch.int64, device=self._kv.device)
        kv = self._kv[table, layer]  # [blocks, 2, block_size, kv_heads, head_dim]
        k, v = kv.transpose(0, 1).reshape(2, -1, self.spec.num_kv_heads, self.spec.head_dim)[:, :length].unbind(0)
        return k, v
