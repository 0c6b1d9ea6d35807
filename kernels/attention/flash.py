"""Paged attention on NVIDIA GPUs by flash-attn 2 (Dao 2023), which is imported when a backend is created.

It reads K and V through the block table from views of the pool whose blocks are `layers * 2` pages apart. It requires
(flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of 2.8.3): fp16 or bf16; head sizes that are multiples of 8,
up to 256; pages of a multiple of 256 tokens; int32 tables and lengths on the device of the queries; a contiguous last
dimension, and rows on 16-byte boundaries. Masks are aligned at the end of a sequence, so a chunk is a sequence with
fewer queries than keys. V beyond the length of a sequence is zeroed before the product, so unwritten slots may hold
anything.

The number of splits of a decode depends on the batch and the GPU, so the last bits of a row depend on other rows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.attention.base import AttentionBatch, CacheSpec, DeviceArrays
from kernels.attention.plain import PlainBackend
from kernels.device import upload

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_DIM = 256
_CAPABILITY = (8, 0)
_FUNCTIONS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")


@dataclass(frozen=True, slots=True)
class _Call:
    """A batch as the library takes it. S sequences, int32 on the device."""

    tables: Tensor
    """`[S, blocks]`; shorter tables are padded with 0."""
    contexts: Tensor
    """`[S]`."""
    query_ends: Tensor
    """`[S + 1]`: offsets of the queries."""
    key_ends: Tensor
    """`[S + 1]`: offsets of the keys, as if they were contiguous."""
    longest_query: int
    longest_context: int
    decodes: bool
    """Whether every sequence has one row."""

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, device: torch.device) -> _Call:
        counts = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
        longest = max(batch.context_lens)
        width = -(-longest // block_size)
        tables, contexts, query_ends, key_ends = (
            _uploaded(batch, width, device) if batch.arrays is None else _on_device(batch.arrays, width)
        )
        return cls(
            tables=tables,
            contexts=contexts,
            query_ends=query_ends,
            key_ends=key_ends,
            longest_query=max(counts),
            longest_context=longest,
            decodes=min(counts) == max(counts) == 1,
        )


def _on_device(arrays: DeviceArrays, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tables of `width` blocks, contexts, and ends of queries and keys, from arrays of the device."""
    tables = arrays.tables[:, :width].index_select(0, arrays.places)
    key_ends = torch.nn.functional.pad(arrays.contexts.cumsum(0, dtype=torch.int32), (1, 0))
    return tables, arrays.contexts, arrays.starts, key_ends


def _uploaded(batch: AttentionBatch, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same from the tuples of the host."""
    ends = [0]
    for context in batch.context_lens:
        ends.append(ends[-1] + context)
    tables = [i for table in batch.block_tables for i in (*table[:width], *(0,) * (width - len(table)))]
    parts = (tables, batch.context_lens, batch.cu_seqlens, ends)
    together = upload([i for part in parts for i in part], torch.int32, device)
    flat, contexts, query_ends, key_ends = torch.split(together, [len(part) for part in parts])
    return flat.view(-1, width), contexts, query_ends, key_ends


class FlashBackend(PlainBackend):
    """Paged attention by flash-attn 2, on NVIDIA GPUs from compute capability 8.0 (Ampere) on."""

    page_multiple: ClassVar[int] = 256
    preferred_block_size: ClassVar[int] = 256
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        if spec.dtype not in _DTYPES:
            raise ValueError(f"the flash backend does not compute in {spec.dtype}, only in float16 and bfloat16")
        if spec.head_dim % 8 or not 8 <= spec.head_dim <= _MAX_DIM:
            raise ValueError(f"the flash backend runs head sizes that are multiples of 8 up to {_MAX_DIM}")
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < _CAPABILITY:
            raise ValueError("the flash backend needs a GPU of compute capability 8.0 (Ampere) or newer")
        self._library = _library()
        self._of: AttentionBatch | None = None
        self._call: _Call | None = None

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
        if not batch.num_rows:
            return torch.zeros_like(q)
        call = self._prepare(batch)
        # A window that hides nothing is left out, since with one the library does not group the heads of a KV head.
        seen = window if window is not None and window < call.longest_context else None
        options = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if seen is None else (seen - 1, 0),
            "softcap": softcap or 0.0,
            "block_table": call.tables,
        }
        rows = q[: batch.num_rows].to(self.spec.dtype)
        k, v = self._kv[:, layer, 0], self._kv[:, layer, 1]
        if call.decodes:
            out = self._library.flash_attn_with_kvcache(rows[:, None], k, v, cache_seqlens=call.contexts, **options)
            out = out[:, 0]
        else:
            out = self._library.flash_attn_varlen_func(
                rows, k, v, call.query_ends, call.key_ends, call.longest_query, call.longest_context, **options
            )
        return _with_padding(out.to(q.dtype), q.shape[0])

    def _prepare(self, batch: AttentionBatch) -> _Call:
        """Return the arguments of a batch, which all of its layers share."""
        if batch is not self._of or self._call is None:
            self._of, self._call = batch, _Call.of(batch, self.spec.block_size, self._kv.device)
        return self._call


def _with_padding(out: Tensor, rows: int) -> Tensor:
    """Return `out` (`[n, heads, head_dim]`) with rows of zeros appended up to `rows`."""
    missing = rows - out.shape[0]
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


def _library() -> Any:
    """flash-attn 2.

    Raises:
        ValueError: flash-attn is not installed, cannot be loaded, or is not version 2.8.
    """
    try:
        found = importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        raise ValueError(
            f"the flash backend needs flash-attn (in a clone of tokenmill, pip install '.[flash]'): {error}"
        ) from error
    if not all(hasattr(found, name) for name in _FUNCTIONS):
        raise ValueError("the flash backend needs flash-attn 2.8; another version is installed")
    return found
