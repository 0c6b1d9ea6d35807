"""Paged attention on NVIDIA GPUs by the kernels of `kernels/triton`, which are compiled on first use.

Decodes and other short pieces are cut into segments of the keys, each with a program of its own, so that a long context
does not wait for one program; longer chunks take tiles of more rows.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kernels.attention.base import AttentionBatch, CacheSpec, DeviceArrays
from kernels.attention.plain import PlainBackend
from kernels.device import upload
from kernels.triton import enabled

if TYPE_CHECKING:
    from kernels.triton.attention import Lengths, Tile

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_DIM = 256
_CAPABILITY = (8, 0)
_PARTIAL_BYTES = 256 << 20
"""Limit of the memory for the partial outputs of split contexts."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The work items of one launch."""

    tile: Tile
    work: Tensor
    """int32 `[W, 2]`: sequence and first token of each item."""
    longest: int
    """Keys of the longest context."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of all launches for a batch, on the device."""

    lengths: Lengths
    parts: tuple[_Part, ...]


class TritonBackend(PlainBackend):
    """Paged attention in Triton; any block size, heads of up to 256 elements."""

    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    batch_invariant_on_gpu: ClassVar[bool] = True

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        if spec.dtype not in _DTYPES:
            raise ValueError(f"the triton backend has no {spec.dtype}, only float16, bfloat16 and float32")
        if spec.head_dim % 2 or not 2 <= spec.head_dim <= _MAX_DIM:
            raise ValueError(f"the triton backend runs even head sizes up to {_MAX_DIM}")
        self._capability = torch.cuda.get_device_capability(spec.device) if spec.device.type == "cuda" else (9, 0)
        if self._capability < _CAPABILITY:
            raise ValueError("the triton backend needs a GPU of compute capability 8.0 (Ampere) or newer")
        self._attention, self._write = _kernels()
        self._of: AttentionBatch | None = None
        self._call: _Call | None = None
        self._partial: Tensor | None = None
        """fp32: partial outputs of split contexts."""

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether Triton has a compiler for the device, or interprets kernels (`TRITON_INTERPRET=1`)."""
        return super().runs_on(device) or os.environ.get("TRITON_INTERPRET") == "1"

    @property
    def captures(self) -> bool:
        return enabled("write")  # torch cannot skip rows of padding

    @property
    def tile_tokens(self) -> tuple[int, int] | None:
        heads = self.spec.num_heads
        if not heads:
            return None
        short, long = self._tiles(heads)
        group = heads // self.spec.num_kv_heads
        return short.tokens(group), long.tokens(group)

    def reserve(self, max_sequences: int, max_context: int) -> None:
        if self.spec.num_heads:
            tile, _ = self._tiles(self.spec.num_heads)
            size = min(self._partial_bytes(max_sequences, -(-max_context // tile.segment), tile), _PARTIAL_BYTES)
            if self._partial is None or self._partial.nbytes < size:
                self._partial = torch.empty(size // 4, dtype=torch.float32, device=self.spec.device)

    def bound(self, rows: int, longest: int, max_context: int) -> int:
        tile, _ = self._tiles(self.spec.num_heads)
        return longest if self._num_splits(rows, longest, tile) > 1 else max_context

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        if batch.arrays is None or not enabled("write"):
            super().write(layer, k, v, batch)
        else:  # only the kernel skips rows of padding on the device
            cache = self._kv[:, layer]
            self._write.write_rotated(torch.cat([k, v], 1), cache[:, 0], cache[:, 1], batch.slots)

    def write_rotated(
        self,
        layer: int,
        qkv: Tensor,
        batch: AttentionBatch,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if not enabled("write"):
            return super().write_rotated(layer, qkv, batch, norms=norms, rotation=rotation)
        k, v = self._kv[:, layer, 0], self._kv[:, layer, 1]
        queries: Tensor = self._write.write_rotated(qkv, k, v, batch.slots, norms=norms, rotation=rotation)
        return queries

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
        call = self._enter(batch, q.shape[1])
        rows = q.to(self.spec.dtype)
        padded = batch.arrays is None and batch.num_rows < q.shape[0]
        out = torch.zeros_like(rows) if padded else torch.empty_like(rows)
        for part in call.parts:
            self._attention.attend(
                rows,
                self._kv[:, layer, 0],
                self._kv[:, layer, 1],
                out,
                call.lengths,
                part.work,
                part.tile,
                scale=scale,
                window=window,
                softcap=softcap,
                splits=self._splits(part, window),
                partial=self._partial,
            )
        return out.to(q.dtype)

    def _splits(self, part: _Part, window: int | None) -> int:
        """Return how many programs share the keys of an item; 1 if the partial outputs would take too much memory."""
        keys = part.longest
        if window is not None:  # a window of w keys touches at most this many segments, wherever it begins
            keys = min(keys, window + part.tile.rows + part.tile.segment)
        return self._num_splits(part.work.shape[0], keys, part.tile)

    def _num_splits(self, items: int, keys: int, tile: Tile) -> int:
        splits = -(-keys // tile.segment)
        limit = _PARTIAL_BYTES if self._partial is None else self._partial.nbytes
        return splits if splits > 1 and self._partial_bytes(items, splits, tile) <= limit else 1

    def _partial_bytes(self, items: int, splits: int, tile: Tile) -> int:
        """Return the bytes of the partial outputs of work items; an item has that many splits for each KV head."""
        return items * self.spec.num_kv_heads * splits * tile.rows * (self.spec.head_dim + 2) * 4

    def _tiles(self, heads: int) -> tuple[Tile, Tile]:
        """Return the tile of short pieces and that of longer pieces."""
        group = heads // self.spec.num_kv_heads
        spec = self.spec
        found: tuple[Tile, Tile] = self._attention.tiles(
            spec.dtype, spec.head_dim, group, invariant=spec.batch_invariant, capability=self._capability
        )
        return found

    def _enter(self, batch: AttentionBatch, heads: int) -> _Call:
        """Return the arguments of a batch, which all of its layers share."""
        if batch is not self._of or self._call is None:
            arrays = batch.arrays
            if arrays is not None and heads == self.spec.num_heads:
                call = self._read(arrays)
            else:
                call = self._upload(batch, heads // self.spec.num_kv_heads)
            self._of, self._call = batch, call
        return self._call

    def _read(self, arrays: DeviceArrays) -> _Call:
        """Return the arguments of a batch whose arrays are on the device."""
        plans = zip(
            self._tiles(self.spec.num_heads),
            (arrays.short, arrays.long),
            (arrays.longest_short, arrays.longest_long),
            strict=True,
        )
        return _Call(
            self._attention.Lengths(arrays.tables, arrays.places, arrays.contexts, arrays.starts),
            tuple(_Part(tile, work, longest) for tile, work, longest in plans if work.shape[0]),
        )

    def _upload(self, batch: AttentionBatch, group: int) -> _Call:
        """Upload a batch whose lengths are on the host."""
        short, long = self._tiles(group * self.spec.num_kv_heads)
        counts = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
        few = [s for s, count in enumerate(counts) if 0 < count <= short.tokens(group)]
        many = [s for s, count in enumerate(counts) if count > short.tokens(group)]
        plans = [(tile, chosen) for tile, chosen in ((short, few), (long, many)) if chosen]
        width = max((len(table) for table in batch.block_tables), default=0)
        tables = [i for table in batch.block_tables for i in (*table, *(0,) * (width - len(table)))]
        items = [
            [x for s in chosen for first in range(0, counts[s], tile.tokens(group)) for x in (s, first)]
            for tile, chosen in plans
        ]
        parts = [tables, [*range(batch.num_sequences)], [*batch.context_lens], [*batch.cu_seqlens], *items]
        packed = upload([i for part in parts for i in part], torch.int32, self._kv.device)
        flat, places, contexts, starts, *work = torch.split(packed, [len(part) for part in parts])
        return _Call(
            self._attention.Lengths(flat.view(-1, width), places, contexts, starts),
            tuple(
                _Part(tile, item.view(-1, 2), max(batch.context_lens[s] for s in chosen))
                for (tile, chosen), item in zip(plans, work, strict=True)
            ),
        )


def _kernels() -> tuple[Any, Any]:
    """Import the kernels.

    Raises:
        ValueError: Triton is not installed, or does not load.
    """
    try:
        return importlib.import_module("kernels.triton.attention"), importlib.import_module("kernels.triton.write")
    except (ImportError, OSError) as error:
        raise ValueError(f"the triton backend needs Triton (pip install triton): {error}") from error
