"""Paged attention on x86 CPUs: C++ kernels (`kernels/csrc`) that read K and V in place.

The layout of a block is `[layer][KV head][page of 16 tokens][K, V]`, so that the K and V of a head are contiguous. The
layout of a page is

    bf16   K [head_dim / 2][16][2], V [8][head_dim][2]: pairs, as the CPU's bf16 dot product takes them
    fp32   K [head_dim][16],        V [16][head_dim]

The bits of a row depend on its sequence only, see `csrc/attention.h`.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels import native
from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec

_PAGE = 16
_MAX_DIM = 256
_MAX_GROUP = 96

_ids = itertools.count()


class _Arrays:
    """A batch as the library takes it, and the arrays that the structure points to."""

    def __init__(self, batch: AttentionBatch) -> None:
        tables = batch.block_tables
        ends = itertools.accumulate(map(len, tables))
        self._kept = tuple(
            _ints(values)
            for values in (
                batch.cu_seqlens,
                batch.context_lens,
                itertools.chain.from_iterable(tables),
                (0, *ends),
            )
        )
        cu, contexts, flat, starts = (values.buffer_info()[0] for values in self._kept)
        self.slots = batch.slots.contiguous()
        self.batch = native.Batch(
            next(_ids),
            batch.num_sequences,
            batch.num_rows,
            batch.slots.shape[0],
            cu,
            contexts,
            flat,
            starts,
            self.slots.data_ptr(),
        )
        self.pointer = ctypes.byref(self.batch)


class CpuBackend(AttentionBackend):
    """Paged attention by the compiled kernels, in place, on x86 CPUs with AVX2."""

    page_multiple: ClassVar[int] = _PAGE
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        if spec.dtype not in native.DTYPES:
            raise ValueError(f"the cpu backend has no {spec.dtype}")
        if spec.head_dim % 16 or not 16 <= spec.head_dim <= _MAX_DIM:
            raise ValueError(f"the cpu backend runs head sizes that are multiples of 16 up to {_MAX_DIM}")
        library = native.library()
        if library is None:
            raise ValueError(native.missing())
        self._library: Any = library
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._cache = native.Cache()
        self._cache_pointer = ctypes.byref(self._cache)
        self._job = native.Attend()
        self._job_pointer = ctypes.byref(self._job)
        self._of: AttentionBatch | None = None
        self._arrays: _Arrays | None = None

    @property
    def block_bytes(self) -> int:
        spec = self.spec
        return spec.num_layers * 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def bind(self, pool: Tensor) -> None:
        spec = self.spec
        if not pool.is_contiguous() or pool.shape[1] != self.block_bytes:
            raise ValueError(f"the pool must be contiguous, [blocks, {self.block_bytes}]")
        self._pool = pool
        # A layer reads a small part of each block, and blocks are far apart: with small pages each read misses the TLB.
        native.huge_pages(pool)
        self._cache = native.Cache(
            pool.data_ptr(),
            self.block_bytes,
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            spec.dtype == torch.bfloat16,
        )
        self._cache_pointer = ctypes.byref(self._cache)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        k, v = _rows(k.to(self.spec.dtype)), _rows(v.to(self.spec.dtype))
        self._library.tm_store(
            self._cache_pointer,
            self._prepare(batch).pointer,
            layer,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            torch.get_num_threads(),
        )

    def write_rotated(
        self,
        layer: int,
        qkv: Tensor,
        batch: AttentionBatch,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        heads = qkv.shape[1] - 2 * self.spec.num_kv_heads
        if qkv.dtype != self.spec.dtype or not qkv.is_contiguous():
            return super().write_rotated(layer, qkv, batch, norms=norms, rotation=rotation)
        cos, sin = rotation or (None, None)
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        job = native.Write(
            layer,
            heads,
            qkv.data_ptr(),
            qkv.stride(0),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            eps,
            q_weight is not None and q_weight.dtype != self.spec.dtype,
        )
        pointer = self._prepare(batch).pointer
        self._library.tm_write(self._cache_pointer, pointer, ctypes.byref(job), torch.get_num_threads())
        return qkv[:, :heads]

    def attend(
        self,
        layer: int,
        q: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        arrays = self._prepare(batch)
        heads = q.shape[1]
        if heads % self.spec.num_kv_heads or heads > _MAX_GROUP * self.spec.num_kv_heads:
            raise ValueError(f"{heads} query heads do not match {self.spec.num_kv_heads} KV heads")
        dtype = self.spec.dtype
        rows = _rows(q if q.dtype == dtype else q.to(dtype))
        out = torch.empty(q.shape, dtype=dtype)
        job = self._job
        job.layer, job.heads, job.window, job.scale, job.softcap = layer, heads, window or 0, scale, softcap or 0.0
        job.q, job.q_stride, job.out = rows.data_ptr(), rows.stride(0), out.data_ptr()
        self._library.tm_attend(self._cache_pointer, arrays.pointer, self._job_pointer, torch.get_num_threads())
        return out if q.dtype == dtype else out.to(q.dtype)

    def read(self, layer: int, block_table: tuple[int, ...], length: int) -> tuple[Tensor, Tensor]:
        spec = self.spec
        pages = spec.block_size // _PAGE
        shape = (-1, spec.num_layers, spec.num_kv_heads, pages, 2, _PAGE * spec.head_dim)
        stored = self._pool.view(spec.dtype).view(shape)[torch.tensor(block_table, dtype=torch.int64), layer]
        stored = stored.transpose(1, 2).flatten(0, 1)  # [pages, kv_heads, 2, page]
        front = stored.shape[:2]
        if spec.dtype == torch.float32:
            k = stored[:, :, 0].reshape(*front, spec.head_dim, _PAGE).permute(0, 3, 1, 2)
            v = stored[:, :, 1].reshape(*front, _PAGE, spec.head_dim).permute(0, 2, 1, 3)
        else:
            k = stored[:, :, 0].reshape(*front, spec.head_dim // 2, _PAGE, 2).permute(0, 3, 1, 2, 4)
            v = stored[:, :, 1].reshape(*front, _PAGE // 2, spec.head_dim, 2).permute(0, 2, 4, 1, 3)
        size = (-1, spec.num_kv_heads, spec.head_dim)
        return k.reshape(size)[:length], v.reshape(size)[:length]

    def _prepare(self, batch: AttentionBatch) -> _Arrays:
        """Return the arrays of a batch, which all of its layers share."""
        if batch is not self._of or self._arrays is None:
            self._of, self._arrays = batch, _Arrays(batch)
        return self._arrays


def _rows(x: Tensor) -> Tensor:
    """Return `x` (`[T, heads, head_dim]`) so that the heads of a row are contiguous; rows may be apart."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


def _ints(values: Iterable[int]) -> array[int]:
    """Return an int32 array, whose address does not change."""
    return array("i", values)
