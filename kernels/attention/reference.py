"""Paged attention in plain torch: it runs on every device, and the other backends are tested against it.

Keys are cut into tiles of 128 positions from position 0 of the sequence, independent of block size, chunks and prefix
hits. So the result of a row is always the same sum in the same order, with the same bits:

* scores are products over `head_dim`, one kernel call for all tiles, and the row maximum is exact;
* `exp(s - max)` and its sum over a tile are row-wise; tiles add up one after the other, in order;
* a masked position adds exactly zero to both sums, so tiles that only other rows need change nothing.

This requires that a matrix product gives a row the same bits for every number of other rows. BLAS kernels do so for
multiples of `_ROWS` rows (another kernel computes a remainder of one to three rows, also where threads split the rows);
`rows_are_invariant` checks it on this machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.attention.base import AttentionBatch, CacheSpec
from kernels.attention.plain import PlainBackend

_TILE = 128
"""Key positions in a tile."""
_CHUNK_ROWS = 128
"""Query positions computed together in a prefill: few, so that few scores above the diagonal are computed."""
_ROWS = 4
"""The number of rows of each matrix product is a multiple of this."""
_SCORES = 1 << 23
"""Maximum number of scores of one head per KV head in memory at once, which limits the memory of long contexts."""
_GATHERED = 1 << 20
"""Number of K values gathered at once for decoding sequences (4 MiB in fp32), about the size of a cache."""


@dataclass(frozen=True)
class _Part:
    """Rows that are computed together: a chunk of one sequence, or one row of each of several sequences."""

    rows: Tensor | slice
    """Indices of the rows in the batch."""
    tables: Tensor
    """int64 `[S, blocks]`: the blocks that hold key positions `[base, base + keys)`."""
    offset: int
    """Number of keys to skip in the first block, since a tile may begin within a block."""
    keys: int
    """Number of key positions, a multiple of `_TILE`."""
    unwritten: Tensor
    """int64: indices (`s * keys + position`) of gathered rows beyond the context, whose V may be anything."""
    steps: tuple[_Step, ...]


@dataclass(frozen=True)
class _Step:
    """Consecutive rows of a part that attend to the same tiles."""

    rows: slice
    """Range within the rows of the part."""
    tiles: slice
    """Range within the tiles of the part."""
    hidden: Tensor
    """bool `[S, tiles, rows, 1, tile]`: positions that a row must not attend to."""


class ReferenceBackend(PlainBackend):
    """Paged attention in plain torch, on every device; the other backends are tested against it."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._batch: AttentionBatch | None = None
        self._parts: dict[int | None, list[_Part]] = {}
        self._buffers: dict[int, Tensor] = {}

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
        self._prepare(batch)
        if window not in self._parts:
            self._parts[window] = list(_plan(batch, window, self.spec))
        out = torch.zeros_like(q)
        group = q.shape[1] // self.spec.num_kv_heads
        for part in self._parts[window]:
            # [S, rows of a sequence, kv_heads, group, head_dim]
            scaled = (q[part.rows].float() * scale).view(
                part.tables.shape[0], -1, self.spec.num_kv_heads, group, q.shape[2]
            )
            keys, values = self._gather(layer, part)
            done = [
                _attend(scaled[:, s.rows], keys[:, s.tiles], values[:, s.tiles], s.hidden, softcap) for s in part.steps
            ]
            out[part.rows] = torch.cat(done, dim=1).view(-1, *q.shape[1:]).to(q.dtype)
        return out

    def _prepare(self, batch: AttentionBatch) -> None:
        """Discard the parts of another batch; all layers of a batch share its parts."""
        if batch is not self._batch:
            self._batch = batch
            self._parts = {}

    def _gather(self, layer: int, part: _Part) -> tuple[Tensor, Tensor]:
        """Return K and V of a part, fp32 `[S, tiles, tile, kv_heads, head_dim]` each; V is 0 beyond the context."""
        k, v = self._take(layer, 0, part), self._take(layer, 1, part)
        v.view(part.tables.shape[0] * part.keys, -1).index_fill_(0, part.unwritten, 0)
        return k, v

    def _take(self, layer: int, which: int, part: _Part) -> Tensor:
        """Return K (0) or V (1) of a part, fp32 `[S, tiles, tile, kv_heads, head_dim]`, valid until the next part."""
        sequences, heads, dim = part.tables.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        source = self._kv[:, layer, which]
        shape = (part.tables.numel(), *source.shape[1:])
        taken = self._scratch(which, shape, torch.float32)
        if source.dtype == torch.float32:
            torch.index_select(source, 0, part.tables.view(-1), out=taken)
        else:
            stored = self._scratch(2, shape, source.dtype)
            taken.copy_(torch.index_select(source, 0, part.tables.view(-1), out=stored))
        taken = taken.view(sequences, -1, heads, dim)
        if taken.shape[1] != part.keys:
            taken = taken[:, part.offset : part.offset + part.keys].contiguous()
        return taken.view(sequences, -1, _TILE, heads, dim)

    def _scratch(self, which: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer that is reused: page faults on new memory of this size cost more than computing in it."""
        size = math.prod(shape)
        if which not in self._buffers or self._buffers[which].numel() < size:
            self._buffers[which] = torch.empty(size, dtype=dtype, device=self._kv.device)
        return self._buffers[which][:size].view(shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float | None) -> Tensor:
    """Compute the softmax attention of one step.

    Args:
        q: fp32 `[S, rows, kv_heads, group, head_dim]`, scaled.
        k, v: fp32 `[S, tiles, tile, kv_heads, head_dim]`.
        hidden: bool `[S, tiles, rows, 1, tile]`.

    Returns:
        fp32 `[S, rows, kv_heads, group, head_dim]`.
    """
    sequences, rows, heads, group, dim = q.shape
    tiles, used = k.shape[1], rows * group
    q = q.permute(2, 0, 1, 3, 4).reshape(heads, sequences, used, dim)
    if used % _ROWS:
        q = torch.nn.functional.pad(q, (0, 0, 0, -used % _ROWS))
    padded = q.shape[2]
    # One matrix product for each (KV head, sequence, tile), of `padded` rows.
    q = q[:, :, None].expand(-1, -1, tiles, -1, -1).reshape(heads, sequences * tiles, padded, dim)
    k, v = k.flatten(0, 1).permute(2, 0, 3, 1), v.flatten(0, 1).permute(2, 0, 1, 3)
    scores = q.new_empty((heads, sequences * tiles, padded, _TILE))
    for head in range(heads):
        torch.bmm(q[head], k[head], out=scores[head])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(heads, sequences, tiles, padded, _TILE)
    real = scores[:, :, :, :used].view(heads, sequences, tiles, rows, group, _TILE)
    real.masked_fill_(hidden, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True).amax(2, keepdim=True)).exp_()
    sums = scores.sum(-1)
    parts = q.new_empty((heads, sequences * tiles, padded, dim))
    for head in range(heads):
        torch.bmm(scores[head].view(-1, padded, _TILE), v[head], out=parts[head])
    parts = parts.view(heads, sequences, tiles, padded, dim)
    out, total = parts[:, :, 0], sums[:, :, 0]
    for tile in range(1, tiles):
        out, total = out + parts[:, :, tile], total + sums[:, :, tile]
    out = (out / total[..., None])[:, :, :used]
    return out.reshape(heads, sequences, rows, group, dim).permute(1, 2, 0, 3, 4)


def _plan(batch: AttentionBatch, window: int | None, spec: CacheSpec) -> Iterator[_Part]:
    """Cut a batch into parts: each chunk alone, and the decodes that attend to equally many tiles together."""
    singles: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for s, context in enumerate(batch.context_lens):
        row, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
        if end == row:
            continue
        first = _first_tile(context - (end - row), window)
        tiles = -(-context // _TILE) - first
        if end - row == 1:
            # Offsets in the first block differ only if tiles begin within blocks.
            singles[tiles, first * _TILE % spec.block_size].append((s, row, first))
        else:
            yield _chunk(batch, s, first, tiles, window, spec)
    for (tiles, _), members in singles.items():
        limit = max(1, _GATHERED // (tiles * _TILE * spec.num_kv_heads * spec.head_dim))
        for i in range(0, len(members), limit):
            yield _decodes(batch, members[i : i + limit], tiles, window, spec)


def _first_tile(position: int, window: int | None) -> int:
    """Return the index of the first tile that a row at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1) // _TILE


def _chunk(batch: AttentionBatch, s: int, first: int, tiles: int, window: int | None, spec: CacheSpec) -> _Part:
    """Return the part with all rows of one sequence."""
    device = batch.slots.device
    row, end, context = batch.cu_seqlens[s], batch.cu_seqlens[s + 1], batch.context_lens[s]
    base = first * _TILE
    table, offset = _blocks(batch.block_tables[s], base, tiles * _TILE, spec.block_size)
    size = max(_ROWS, min(_CHUNK_ROWS, _SCORES // (tiles * _TILE * spec.num_kv_heads)))
    steps = []
    for start in range(0, end - row, size):
        stop = min(start + size, end - row)
        positions = torch.arange(context - (end - row) + start, context - (end - row) + stop, device=device)
        low = _first_tile(context - (end - row) + start, window) - first
        high = -(-(context - (end - row) + stop) // _TILE) - first
        keys = torch.arange(base + low * _TILE, base + high * _TILE, device=device)
        hidden = _hidden(positions[None], keys[None], window)
        steps.append(_Step(slice(start, stop), slice(low, high), hidden))
    return _Part(
        rows=slice(row, end),
        tables=torch.tensor([table], dtype=torch.int64, device=device),
        offset=offset,
        keys=tiles * _TILE,
        unwritten=torch.arange(context - base, tiles * _TILE, device=device),
        steps=tuple(steps),
    )


def _decodes(
    batch: AttentionBatch, members: list[tuple[int, int, int]], tiles: int, window: int | None, spec: CacheSpec
) -> _Part:
    """Return the part with a row of each of `members` (sequence, row, first tile), which have equally many tiles."""
    device = batch.slots.device
    keys = tiles * _TILE
    cut = [_blocks(batch.block_tables[s], first * _TILE, keys, spec.block_size) for s, _, first in members]
    positions = torch.tensor([batch.context_lens[s] - 1 for s, _, _ in members], device=device)
    bases = torch.tensor([first * _TILE for _, _, first in members], device=device)
    at = bases[:, None] + torch.arange(keys, device=device)
    return _Part(
        rows=torch.tensor([row for _, row, _ in members], device=device),
        tables=torch.tensor([table for table, _ in cut], dtype=torch.int64, device=device),
        offset=cut[0][1],
        keys=keys,
        unwritten=(at > positions[:, None]).view(-1).nonzero().view(-1),
        steps=(_Step(slice(None), slice(None), _hidden(positions[:, None], at, window)),),
    )


def _blocks(table: tuple[int, ...], base: int, keys: int, block_size: int) -> tuple[list[int], int]:
    """Return the blocks of the key positions `[base, base + keys)`, and the offset of `base` in the first block.

    Positions past the table come from its first block; they lie beyond the context, so that nothing reads them.
    """
    first, last = base // block_size, -(-(base + keys) // block_size)
    cut = list(table[first:last])
    return cut + [table[0]] * (last - first - len(cut)), base - first * block_size


def _hidden(positions: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys a row must not attend to, since they are after it or before its window.

    Args:
        positions: `[S, rows]`, position of each row.
        keys: `[S, tiles * tile]`, position of each key.
        window: length of the window in tokens; None: no window.

    Returns:
        bool `[S, tiles, rows, 1, tile]`.
    """
    keys = keys.view(keys.shape[0], -1, _TILE)
    distance = positions[:, None, :, None, None] - keys[:, :, None, None, :]
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


@lru_cache
def rows_are_invariant(head_dim: int) -> bool:
    """Check whether matrix products here give a row the same bits for any number of rows and keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 64, head_dim, generator=generator)
    k = torch.randn(2, 4 * _TILE, head_dim, generator=generator)
    p = torch.rand(2, 64, _TILE, generator=generator)
    v = k[:, :_TILE].contiguous()
    scores, sums = torch.bmm(q, k.transpose(1, 2)), torch.bmm(p, v)
    for rows in (4, 8, 12, 16, 20, 36, 48):
        few = torch.bmm(q[:1, :rows].contiguous(), k[:1, :_TILE].transpose(1, 2))
        if not torch.equal(few, scores[:1, :rows, :_TILE]):
            return False
        if not torch.equal(torch.bmm(p[:1, :rows].contiguous(), v[:1]), sums[:1, :rows]):
            return False
    return True
