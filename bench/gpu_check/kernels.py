"""Rows 2 and 3: errors of the kernels against fp64, and the bit tests of attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_check.table import Line, Setup, Skip, check
from kernels import ops_reference
from kernels.attention import backend_class, backend_names, get_backend
from kernels.attention.base import CacheSpec
from tests.kernels.cache import Cache

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TANH = 2.0**-11
"""Relative error of the GPU's own tanh (PTX ISA, `tanh.approx.f32`), which flash-attn uses for soft-caps."""
_WORK: dict[str, tuple[tuple[tuple[int, int, int], ...], tuple[dict[str, Any], ...]]] = {
    "bfloat16": (((9, 3, 64), (8, 2, 128)), ({}, {"window": 300})),
    "float16": (((8, 2, 128),), ({"softcap": 8.0},)),
    "float32": (((4, 1, 80),), ({}, {"window": 5})),
}
"""Dtype → shapes (query heads, KV heads, head size) and options of attention. Each pair takes seconds to compile, so
they are few; the tests in the interpreter have all of them."""
_UNITS = 4.0
"""Largest error of a fused operation, in units of the last place of the highest value."""


def errors(setup: Setup) -> Iterator[Line]:
    """Row 2: yield the error of every attention backend and of every fused operation, per dtype."""
    for name in backend_names():
        if not backend_class(name).runs_on(torch.device(setup.device)) or (name == "flash" and setup.pick(False, True)):
            continue
        for dtype in setup.pick(tuple(DTYPES), ("float32",)):
            shapes = setup.pick(_WORK[dtype][0], ((2, 1, 16),))
            yield check(f"attention {name} {dtype}", partial(attention, setup, name, dtype, shapes))
    for dtype in setup.pick(tuple(DTYPES), ("float32",)):
        for what, test in _fused(setup, DTYPES[dtype]).items():
            yield check(f"{what} {dtype}", test)


def attention(setup: Setup, name: str, dtype: str, shapes: tuple[tuple[int, int, int], ...]) -> str:
    """Compare mixed batches and decodes, on a pool full of NaN, with an oracle in fp64, within rounding errors."""
    worst = 0.0
    for heads, kv_heads, dim in shapes:
        spec = CacheSpec(2, kv_heads, dim, 0, DTYPES[dtype], torch.device(setup.device))
        worst = max(worst, *_attention_errors(setup, name, spec, heads))
    if not worst <= 1:
        raise ValueError(f"an output is off by {worst:.2f} times what rounding explains")
    return f"largest error {worst:.2f} of what rounding explains"


def _attention_errors(setup: Setup, name: str, spec: CacheSpec, heads: int) -> Iterator[float]:
    import dataclasses

    try:
        spec = dataclasses.replace(spec, block_size=get_backend(name, spec).spec.block_size)
    except ValueError as refused:
        raise Skip(str(refused)) from refused
    lengths = setup.pick([150, 1, 37, 300, 257, 256], [40, 1, 17, 30, 70, 64])
    cache = Cache(spec, lengths, heads, name=name)
    counts = setup.pick((50, 1, 37, 40, 1, 129), (9, 1, 17, 1, 6, 2))
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    cache.run([(s, 0, start) for s, start in enumerate(starts) if start])
    mixed = [(s, start, max(start + 1, lengths[s] - 1)) for s, start in enumerate(starts)]
    decodes = [(s, length - 1, length) for s, length in enumerate(lengths)]
    named = {kind: name for name, kind in DTYPES.items()}[spec.dtype]
    for options in setup.pick(_WORK[named][1], ({}, {"window": 5})):
        cap = options.get("softcap")
        for work in (mixed, decodes):
            for item, out in zip(work, cache.run(work, padding=3, **options), strict=True):
                error = float((out.double() - oracle(cache, *item, **options)).abs().nan_to_num(torch.inf).max())
                yield error / cache.bound(item[0], cap, rounded_weights=spec.dtype != torch.float32, tanh=_TANH)


def oracle(
    cache: Cache, s: int, start: int, stop: int, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Return the attention of rows `[start, stop)` of a sequence in fp64, `[rows, heads, head size]`."""
    group = cache.heads // cache.spec.num_kv_heads
    q = cache.q[s][start:stop].double().transpose(0, 1)  # [heads, rows, dim]
    k, v = (x[s][:stop].double().transpose(0, 1).repeat_interleave(group, 0) for x in (cache.k, cache.v))
    scores = q @ k.transpose(1, 2) * cache.spec.head_dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = torch.arange(start, stop)[:, None], torch.arange(stop)[None, :]
    hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
    out: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1)


def _fused(setup: Setup, dtype: torch.dtype) -> dict[str, Callable[[], str]]:
    """Return the fused operations, each as a check against the same formula in fp64."""
    from kernels import ops

    rows, cols = setup.pick((37, 4096), (3, 96))
    draw = torch.Generator().manual_seed(1)
    x, residual, weight = (torch.randn(n, cols, generator=draw).to(dtype) for n in (rows, rows, 1))
    gates = torch.randn(rows, 2 * cols, generator=draw).to(dtype) * 2
    here = torch.device(setup.device)

    def total() -> str:
        summed = (x + residual).double()  # before the call, which may write into the residual
        got, _ = ops.add_rms_norm(x.to(here), residual.to(here), weight[0].to(here), 1e-5)
        return _units(got, ops_reference.rms_norm(summed, weight[0].double(), 1e-5))

    return {
        "rms_norm": lambda: _units(
            ops.rms_norm(x.to(here), weight[0].to(here), 1e-5),
            ops_reference.rms_norm(x.double(), weight[0].double(), 1e-5),
        ),
        "add_rms_norm": total,
        "silu_mul": lambda: _units(ops.silu_mul(gates.to(here)), ops_reference.silu_mul(gates.double())),
        "gelu_mul": lambda: _units(ops.gelu_mul(gates.to(here)), ops_reference.gelu_mul(gates.double())),
        "write_rotated": lambda: _rotated(setup, dtype),
    }


def _units(got: Tensor, want: Tensor) -> str:
    """Compare with fp64; two roundings to the dtype and one of a weight are allowed."""
    found = got.cpu()
    unit = torch.finfo(found.dtype).eps * want.abs()
    unit = unit.clamp(min=torch.finfo(found.dtype).eps * float(want.abs().mean()))
    worst = float(((found.double() - want).abs() / unit).nan_to_num(torch.inf).max())
    if not worst <= _UNITS:
        raise ValueError(f"off by {worst:.1f} units of the last place")
    return f"largest error {worst:.2f} units of the last place"


def _rotated(setup: Setup, dtype: torch.dtype) -> str:
    """Compare norm, rotation and the store of K and V with the same in fp64, on a pool full of NaN."""
    from kernels.attention.base import AttentionBatch

    here = torch.device(setup.device)
    heads, kv_heads, dim, rows = setup.pick((9, 3, 64, 37), (2, 1, 16, 5))
    backend = get_backend("triton", CacheSpec(1, kv_heads, dim, 16, dtype, here))
    pool = torch.full((6, backend.block_bytes), 0xFF, dtype=torch.uint8, device=here)
    backend.bind(pool)
    draw = torch.Generator().manual_seed(2)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=draw).to(dtype)
    angles = torch.randn(rows, dim // 2, generator=draw)
    norms = torch.randn(2, dim, generator=draw).to(dtype)
    slots = torch.arange(rows - 1, -1, -1)
    batch = AttentionBatch(
        slots.to(here), torch.zeros(rows, dtype=torch.int64).to(here), (0, rows), (rows,), ((0, 1, 2),)
    )
    rotation = (angles.cos(), angles.sin())
    weights = (norms[0].to(here), norms[1].to(here), 1e-6)
    got = backend.write_rotated(
        0, qkv.to(here), batch, norms=weights, rotation=(rotation[0].to(here), rotation[1].to(here))
    )
    q, k, v = torch.split(qkv.double(), [heads, kv_heads, kv_heads], dim=1)
    wide = [
        ops_reference.rotary(ops_reference.rms_norm(x, norm.double(), 1e-6), *(r.double() for r in rotation))
        for x, norm in ((q, norms[0]), (k, norms[1]))
    ]
    keys, values = backend.read(0, (0, 1, 2), rows)
    order = slots.argsort()
    if not torch.equal(values.cpu(), v[order].to(dtype)):
        raise ValueError("the values in the pool are not those that were written")
    return f"{_units(got, wide[0])}; keys: {_units(keys, wide[1][order])}"


# ── bits ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bits(setup: Setup) -> Iterator[Line]:
    """Row 3: yield the four bit tests, in batch-invariant mode."""
    for dtype in setup.pick(("bfloat16", "float32"), ("float32",)):
        for what, test in _BIT_TESTS.items():
            yield check(f"{what} {dtype}", partial(_bit_test, setup, DTYPES[dtype], test))


def _cache(setup: Setup, dtype: torch.dtype, lengths: list[int]) -> Cache:
    heads, kv_heads, dim = setup.pick((8, 2, 128), (2, 1, 16))
    spec = CacheSpec(1, kv_heads, dim, 16, dtype, torch.device(setup.device), batch_invariant=True)
    return Cache(spec, lengths, heads, name="triton")


def _bit_test(setup: Setup, dtype: torch.dtype, test: Callable[[Setup, Cache], tuple[Tensor, Tensor]]) -> str:
    lengths = setup.pick([2000, 5, 700, 1300], [290, 5, 70])
    cache = _cache(setup, dtype, lengths)
    got, want = test(setup, cache)
    differ = int((got != want).sum())
    if differ:
        raise ValueError(f"{differ} of {want.numel()} elements differ")
    return f"yes, {want.numel()} elements"


def _fill(cache: Cache) -> None:
    """Write K and V of every sequence."""
    work = [(s, 0, length) for s, length in enumerate(cache.lengths)]
    k, v = (torch.cat(x).to(cache.spec.device) for x in (cache.k, cache.v))
    cache.backend.write(0, k, v, cache.batch(work))


def _chunked(setup: Setup, cache: Cache) -> tuple[Tensor, Tensor]:
    length = setup.pick(cache.lengths[0], 70)
    whole = cache.run([(0, 0, length)])[0]
    cuts = [0, 1, 8, length // 3, length // 3 + 1, length - 1, length]
    return torch.cat([cache.run([(0, a, b)])[0] for a, b in itertools.pairwise(cuts)]), whole


def _crowd(setup: Setup, cache: Cache) -> tuple[Tensor, Tensor]:
    _fill(cache)
    length = cache.lengths[0]
    alone = cache.run([(0, length - 20, length)])[0]
    others = [(s, max(0, n - 20 * s), n) for s, n in enumerate(cache.lengths) if s]
    return cache.run([*others, (0, length - 20, length)], padding=5)[-1], alone


def _decoded(setup: Setup, cache: Cache) -> tuple[Tensor, Tensor]:
    length = setup.pick(cache.lengths[0], 70)
    whole = cache.run([(0, 0, length)])[0]
    rows = setup.pick([0, 63, 64, 255, 256, 257, length - 1], [0, 63, 64, 69])
    return torch.cat([cache.run([(0, p, p + 1)])[0] for p in rows]), whole[rows]


def _split(setup: Setup, cache: Cache) -> tuple[Tensor, Tensor]:
    from kernels.attention.triton import TritonBackend

    _fill(cache)
    work = [(s, n - 1, n) for s, n in enumerate(cache.lengths)]
    split = torch.cat(cache.run(work))
    with mock.patch.object(TritonBackend, "_splits", return_value=1):
        return split, torch.cat(cache.run(work))


_BIT_TESTS = {
    "chunked = whole": _chunked,
    "alone = in a crowd": _crowd,
    "decode = prefill": _decoded,
    "split = whole": _split,
}
