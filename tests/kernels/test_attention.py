"""Paged attention against a naive fp64 oracle, on a pool full of NaN, and its bits against the shape of the batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.attention import _class, backend_names, get_backend
from kernels.attention.base import CacheSpec
from tests.kernels.cache import Cache

CPU = torch.device("cpu")


def spec(block_size: int = 16, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> CacheSpec:
    return CacheSpec(2, kv_heads, dim, block_size, dtype, CPU)


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 256])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 130}, {"softcap": 3.0}, {"window": 1, "softcap": 2.0}]
)
def test_mixed_batches_equal_the_oracle(block_size: int, options: dict[str, object]) -> None:
    cache = Cache(spec(block_size), [150, 1, 37, 300, 129, 128], heads=6)
    for layer in (0, 1):  # partial prefills, the remaining prefills, then decodes beside chunks
        cache.run([(0, 0, 100), (3, 0, 260), (4, 0, 128), (5, 0, 127)], layer=layer)
        work = [(0, 100, 101), (1, 0, 1), (2, 0, 37), (3, 260, 300), (4, 128, 129), (5, 127, 128)]
        got = cache.run(work, padding=5, layer=layer, **options)
        for item, out in zip(work, got, strict=True):
            assert torch.allclose(out.double(), cache.oracle(*item, **options), atol=2e-6), item  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (2, 2, 64), (4, 1, 80), (9, 3, 64), (8, 8, 16), (5, 1, 24)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_shapes_equal_the_oracle(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    cache = Cache(spec(16, kv_heads, dim, dtype), [20, 2, 3], heads)
    work = [(0, 0, 20), (1, 0, 2), (2, 0, 3)]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for item, out in zip(work, cache.run(work, padding=1), strict=True):
        assert torch.allclose(out.double(), cache.oracle(*item), atol=tolerance)


def test_long_decodes_are_split_over_parts_without_a_trace() -> None:
    lengths = [700, 650, 800, 641, 1, 130] * 4
    cache = Cache(spec(16, 4, 64), lengths, heads=8)
    for s, n in enumerate(lengths):
        if n > 1:
            cache.run([(s, 0, n - 1)])
    work = [(s, n - 1, n) for s, n in enumerate(lengths)]
    for item, out in zip(work, cache.run(work), strict=True):
        assert torch.allclose(out.double(), cache.oracle(*item), atol=2e-6)


def test_read_returns_what_was_written() -> None:
    cache = Cache(spec(4), [11, 6], heads=2)
    cache.run([(0, 0, 11), (1, 0, 6)], layer=1)
    for s in (0, 1):
        k, v = cache.backend.read(1, cache.tables[s], cache.lengths[s])
        assert torch.equal(k, cache.k[s])
        assert torch.equal(v, cache.v[s])


def test_another_sequence_of_nan_changes_nothing() -> None:
    cache = Cache(spec(), [40, 30], heads=4)
    cache.k[1].fill_(torch.nan)
    cache.v[1].fill_(torch.nan)
    (got, _) = cache.run([(0, 0, 40), (1, 0, 30)])
    assert torch.allclose(got.double(), cache.oracle(0, 0, 40), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 33, "softcap": 5.0}])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (4, 1, 80)])
def test_bits_do_not_depend_on_chunks_neighbours_or_blocks(
    dtype: torch.dtype, options: dict[str, object], heads: int, kv_heads: int, dim: int
) -> None:
    length, others = 270, [5, 140, 400, 270]
    whole = Cache(spec(16, kv_heads, dim, dtype), [length], heads, seed=1)
    want = whole.run([(0, 0, length)], **options)[0]

    def same(cache: Cache, cuts: list[int], company: list[tuple[int, int, int]]) -> None:
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            got = cache.run([*company, (0, start, stop)], padding=3, **options)[-1]
            assert torch.equal(got, want[start:stop]), (cuts, start, stop)

    for block_size in (1, 4, 24, 32):
        cache = Cache(spec(block_size, kv_heads, dim, dtype), [length, *others], heads, seed=2)
        cache.q[0], cache.k[0], cache.v[0] = whole.q[0], whole.k[0], whole.v[0]
        for s, n in enumerate(others, 1):
            cache.run([(s, 0, n)])
        same(cache, [1, 2, 5, 9, 128, 129, 131, 200, 256, 269], [])
        same(cache, [127, 255], [(1, 4, 5), (2, 139, 140), (3, 399, 400), (4, 269, 270)])
        same(cache, list(range(100, 270, 34)), [(2, 100, 140), (4, 0, 270)])
        same(cache, list(range(250, 270)), [(2, 139, 140), (4, 269, 270), (3, 399, 400)])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 12, 13, 27, 70])
def test_bits_do_not_depend_on_how_threads_cut_the_rows(rows: int) -> None:
    cache = Cache(spec(16, 3, 64), [140], heads=9)
    want = cache.run([(0, 0, 140)])[0]
    for start in (0, 60, 127, 140 - rows):
        stop = min(140, start + rows)
        assert torch.equal(cache.run([(0, start, stop)])[0], want[start:stop]), (start, stop)


def test_auto_takes_a_backend_and_unknown_names_are_refused() -> None:
    assert get_backend("auto", spec()).name in backend_names()
    with pytest.raises(ValueError, match="unknown attention backend 'nope'"):
        get_backend("nope", spec())


def test_the_names_of_the_backends_are_known_without_importing_torch() -> None:
    code = "import sys, kernels.attention as a; a.backend_names(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", backend_names())
def test_a_backend_has_the_name_of_its_module(name: str) -> None:
    assert _class(name).name == name
