"""The C++ attention, each build that this CPU runs: against the oracle, and its bits in every kind of batch."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.attention import get_backend
from kernels.attention.base import AttentionBatch, CacheSpec
from tests.kernels.cache import Cache
from tests.support import output_of

CPU = torch.device("cpu")
DTYPES = native.DTYPES

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled kernels are not there")


def make(
    lengths: list[int],
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Cache:
    return Cache(CacheSpec(2, kv_heads, dim, block_size, dtype, CPU), lengths, heads, seed, "cpu")


def check(cache: Cache, work: list[tuple[int, int, int]], got: list[Tensor], exact: bool, **options: object) -> None:
    softcap = options.get("softcap")
    for item, out in zip(work, got, strict=True):
        error = (out.double() - cache.oracle(*item, **options)).abs().max()  # type: ignore[arg-type]
        assert error <= cache.bound(item[0], softcap, not exact), item  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 130}, {"softcap": 3.0}, {"window": 1, "softcap": 50.0}]
)
def test_mixed_batches_equal_the_oracle(
    instruction_set: str, block_size: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    cache = make([150, 1, 37, 300, 129, 128], block_size=block_size, dim=16, dtype=dtype)
    exact = dtype == torch.float32 or instruction_set != "avx512_bf16"
    for layer in (0, 1):
        cache.run([(0, 0, 100), (3, 0, 260), (4, 0, 128), (5, 0, 127)], layer=layer)
        work = [(0, 100, 101), (1, 0, 1), (2, 0, 37), (3, 260, 300), (4, 128, 129), (5, 127, 128)]
        check(cache, work, cache.run(work, padding=5, layer=layer, **options), exact, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_head_shapes_equal_the_oracle(instruction_set: str, group: int, dim: int, dtype: torch.dtype) -> None:
    cache = make([20, 2, 3, 130], 2 * group, 2, dim, dtype=dtype)
    cache.run([(3, 0, 129)])
    work = [(0, 0, 20), (1, 0, 2), (2, 0, 3), (3, 129, 130)]
    exact = dtype == torch.float32 or instruction_set != "avx512_bf16"
    check(cache, work, cache.run(work, padding=1), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 256])
@pytest.mark.parametrize("block_size", [16, 48])
def test_read_returns_what_was_written(dtype: torch.dtype, dim: int, block_size: int) -> None:
    cache = make([61, 6], dim=dim, block_size=block_size, dtype=dtype)
    cache.run([(0, 0, 61), (1, 0, 6)], layer=1)
    for s in (0, 1):
        k, v = cache.backend.read(1, cache.tables[s], cache.lengths[s])
        assert torch.equal(k, cache.k[s])
        assert torch.equal(v, cache.v[s])


def test_rows_of_wider_tensors_are_read_in_place() -> None:
    cache = make([40], 6, 2, 64, dtype=torch.bfloat16)
    want = cache.run([(0, 0, 40)])[0]
    batch = cache.batch([(0, 0, 40)])
    merged = torch.cat([cache.q[0], cache.k[0], cache.v[0]], dim=1)
    q, k, v = merged.split([6, 2, 2], dim=1)
    assert not q.is_contiguous()
    cache.backend.write(0, k, v, batch)
    assert torch.equal(cache.backend.attend(0, q, batch, scale=64**-0.5), want)


def test_another_sequence_of_nan_changes_nothing() -> None:
    for dtype in DTYPES:
        cache = make([40, 30], dtype=dtype)
        cache.k[1].fill_(torch.nan)
        cache.v[1].fill_(torch.nan)
        got, other = cache.run([(0, 0, 40), (1, 0, 30)])
        check(cache, [(0, 0, 40)], [got], False)
        assert other.isnan().all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 33, "softcap": 5.0}, {"window": 150}])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (5, 1, 80), (14, 2, 128)])
def test_bits_do_not_depend_on_chunks_neighbours_blocks_or_threads(
    instruction_set: str, dtype: torch.dtype, options: dict[str, object], heads: int, kv_heads: int, dim: int
) -> None:
    length, others = 270, [5, 140, 400, 270]
    whole = make([length], heads, kv_heads, dim, 16, dtype, seed=1)
    want = whole.run([(0, 0, length)], **options)[0]

    def same(cache: Cache, cuts: list[int], company: list[tuple[int, int, int]]) -> None:
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got = cache.run([*company, (0, start, stop)], padding=3, **options)[-1]
                assert torch.equal(got, want[start:stop]), (cuts, start, stop)

    for block_size in (16, 32, 64):
        cache = make([length, *others], heads, kv_heads, dim, block_size, dtype, seed=2)
        cache.q[0], cache.k[0], cache.v[0] = whole.q[0], whole.k[0], whole.v[0]
        for s, n in enumerate(others, 1):
            cache.run([(s, 0, n)])
        same(cache, [1, 2, 5, 9, 128, 129, 131, 200, 256, 269], [])
        same(cache, [127, 255], [(1, 4, 5), (2, 139, 140), (3, 399, 400), (4, 269, 270)])
        same(cache, list(range(250, 270)), [(2, 139, 140), (4, 269, 270), (3, 399, 400)])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 150, "softcap": 5.0}])
def test_bits_do_not_depend_on_sharing_a_prefix_or_on_splits(
    instruction_set: str, dtype: torch.dtype, options: dict[str, object]
) -> None:
    """Sequences with blocks in common are computed together, and a lone one in pieces: both bits are those of alone."""
    prefixes = {0: (None, 0), 1: (0, 256), 2: (0, 256), 3: (0, 128), 4: (2, 384), 5: (0, 16)}
    lengths = [500, 410, 700, 300, 690, 130]
    cache = make(lengths, 9, 3, 64, 32, dtype)
    for s, (of, shared) in prefixes.items():
        if of is None:
            continue
        blocks = shared // 32
        cache.k[s][: blocks * 32], cache.v[s][: blocks * 32] = cache.k[of][: blocks * 32], cache.v[of][: blocks * 32]
        cache.tables[s] = cache.tables[of][:blocks] + cache.tables[s][blocks:]
    for s, n in enumerate(lengths):
        cache.run([(s, 0, n)])
    # A chunk of this many rows is neither grouped nor split.
    want = [cache.run([(s, n - 9, n)], **options)[0] for s, n in enumerate(lengths)]
    check(cache, [(s, n - 9, n) for s, n in enumerate(lengths)], want, False, **options)
    dice = random.Random(0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for s, n in enumerate(lengths):
            for count in (1, 2, 5):
                assert torch.equal(cache.run([(s, n - count, n)], **options)[0], want[s][-count:]), (s, count)
        for _ in range(12):
            work = [(s, lengths[s] - dice.choice((1, 1, 3, 7, 9)), lengths[s]) for s in dice.sample(range(6), 5)]
            got = cache.run(work, **options)
            assert all(torch.equal(out, want[s][a - b :]) for (s, a, b), out in zip(work, got, strict=True)), work


def test_hundreds_of_sequences_with_one_prefix_equal_the_reference() -> None:
    spec = CacheSpec(1, 1, 64, 16, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    count, shared, own = 150, 16, 3
    k, v = (torch.randn(shared * 16 + count * own * 16, 1, 64, generator=generator) for _ in range(2))
    q = torch.randn(count, 8, 64, generator=generator)
    tables = tuple((*range(shared), *range(shared + own * s, shared + own * (s + 1))) for s in range(count))
    lengths = tuple(shared * 16 + 1 + s % (own * 16) for s in range(count))
    out = []
    for name in ("cpu", "reference"):
        backend = get_backend(name, spec)
        backend.bind(torch.zeros(shared + own * count, backend.block_bytes, dtype=torch.uint8))
        rows = k.shape[0]
        every = torch.arange(rows)
        backend.write(0, k, v, AttentionBatch(every, every, (0, rows), (rows,), (tuple(range(rows // 16)),)))
        batch = AttentionBatch(every[:count], every[:count], tuple(range(count + 1)), lengths, tables)
        out.append(backend.attend(0, q, batch, scale=0.125))
    assert torch.allclose(*out, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (CacheSpec(1, 1, 64, 24, torch.float32, CPU), "multiple of 16"),
        (CacheSpec(1, 1, 72, 16, torch.float32, CPU), "head sizes"),
        (CacheSpec(1, 1, 512, 16, torch.float32, CPU), "head sizes"),
        (CacheSpec(1, 1, 64, 16, torch.float16, CPU), r"no torch\.float16"),
    ],
)
def test_a_spec_that_the_cpu_backend_cannot_run_goes_to_another_backend(
    spec: CacheSpec, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=reason):
        get_backend("cpu", spec)
    with caplog.at_level("WARNING", "kernels.attention"):
        assert get_backend("auto", spec).name == "reference"
    (record,) = caplog.records
    assert "reference backend" in record.message


def test_another_device_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    spec = CacheSpec(1, 1, 64, 16, torch.float32, torch.device("meta"))
    with pytest.raises(ValueError, match="does not run on meta"):
        get_backend("cpu", spec)
    with caplog.at_level("WARNING", "kernels.attention"):
        assert get_backend("auto", spec).name == "reference"
    assert not caplog.records


def test_auto_takes_the_cpu_backend_if_it_runs_the_spec() -> None:
    assert get_backend("auto", CacheSpec(1, 1, 64, 16, torch.bfloat16, CPU)).name == "cpu"


_THREADS = """
import ctypes, os, sys, torch
from kernels import native
from tests.kernels.test_cpu_attention import make
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)  # torch's own threads exist from here on
before = len(os.listdir("/proc/self/task"))
cache = make([600, 600, 600], 6, 2, 64)
cache.run([(0, 0, 600), (1, 0, 600), (2, 0, 600)])
after = len(os.listdir("/proc/self/task"))
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
runtimes = {path for path in maps if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp"))}
library = native.library()
torch_gomp = ctypes.cast(ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so").GOMP_parallel, ctypes.c_void_p).value
print(before, after, len(runtimes), native._gomp_parallel() == torch_gomp)
"""


def test_the_cpu_backend_runs_on_torchs_openmp_threads_and_loads_no_other_runtime() -> None:
    before, after, runtimes, same = output_of([sys.executable, "-c", _THREADS]).split()
    assert (after, runtimes, same) == (before, "1", "True")
