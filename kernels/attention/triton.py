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

from kernels.attention.base import AttentionBatch, CacheSpec
from kernels.attention.plain import PlainBackend
from kernels.device import upload

if TYPE_CHECKING:
    from kernels.triton.attention import Lengths, Tile

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_DIM = 256
_CAPABILITY = (8, 0)
_PARTIAL_BYTES = 256 << 20
"""Limit of the memory for the partial outputs of split contexts."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Work items that are computed in one launch."""

    tile: Tile
    work: Tensor
    """int32 `[W, 2]`: sequence and first token of each item."""
    longest: int
    """Keys of the longest context."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A batch on the device."""

    lengths: Lengths
    parts: tuple[_Part, ...]


class TritonBackend(PlainBackend):
    """Paged attention in Triton; any block size, heads of up to 256 elements."""

    device_types: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        if spec.dtype not in _DTYPES:
            raise ValueError(f"the triton backend has no {spec.dtype}, only float16, bfloat16 and float32")
        if spec.head_dim % 2 or not 2 <= spec.head_dim <= _MAX_DIM:
            raise ValueError(f"the triton backend runs even head sizes up to {_MAX_DIM}")
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < _CAPABILITY:
            raise ValueError("the triton backend needs a GPU of compute capability 8.0 (Ampere) or newer")
        self._attention, self._write = _kernels()
        self._of: AttentionBatch | None = None
        self._call: _Call | None = None

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether Triton has a compiler for the device, or interprets kernels (`TRITON_INTERPRET=1`)."""
        return super().runs_on(device) or os.environ.get("TRITON_INTERPRET") == "1"

    def write_rotated(
        self,
        layer: int,
        qkv: Tensor,
        batch: AttentionBatch,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
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
        out = torch.empty_like(rows) if batch.num_rows == q.shape[0] else torch.zeros_like(rows)
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
            )
        return out.to(q.dtype)

    def _splits(self, part: _Part, window: int | None) -> int:
        """Return how many programs share the keys of an item; 1 if the partial outputs would take too much memory."""
        segment = part.tile.segment
        keys = part.longest
        if window is not None:  # a window of w keys touches at most this many segments, wherever it begins
            keys = min(keys, window + part.tile.rows + segment)
        splits = -(-keys // segment)
        kv_heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        size = part.work.shape[0] * kv_heads * splits * part.tile.rows * (dim + 2) * 4
        return splits if splits > 1 and size <= _PARTIAL_BYTES else 1

    def _enter(self, batch: AttentionBatch, heads: int) -> _Call:
        """Upload a batch once; all layers share the arrays."""
        if batch is not self._of or self._call is None:
            self._of, self._call = batch, self._upload(batch, heads // self.spec.num_kv_heads)
        return self._call

    def _upload(self, batch: AttentionBatch, group: int) -> _Call:
        short, long = self._attention.tiles(self.spec.dtype, self.spec.head_dim, group)
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
