"""What a CUDA graph replays: padding of rows, sequences and items, stale values; and pools beyond 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from kernels.triton.attention import Lengths, attend, tiles
from kernels.triton.write import write_rotated

BLOCK, KV_HEADS, HEADS, DIM = 4, 2, 4, 16
TILE, _ = tiles(torch.float32, DIM, HEADS // KV_HEADS)
CONTEXTS = [9, 0, 300]
"""Keys of three sequences of one row; the second is padding."""


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool_of(blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((blocks, 2, BLOCK, KV_HEADS, DIM), torch.nan, dtype=dtype)


def filled() -> tuple[Tensor, Tensor, Tensor]:
    """A pool with the keys of all sequences, full of NaN elsewhere, their tables and queries."""
    generator = torch.Generator().manual_seed(0)
    pool, tables, start = pool_of(90), torch.full((5, 80), 2**30, dtype=torch.int32), 0
    for place, context in enumerate(CONTEXTS):
        blocks = -(-context // BLOCK)
        tables[place, :blocks] = torch.arange(start, start + blocks)
        kv = torch.randn(context, 2, KV_HEADS, DIM, generator=generator)
        for position in range(context):
            pool[start + position // BLOCK, :, position % BLOCK] = kv[position]
        start += blocks
    return pool, tables, torch.randn(3, HEADS, DIM, generator=generator)


def run(pool: Tensor, tables: Tensor, q: Tensor, work: list[list[int]], contexts: list[int], splits: int) -> Tensor:
    out = torch.full_like(q, -7.0)
    starts = integers(*range(len(contexts) + 1))
    lengths = Lengths(tables, integers(0, -1, 2)[: len(contexts)], integers(*contexts), starts)
    items = torch.tensor(work, dtype=torch.int32)
    attend(q, pool[:, 0], pool[:, 1], out, lengths, items, TILE, scale=0.25, splits=splits)
    return out


@pytest.mark.parametrize("splits", [1, 2])
def test_items_of_padding_write_nothing_and_rows_without_context_are_set_to_zero(splits: int) -> None:
    pool, tables, q = filled()
    want = run(pool, tables, q, [[0, 0], [2, 0]], CONTEXTS, splits)
    assert (want[1] == -7).all()
    assert torch.isfinite(want).all()
    q[1] = torch.nan
    got = run(pool, tables, q, [[-1, 0], [2, 0], [-1, 9], [1, 0], [0, 0], [-1, -1]], CONTEXTS, splits)
    want[1] = 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_more_splits_than_a_context_has_segments_change_no_bit(splits: int) -> None:
    pool, tables, q = filled()
    work = [[0, 0], [2, 0]]
    assert torch.equal(run(pool, tables, q, work, CONTEXTS, splits), run(pool, tables, q, work, CONTEXTS, 1))


def test_a_row_of_padding_stores_nothing_in_any_block() -> None:
    pool = pool_of(3)
    write_rotated(torch.ones(4, HEADS + 2 * KV_HEADS, DIM), pool[:, 0], pool[:, 1], torch.tensor([-1, 6, -1, -1]))
    stored = pool[:, 0, :, 0, 0].isfinite().nonzero().tolist()
    assert stored == [[1, 2]]


@pytest.fixture
def _in_place() -> Iterator[None]:
    """Let the interpreter work on its arguments; it copies whole pools back to themselves otherwise."""
    with mock.patch.object(GridExecutor, "_restore_args_dev", return_value=None):
        yield


@pytest.mark.usefixtures("_in_place")
@pytest.mark.parametrize("splits", [1, 2])
def test_block_numbers_times_strides_beyond_31_bits_are_addressed(splits: int) -> None:
    """The pool is memory that is never touched, except for the blocks in use."""
    pool, tables, q = filled()
    stride, count = 1 << 28, 12
    wide = torch.empty(stride * count).as_strided((count, *pool.shape[1:]), (stride, *pool.stride()[1:]))
    used, order = tables[0, :3].clone(), integers(11, 3, 9)
    wide[order.long()] = pool[used.long()]
    tables[0, :3] = order
    work, contexts = [[0, 0]], CONTEXTS[:1]
    got = run(wide, tables, q[:1], work, contexts, splits)
    tables[0, :3] = used
    assert torch.equal(got, run(pool, tables, q[:1], work, contexts, splits))


@pytest.mark.usefixtures("_in_place")
def test_a_slot_whose_address_exceeds_31_bits_is_stored() -> None:
    stride, count = 1 << 28, 12
    shape = pool_of(1).stride()[1:]
    wide = torch.empty(stride * count).as_strided((count, 2, BLOCK, KV_HEADS, DIM), (stride, *shape))
    qkv = torch.randn(1, HEADS + 2 * KV_HEADS, DIM)
    write_rotated(qkv, wide[:, 0], wide[:, 1], torch.tensor([11 * BLOCK + 3]))
    assert torch.equal(wide[11, 0, 3], qkv[0, HEADS : HEADS + KV_HEADS])
    assert torch.equal(wide[11, 1, 3], qkv[0, HEADS + KV_HEADS :])
