"""Paged attention in Triton: prefill, chunks and decodes by one kernel, long contexts split over programs.

The keys of a sequence are cut into segments of `SEGMENT` positions, counted from position 0, and a segment into tiles.
Within a segment the softmax is computed online, tile after tile (Milakov, Gimelshein 2018; Dao et al. 2022); segments
are merged in their order. A program computes all segments of its rows (`whole`), or a single one (`split`), in which
case a second kernel merges them by the same operations. So a row has the same bits, split or whole, whatever the
chunk, the block size and its neighbours: a masked position adds exact zeros.

A program's rows are consecutive tokens of a sequence times the query heads that share a KV head ("grouped heads").
All lengths are read from device memory, so that a CUDA graph can replay a launch on other lengths. A kernel is compiled
once for each model: of its integers only the strides of queries and of the pool are specialised (on being multiples of
16, for loads of 16 bytes), and they never change; the addresses of the arrays of int32 are not.

Known of the speed, from the machine code for sm_90 (`python -m bench triton`): keys and values are copied to shared
memory by asynchronous copies of 16 bytes. A decode's program keeps 32 KiB in flight, but loads a tile only when it is
done with the one before; four programs fit an H100's SM, so that it has 64 KiB or more in flight, where its share of
3.35 TB/s at a latency of 1 µs is 25 KiB. Neighbouring programs read adjacent heads of the same tokens. Partial outputs
of a split context are 3 % of what is read at 4 query heads to a KV head. The prefill's tile has two buffers. Not known
until it is measured on a GPU (`bench/gpu_check.sh`): what share of the bandwidth that gives, and whether a prefill is
faster with other tiles.

Shapes: T rows of the batch, S sequences, W work items, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

SEGMENT = 256
"""Key positions that one program of a split decode computes."""
WHOLE = 1 << 30
"""A segment that no context exceeds."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts the work."""

    rows: int
    """Query rows (tokens times grouped heads) of a program; a power of two, at least 16."""
    keys: int
    """Key positions of a tile; a power of two."""
    segment: int
    """Key positions of a segment, a multiple of `keys`."""
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a program with `group` query heads to a KV head."""
        return self.rows // group


def tiles(
    dtype: torch.dtype, dim: int, group: int, *, invariant: bool = False, capability: tuple[int, int] = (9, 0)
) -> tuple[Tile, Tile]:
    """Return the tile of decodes and other short pieces, and that of longer pieces.

    Tiles of 16 rows compile to other matrix instructions than those of 64 or more, so a token has other bits as a
    decode than in a prefill. With `invariant` both are the same tile, at the price of a slower prefill.

    Args:
        dtype: of queries, keys and values.
        dim: head size.
        group: query heads that share a KV head.
        invariant: see above.
        capability: of the GPU; before 9.0 a tile of 128 rows has too few registers.
    """
    rows, wide = max(16, triton.next_power_of_2(group)), dim > 128
    narrow = dtype != torch.float32
    short = Tile(rows, 32 if wide else 64, SEGMENT, warps=4 if narrow and rows == 16 and not wide else 8, stages=3)
    if invariant or not narrow:
        return short, short
    tall = 128 if capability >= (9, 0) and not wide else 64
    return short, Tile(max(tall, rows), 32 if wide else 64, WHOLE, warps=8, stages=3)


@triton.jit
def _tiles(
    q,
    k,
    v,
    table,
    positions,
    low,
    high,
    context,
    window,
    scale,
    cap,
    block_stride,
    token_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Online softmax over the key positions `[low, high)`: maxima (base 2), sums and unnormalised outputs."""
    dims = tl.arange(0, WIDTH)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < context
        blocks = tl.load(table + at // BLOCK, mask=inside, other=0).to(tl.int64)
        offsets = blocks * block_stride + (at % BLOCK) * token_stride
        keys = tl.load(k + offsets[None, :] + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        visible = at[None, :] <= positions[:, None]
        if WINDOW:
            visible &= at[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        values = tl.load(v + offsets[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
        out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="ieee")
        highest = new
    return highest, total, out


@triton.jit
def _merge(highest, total, out, part_highest, part_total, part_out):
    """Add a segment to what the segments before it gave."""
    new = tl.maximum(highest, part_highest)
    base = tl.where(new == float("-inf"), 0.0, new)
    old, added = tl.exp2(highest - base), tl.exp2(part_highest - base)
    total = tl.fma(total, old, part_total * added)
    out = tl.fma(out, tl.broadcast_to(old[:, None], out.shape), part_out * added[:, None])
    return new, total, out


@triton.jit
def _place(
    work,
    starts,
    contexts,
    window,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The rows of this program's work item, and the key positions that they see.

    Returns the KV head, the sequence (-1: padding), for each row its token in the batch, head in the group, position
    and whether it is one, then the context, the first position that a row sees and the position behind the last.
    """
    item = tl.program_id(0) // KV_HEADS
    sequence = tl.load(work + item * 2)
    first = tl.load(work + item * 2 + 1)
    at = tl.maximum(sequence, 0)
    begin = tl.load(starts + at)
    count = tl.load(starts + at + 1) - begin
    context = tl.load(contexts + at)
    rows = tl.arange(0, ROWS)
    tokens = first + rows // GROUP
    real = (rows < TOKENS * GROUP) & (tokens < count)
    positions = tl.where(real, context - count + tokens, -1)
    high = tl.minimum(context - count + first + TOKENS, context)
    low = 0
    if WINDOW:
        low = tl.maximum(context - count + first - window + 1, 0)
    return tl.program_id(0) % KV_HEADS, sequence, begin + tokens, rows % GROUP, positions, real, context, low, high


@triton.jit(
    do_not_specialize=["window", "splits", "table_stride"],
    do_not_specialize_on_alignment=["tables", "places", "contexts", "starts", "work"],
)
def _attend(
    q,
    k,
    v,
    out,
    stats,
    tables,
    places,
    contexts,
    starts,
    work,
    window,
    splits,
    scale,
    cap,
    q_stride,
    table_stride,
    block_stride,
    token_stride,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (work item and KV head, segment).

    SPLIT: `out` is fp32 `[W, K, splits, ROWS, D]` and `stats` fp32 `[W, K, splits, 2, ROWS]`; otherwise `out` is
    `[T, H, D]`, `stats` is not used, and there is one segment program for all segments.
    """
    head, sequence, rows, in_group, positions, real, context, low, high = _place(
        work, starts, contexts, window, KV_HEADS, TOKENS, GROUP, ROWS, WINDOW
    )
    if sequence >= 0:
        dims = tl.arange(0, WIDTH)
        heads = head * GROUP + in_group
        offsets = rows.to(tl.int64) * q_stride + heads * DIM
        mask = real[:, None] & (dims < DIM)[None, :]
        query = tl.load(q + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        place = tl.maximum(tl.load(places + sequence), 0)
        table = tables + place.to(tl.int64) * table_stride
        k += head * DIM
        v += head * DIM
        lowest = low // KEYS * KEYS
        if SPLIT:
            segment = low // SEGMENT + tl.program_id(1)
            begin = tl.maximum(segment * SEGMENT, lowest)
            end = tl.minimum(segment * SEGMENT + SEGMENT, high)
            if begin < end:
                highest, total, partial = _tiles(
                    query, k, v, table, positions, begin, end, context, window, scale, cap, block_stride, token_stride,
                    BLOCK, ROWS, KEYS, DIM, WIDTH, WINDOW, SOFTCAP,
                )  # fmt: skip
                item = tl.program_id(0).to(tl.int64) * splits + tl.program_id(1)
                lines = tl.arange(0, ROWS)
                tl.store(stats + item * (2 * ROWS) + lines, highest, mask=real)
                tl.store(stats + item * (2 * ROWS) + ROWS + lines, total, mask=real)
                offsets = (item * ROWS + lines) * DIM
                tl.store(out + offsets[:, None] + dims[None, :], partial, mask=mask)
        else:
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            merged = tl.zeros([ROWS, WIDTH], tl.float32)
            for segment in range(low // SEGMENT, (high + SEGMENT - 1) // SEGMENT):
                begin = tl.maximum(segment * SEGMENT, lowest)
                end = tl.minimum(segment * SEGMENT + SEGMENT, high)
                part_highest, part_total, part = _tiles(
                    query, k, v, table, positions, begin, end, context, window, scale, cap, block_stride, token_stride,
                    BLOCK, ROWS, KEYS, DIM, WIDTH, WINDOW, SOFTCAP,
                )  # fmt: skip
                highest, total, merged = _merge(highest, total, merged, part_highest, part_total, part)
            offsets = (rows.to(tl.int64) * (KV_HEADS * GROUP) + heads) * DIM
            result = merged / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + offsets[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["window", "splits"],
    do_not_specialize_on_alignment=["contexts", "starts", "work"],
)
def _combine(
    partial,
    stats,
    out,
    contexts,
    starts,
    work,
    window,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (work item and KV head): merge the segments that `_attend` computed apart."""
    head, sequence, rows, in_group, _, real, _, low, high = _place(
        work, starts, contexts, window, KV_HEADS, TOKENS, GROUP, ROWS, WINDOW
    )
    if sequence >= 0:
        dims, lines = tl.arange(0, WIDTH), tl.arange(0, ROWS)
        mask = real[:, None] & (dims < DIM)[None, :]
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        merged = tl.zeros([ROWS, WIDTH], tl.float32)
        first = low // SEGMENT
        base = tl.program_id(0).to(tl.int64) * splits
        for number in tl.range((high + SEGMENT - 1) // SEGMENT - first, num_stages=4):
            item = base + number
            part_highest = tl.load(stats + item * (2 * ROWS) + lines, mask=real, other=float("-inf"))
            part_total = tl.load(stats + item * (2 * ROWS) + ROWS + lines, mask=real, other=0.0)
            offsets = (item * ROWS + lines) * DIM
            part = tl.load(partial + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            highest, total, merged = _merge(highest, total, merged, part_highest, part_total, part)
        offsets = (rows.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + in_group) * DIM
        result = merged / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + offsets[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the rows of a batch are, int32 on the device."""

    tables: Tensor
    """`[rows, blocks]`: block ids; what lies behind a context is never read."""
    places: Tensor
    """`[S]`: row of `tables` that holds the blocks of each sequence; -1 for a sequence of padding (context 0)."""
    contexts: Tensor
    """`[S]`: valid keys."""
    starts: Tensor
    """`[S + 1]`: sequence s has the rows `[starts[s], starts[s + 1])`, its last ones."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lengths: Lengths,
    work: Tensor,
    tile: Tile,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    partial: Tensor | None = None,
) -> None:
    """Causal attention of the rows of `work` over a paged cache; writes their rows of `out`.

    Args:
        q: `[T, H, D]`, heads without gaps.
        k, v: `[blocks, block size, K, D]` views of the pool; all but the first dimension without gaps.
        out: `[T, H, D]` without gaps. A row without keys is set to 0.
        work: int32 `[W, 2]`: sequence and first token (counted from the sequence's first row) of an item of
            `tile.tokens(H / K)` tokens. Sequence -1 is padding.
        window: a row at position p sees the positions > p - window.
        softcap: scores become `cap * tanh(score / cap)`.
        splits: 1, or at least the number of segments that any row of `work` sees; then each has a program of its own.
        partial: fp32 working memory for splits, at least `W * K * splits * tile.rows * (D + 2)` elements; None: it is
            allocated.
    """
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k.shape[2]
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    # Scores are in base 2. A soft-cap's tanh(x) is 1 - 2 / (e^(2x) + 1): its argument is scaled instead, and the cap.
    factor, cap = (scale * _LOG2_E, 0.0) if softcap is None else (2 * scale / softcap * _LOG2_E, softcap * _LOG2_E)
    shape: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "TOKENS": tile.tokens(group),
        "ROWS": tile.rows,
        "SEGMENT": tile.segment,
        "DIM": dim,
        "WIDTH": width,
        "WINDOW": window is not None,
    }
    q_stride = q.stride(0) if q.shape[0] > 1 else heads * dim  # torch may say anything of the stride of a single row
    items, split = work.shape[0], splits > 1
    target, stats = out, out
    if split:
        lines = items * kv_heads * splits * tile.rows
        if partial is None:
            partial = torch.empty(lines * (dim + 2), dtype=torch.float32, device=q.device)
        target, stats = partial[: lines * dim], partial[lines * dim : lines * (dim + 2)]
    # Multiplications and additions stay apart, so that the merge has the same bits in both kernels.
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    if not split and q.dtype != torch.float32:  # otherwise ptxas spills some registers, so that more programs fit an SM
        options["maxnreg"] = 255
    launch(
        _attend, (items * kv_heads, splits),
        q, k, v, target, stats, lengths.tables, lengths.places, lengths.contexts, lengths.starts, work,
        window or 0, splits, factor, cap, q_stride, lengths.tables.stride(0), k.stride(0), k.stride(1),
        BLOCK=k.shape[1], KEYS=tile.keys, SOFTCAP=softcap is not None, SPLIT=split, **shape, **options,
    )  # fmt: skip
    if split:
        launch(
            _combine, (items * kv_heads,),
            target, stats, out, lengths.contexts, lengths.starts, work, window or 0, splits, **shape,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
