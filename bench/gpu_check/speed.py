"""Row 9: bandwidth of attention over the KV cache in decodes, and its arithmetic in prefills, per tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from bench.gpu_check.table import Line, Setup, check
from bench.gpu_check.timing import copy_bandwidth, recorded, seconds
from kernels.attention import get_backend
from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec

_HEADS, _KV_HEADS, _DIM = 32, 8, 128
"""The attention of Llama 3 8B."""
_CACHED = 512 << 20
"""Bytes of K and V, over all layers, that no cache of the device holds."""
_MAX_LAYERS = 32


def attention(setup: Setup) -> Iterator[Line]:
    """Yield the bandwidth of a copy, that of decodes beside it, and the TFLOP/s of prefills."""
    copy = copy_bandwidth(setup)
    yield Line("copy", f"{copy / 1e9:.0f} GB/s, read and written", "", {"copy": copy})
    for context in setup.pick((1024, 8192), (40,)):
        for count in setup.pick((1, 32, 128), (2,)):
            yield check(f"decode {count} x {context}", partial(_decode, setup, count, context, copy))
    for name in ("short", "long", "64 x 64"):
        for length in setup.pick((2048, 8192), (40,)):
            yield check(f"prefill {length}, tile {name}", partial(_prefill, setup, name, length))


def _shape(setup: Setup) -> tuple[int, int, int]:
    return setup.pick((_HEADS, _KV_HEADS, _DIM), (2, 1, 16))  # type: ignore[no-any-return]


def _decode(setup: Setup, count: int, context: int, copy: float) -> Line:
    """Measure one decode of `count` sequences in each layer, recorded as one graph."""
    heads, kv_heads, dim = _shape(setup)
    layer_bytes = count * context * 2 * kv_heads * dim * 2
    free = setup.pick(torch.cuda.mem_get_info()[0] // 2, 1 << 22)
    layers = max(1, min(_MAX_LAYERS, -(-_CACHED // layer_bytes), free // layer_bytes))
    backend = _backend(setup, layers if not setup.reduced else 2, count * -(-context // 16))
    batch = _batch(setup, count, context, 1)
    q = torch.randn(count, heads, dim).to(torch.bfloat16 if not setup.reduced else torch.float32).to(setup.device)
    numbers = range(backend.spec.num_layers)
    call = recorded(setup, lambda: [backend.attend(layer, q, batch, scale=dim**-0.5) for layer in numbers])
    taken = seconds(setup, call) / backend.spec.num_layers
    rate = layer_bytes / taken
    values = {f"share {count} x {context}": rate / copy, f"rate {count} x {context}": rate}
    detail = f"{taken * 1e6:.1f} us a layer, {rate / 1e9:.0f} GB/s, {rate / copy:.0%} of the copy"
    return Line(f"decode {count} x {context}", detail, "", values)


def _prefill(setup: Setup, name: str, length: int) -> Line:
    """Measure the prefill of one sequence, each piece with one tile."""
    from kernels.triton import attention as kernels

    heads, kv_heads, dim = _shape(setup)
    dtype = setup.pick(torch.bfloat16, torch.float32)
    short, long = kernels.tiles(dtype, dim, heads // kv_heads)
    tile = {"short": short, "long": long, "64 x 64": kernels.Tile(64, 64, kernels.WHOLE, warps=8, stages=2)}[name]
    with mock.patch.object(kernels, "tiles", return_value=(tile, tile)):
        backend = _backend(setup, 1, -(-length // 16))
        batch = _batch(setup, 1, length, length)
        q = torch.randn(length, heads, dim).to(dtype).to(setup.device)
        taken = seconds(setup, lambda: backend.attend(0, q, batch, scale=dim**-0.5))
    operations = 4 * dim * heads * length * (length + 1) / 2
    detail = f"{taken * 1e3:.2f} ms, {operations / taken / 1e12:.0f} TFLOP/s ({tile.rows} rows x {tile.keys} keys)"
    return Line(f"prefill {length}, tile {name}", detail, "", {f"flops {name} {length}": operations / taken})


def _backend(setup: Setup, layers: int, blocks: int) -> AttentionBackend:
    """Return the Triton backend over a pool of zeros."""
    heads, kv_heads, dim = _shape(setup)
    dtype = setup.pick(torch.bfloat16, torch.float32)
    spec = CacheSpec(layers, kv_heads, dim, 16, dtype, torch.device(setup.device), heads)
    backend = get_backend("triton", spec)
    pool = torch.zeros((blocks, backend.block_bytes), dtype=torch.uint8, device=setup.device)
    backend.bind(pool)
    backend.reserve(128, 8192)
    return backend


def _batch(setup: Setup, count: int, context: int, rows: int) -> AttentionBatch:
    """Return `count` sequences of `context` tokens, of which the last `rows` are computed, in shuffled blocks."""
    blocks = -(-context // 16)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0)).tolist()
    tables = tuple(tuple(order[s * blocks : (s + 1) * blocks]) for s in range(count))
    here = torch.device(setup.device)
    slots = [table[p // 16] * 16 + p % 16 for table in tables for p in range(context - rows, context)]
    positions = [p for _ in tables for p in range(context - rows, context)]
    return AttentionBatch(
        torch.tensor(slots).to(here),
        torch.tensor(positions).to(here),
        tuple(range(0, count * rows + 1, rows)),
        (context,) * count,
        tables,
    )
