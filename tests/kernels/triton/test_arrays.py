"""A batch whose arrays are on the device already has the bits of one with tuples, whatever its padding holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernels.attention.base import AttentionBatch, CacheSpec, DeviceArrays
from kernels.attention.triton import TritonBackend
from tests.kernels.cache import Cache

HEADS = 4


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arrays_of(cache: Cache, batch: AttentionBatch, padding: int, longest: int) -> DeviceArrays:
    """The arrays of a batch: rows of the tables in another order, with stale ends, and sequences of padding."""
    backend, sequences = cache.backend, batch.num_sequences
    assert isinstance(backend, TritonBackend)
    assert backend.tile_tokens is not None
    short, long = backend.tile_tokens
    tables = torch.full((2 * sequences + 1, 60), 2**30, dtype=torch.int32)
    places = [2 * (sequences - s) for s in range(sequences)]
    for place, table in zip(places, batch.block_tables, strict=True):
        tables[place, : len(table)] = ints(*table)
    counts = [b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    few = [(s, 0) for s, count in enumerate(counts) if count <= short]
    many = [(s, at) for s, count in enumerate(counts) if count > short for at in range(0, count, long)]
    return DeviceArrays(
        tables,
        ints(*places, *[-1] * padding),
        ints(*batch.context_lens, *[0] * padding),
        ints(*batch.cu_seqlens, *[batch.num_rows] * padding),
        ints(*few, *[(-1, 0)] * padding),
        ints(*many).view(-1, 2),
        longest,
        max(batch.context_lens),
    )


@pytest.mark.parametrize(("longest", "invariant"), [(600, False), (1024, True), (4096, False)])
def test_arrays_give_the_bits_of_tuples(longest: int, invariant: bool) -> None:
    spec = CacheSpec(1, 2, 32, 16, torch.float16, torch.device("cpu"), HEADS, invariant)
    cache = Cache(spec, [600, 1, 40, 257], HEADS, 3, "triton")
    for s, length in enumerate(cache.lengths):  # without attention, which the interpreter computes slowly
        cache.backend.write(0, cache.k[s], cache.v[s], cache.batch([(s, 0, length)]))
    cache.backend.reserve(6, 4096)
    work = [(0, 599, 600), (1, 0, 1), (2, 0, 40), (3, 255, 257)]
    batch = cache.batch(work, padding=2)
    q, k, v = (torch.cat([*(x[s][a:b] for s, a, b in work), x[0][:2]]) for x in (cache.q, cache.k, cache.v))
    for options in ({}, {"window": 70, "softcap": 5.0}):
        want = cache.backend.attend(0, q, batch, scale=0.2, **options)  # type: ignore[arg-type]
        ready = dataclasses.replace(batch, arrays=arrays_of(cache, batch, 2, longest))
        before = cache.pool.clone()
        cache.backend.write(0, k, v, ready)
        assert torch.equal(cache.pool, before)  # the same values, and nothing for padding
        got = cache.backend.attend(0, q, ready, scale=0.2, **options)  # type: ignore[arg-type]
        assert torch.equal(got[: batch.num_rows], want[: batch.num_rows])
