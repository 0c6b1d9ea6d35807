"""The Triton attention kernel against a naive fp64 oracle, on a pool full of NaN, and its bits against the batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernels.attention.base import CacheSpec
from kernels.attention.triton import TritonBackend
from kernels.triton import attention
from kernels.triton.attention import SEGMENT, Tile
from tests.kernels.cache import Cache

CPU = torch.device("cpu")
SHORT = Tile(16, 64, SEGMENT, warps=4, stages=2)


def make(block_size: int, shape: tuple[int, int, int], lengths: list[int], dtype: torch.dtype, seed: int = 0) -> Cache:
    heads, kv_heads, dim = shape
    return Cache(CacheSpec(1, kv_heads, dim, block_size, dtype, CPU), lengths, heads, seed, "triton")


def fill(cache: Cache, work: list[tuple[int, int, int]]) -> None:
    """Write K and V of rows, without attention, which the interpreter computes slowly."""
    k, v = (torch.cat([x[s][a:b] for s, a, b in work]) for x in (cache.k, cache.v))
    cache.backend.write(0, k, v, cache.batch(work))


@pytest.fixture(params=["split", "whole"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "whole":
        monkeypatch.setattr(TritonBackend, "_splits", lambda self, part, window: 1)
    return bool(request.param == "split")


@pytest.fixture
def one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give chunks and decodes the same tile, as for batch-invariant results."""
    monkeypatch.setattr(attention, "tiles", partial(attention.tiles, invariant=True))


CASES = [
    (1, (4, 4, 64), {}),
    (16, (9, 3, 64), {"window": 33}),
    (24, (4, 1, 80), {"softcap": 3.0}),
    (256, (7, 1, 128), {"window": 130, "softcap": 5.0}),
    (16, (2, 1, 256), {}),
    (4, (4, 2, 8), {"window": 1}),
    (32, (32, 1, 16), {"window": 300}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("block_size", "shape", "options"), CASES)
def test_mixed_batches_equal_the_oracle(
    split: bool, block_size: int, shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    cache = make(block_size, shape, [110, 1, 600, 257, 30], dtype)
    fill(cache, [(0, 0, 90), (2, 0, 599), (3, 0, 256)])
    work = [(0, 90, 110), (1, 0, 1), (2, 599, 600), (3, 256, 257), (4, 0, 30)]
    for item, out in zip(work, cache.run(work, padding=3, **options), strict=True):
        error = float((out.double() - cache.oracle(*item, **options)).abs().max())
        bound = cache.bound(item[0], options.get("softcap"), rounded_weights=dtype == torch.float16)
        assert error <= bound, (item, error, bound)


def test_split_contexts_have_the_bits_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for block_size, shape, options in CASES:
        lengths = [1, 64, 256, 257, 511, 700]
        cache = make(block_size, shape, lengths, torch.float32)
        fill(cache, [(s, 0, n) for s, n in enumerate(lengths)])
        work = [(s, n - 1, n) for s, n in enumerate(lengths)]
        split = cache.run(work, **options)
        with monkeypatch.context() as patch:
            patch.setattr(TritonBackend, "_splits", lambda self, part, window: 1)
            for got, want in zip(split, cache.run(work, **options), strict=True):
                assert torch.equal(got, want)


@pytest.mark.usefixtures("one_tile")
@pytest.mark.parametrize(("block_size", "shape", "options"), CASES[1:4])
def test_bits_depend_on_chunks_neighbours_and_blocks_no_more_than_on_the_tile(
    block_size: int, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """Chunked = whole, alone = crowd, decode = prefill."""
    length, first = 290, 250
    whole = make(block_size, shape, [length], torch.float32, seed=1)
    fill(whole, [(0, 0, first)])
    want = {0: whole.run([(0, 0, 12)], **options)[0], first: whole.run([(0, first, length)], **options)[0]}
    cache = make(48 if block_size == 1 else 3, shape, [length, 5, 140, 400], torch.float32, seed=2)
    cache.q[0], cache.k[0], cache.v[0] = whole.q[0], whole.k[0], whole.v[0]
    fill(cache, [(s, 0, n) for s, n in enumerate([length, 5, 140, 400])])
    company = [(1, 4, 5), (2, 130, 140), (3, 399, 400)]
    for begin, cuts, others in (
        (0, [1, 8, 12], company),
        (first, [255, 256, 257, 289, length], []),
        (first, [270, length], company),
        (first, [287, 288, length], company[2:]),
    ):
        for start, stop in itertools.pairwise([begin, *cuts]):
            got = cache.run([*others, (0, start, stop)], padding=2, **options)[-1]
            assert torch.equal(got, want[begin][start - begin : stop - begin]), (cuts, start, stop)


@pytest.mark.parametrize(("block_size", "shape", "options"), CASES[1:3])
def test_with_two_tiles_bits_depend_on_the_tile_alone(
    block_size: int, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """Chunks that are all long = whole, decode alone = in a crowd; a decode and a long chunk may differ."""
    length = 290
    short, long = attention.tiles(torch.float16, shape[2], shape[0] // shape[1])
    assert short != long
    whole = make(block_size, shape, [length], torch.float16, seed=1)
    fill(whole, [(0, 0, 200)])
    chunk = whole.run([(0, 200, length)], **options)[0]
    decode = whole.run([(0, length - 1, length)], **options)[0]
    cache = make(3, shape, [length, 5, 140], torch.float16, seed=2)
    cache.q[0], cache.k[0], cache.v[0] = whole.q[0], whole.k[0], whole.v[0]
    fill(cache, [(0, 0, length), (1, 0, 5), (2, 0, 140)])
    crowd = [(1, 4, 5), (2, 120, 140)]
    for start, stop in ((200, 241), (241, 260), (260, length)):
        got = cache.run([*crowd, (0, start, stop)], padding=2, **options)[-1]
        assert torch.equal(got, chunk[start - 200 : stop - 200])
    assert torch.equal(cache.run([*crowd, (0, length - 1, length)], padding=1, **options)[-1], decode)


def test_items_of_padding_and_stale_table_entries_are_ignored() -> None:
    """As in a graph: more items than sequences have, longer tables than contexts, ids of blocks that do not exist."""
    cache = make(16, (4, 2, 16), [70, 300], torch.float32)
    fill(cache, [(0, 0, 69), (1, 0, 299)])
    work = [(0, 69, 70), (1, 299, 300)]
    want = torch.cat(cache.run(work))
    batch = cache.batch(work)
    backend = cache.backend
    assert isinstance(backend, TritonBackend)
    call = backend._upload(batch, 2)
    tables, places = torch.full((5, 40), 2**30, dtype=torch.int32), torch.tensor([4, 1, -1], dtype=torch.int32)
    for place, table in zip((4, 1), batch.block_tables, strict=True):
        tables[place, : len(table)] = torch.tensor(table)
    items = torch.tensor([[0, 0], [-1, 0], [1, 0], [-1, 5]], dtype=torch.int32)
    q = torch.cat([cache.q[0][69:], cache.q[1][299:]])
    for splits in (1, 3):
        out = torch.full_like(q, torch.nan)
        lengths = replace(call.lengths, tables=tables, places=places)
        attention.attend(
            q, backend._kv[:, 0, 0], backend._kv[:, 0, 1], out, lengths, items, SHORT, scale=0.25, splits=splits
        )
        assert torch.equal(out, want), splits


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_equal_the_oracle(seed: int) -> None:
    chance = random.Random(seed)
    group, kv_heads = chance.choice([1, 2, 3, 5, 8]), chance.choice([1, 2])
    shape = (group * kv_heads, kv_heads, chance.choice([16, 40, 64, 96]))
    options: dict[str, Any] = {"window": chance.choice([None, None, 17, 300])}
    lengths = [chance.choice([1, 3, 65, 257, chance.randint(1, 400)]) for _ in range(4)]
    cache = make(chance.choice([1, 5, 16, 64]), shape, lengths, torch.float32, seed)
    starts = [max(0, n - chance.choice([1, 1, 5, 40])) for n in lengths]
    fill(cache, [(s, 0, start) for s, start in enumerate(starts) if start])
    work = [(s, start, n) for s, (start, n) in enumerate(zip(starts, lengths, strict=True))]
    chance.shuffle(work)
    for item, out in zip(work, cache.run(work, padding=chance.randint(0, 3), **options), strict=True):
        assert float((out.double() - cache.oracle(*item, **options)).abs().max()) <= cache.bound(item[0])
