"""Measures paged attention alone: decode against the time to read K and V once, prefill against the peak FLOP rate.

Bandwidth and peak are measured before and after each case, so that they see the same machine. FLOP are 4 * head_dim for
each pair of query and key that is not masked.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.attention import get_backend
from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec
from kernels.linear import Linear

_BLOCK = 16
_POOL_BYTES = 1 << 30
"""Bytes of K and V over all layers: enough that no layer finds its K and V in a cache."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of sequences with these lengths; the last `queries` tokens of each sequence are computed."""

    name: str
    lengths: tuple[int, ...]
    queries: int
    heads: int
    kv_heads: int
    head_dim: int

    def flop(self) -> int:
        """Floating-point operations of one layer."""
        pairs = sum(sum(range(n - self.queries + 1, n + 1)) for n in self.lengths)
        return 4 * self.head_dim * self.heads * pairs

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one layer."""
        return sum(self.lengths) * 2 * self.kv_heads * self.head_dim * dtype.itemsize


SHAPES = {"135M": (9, 3, 64), "1B": (32, 8, 64), "8B": (32, 8, 128), "MHA": (16, 16, 80)}
"""Query heads, KV heads, head size."""


def cases() -> Iterator[Case]:
    """Return cases of decode and prefill for several model shapes."""
    rng = random.Random(0)
    spread = tuple(rng.randint(256, 2048) for _ in range(128))
    for name, shape in SHAPES.items():
        yield Case(f"{name} decode, 128 of 256-2048", spread, 1, *shape)
    for context in (256, 1024, 2048):
        yield Case(f"135M decode, 128 of {context}", (context,) * 128, 1, *SHAPES["135M"])
    yield Case("135M decode, 1 of 2048", (2048,), 1, *SHAPES["135M"])
    for name, shape in SHAPES.items():
        yield Case(f"{name} prefill, 2048", (2048,), 2048, *shape)
    yield Case("135M prefill, 8 of 384", (384,) * 8, 384, *SHAPES["135M"])
    yield Case("135M chunk of 512 at 8192", (8192,), 512, *SHAPES["135M"])


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds for one layer (medians)."""

    case: Case
    seconds: dict[str, float]
    """Backend → seconds."""
    bandwidth: float
    """Bytes per second of reading memory, measured just before and after."""
    peak: float
    """FLOP per second of a matrix product, measured just before and after."""


def measure(case: Case, dtype: torch.dtype, backends: tuple[str, ...], rounds: int) -> Measured:
    """Measure the backends on a case, in turns."""
    machine = [(bandwidth(), peak(dtype))]
    runs = {name: _layers(case, dtype, name) for name in backends}
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    machine.append((bandwidth(), peak(dtype)))
    return Measured(
        case,
        {name: statistics.median(values) for name, values in seconds.items()},
        max(b for b, _ in machine),
        max(p for _, p in machine),
    )


def _layers(case: Case, dtype: torch.dtype, name: str) -> Callable[[], float]:
    """Return a function that runs all layers and returns the seconds of one."""
    blocks = [-(-n // _BLOCK) for n in case.lengths]
    layer_bytes = sum(blocks) * _BLOCK * 2 * case.kv_heads * case.head_dim * dtype.itemsize
    layers = max(1, min(30, _POOL_BYTES // layer_bytes))
    spec = CacheSpec(layers, case.kv_heads, case.head_dim, _BLOCK, dtype, torch.device("cpu"))
    backend = get_backend(name, spec)
    pool = torch.empty((sum(blocks), backend.block_bytes), dtype=torch.uint8)
    backend.bind(pool)
    pool.view(dtype).normal_()
    batch = _batch(case, blocks)
    q = torch.randn(batch.num_rows, case.heads, case.head_dim).to(dtype)
    _attend(backend, 0, q, batch)

    def run() -> float:
        start = time.perf_counter()
        for layer in range(layers):
            _attend(backend, layer, q, batch)
        return (time.perf_counter() - start) / layers

    return run


def _attend(backend: AttentionBackend, layer: int, q: Tensor, batch: AttentionBatch) -> None:
    backend.attend(layer, q, batch, scale=q.shape[2] ** -0.5)


def _batch(case: Case, blocks: list[int]) -> AttentionBatch:
    """Return block tables in random order, as after some time of use."""
    order = list(range(sum(blocks)))
    random.Random(0).shuffle(order)
    tables = [tuple(order.pop() for _ in range(count)) for count in blocks]
    slots, positions, cu = [], [], [0]
    for table, length in zip(tables, case.lengths, strict=True):
        for p in range(length - case.queries, length):
            slots.append(table[p // _BLOCK] * _BLOCK + p % _BLOCK)
            positions.append(p)
        cu.append(len(slots))
    return AttentionBatch(torch.tensor(slots), torch.tensor(positions), tuple(cu), case.lengths, tuple(tables))


def bandwidth(size: int = 256 << 20) -> float:
    """Measure the bytes per second that all threads together read from memory: the best of five, on huge pages."""
    values = torch.empty(size // 8, dtype=torch.int64)
    if (library := native.library()) is not None:
        library.tm_huge_pages(values.data_ptr(), size)
    values.fill_(1)
    return size / min(_seconds(values.sum) for _ in range(5))


def peak(dtype: torch.dtype) -> float:
    """Measure the FLOP per second of a matrix product that fits into the caches: the best of ten."""
    rows, size = 512, 1024
    linear = Linear(torch.randn(size, size).to(dtype))
    x = torch.randn(rows, size).to(dtype)
    return 2 * rows * size * size / min(_seconds(lambda: linear(x)) for _ in range(10))


def _seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


HEADER = f"{'case':<30} {'ms':>9} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>6} {'/ read':>7} {'reference /':>12}"


def line(found: Measured, dtype: torch.dtype, name: str = "cpu") -> str:
    """Format a case as a line: a prefill as a share of the peak rate (`of peak`), a decode as its time divided by
    the time to read K and V once (`/ read`)."""
    case, seconds = found.case, found.seconds[name]
    flops, rate = case.flop() / seconds, case.kv_bytes(dtype) / seconds
    other = f"{found.seconds['reference'] / seconds:.1f}" if "reference" in found.seconds else "-"
    decode = case.queries == 1
    return (
        f"{case.name:<30} {seconds * 1e3:9.3f} {flops / 1e9:8.0f} {'-' if decode else f'{flops / found.peak:.0%}':>8} "
        f"{rate / 1e9:6.1f} {f'{found.bandwidth / rate:.2f}' if decode else '-':>7} {other:>12}"
        f"   ({found.peak / 1e9:.0f} GFLOP/s, {found.bandwidth / 1e9:.1f} GB/s)"
    )
