"""The flash backend over the stand-in: against the oracle, and by the library's rules."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention import backend_names, get_backend
from kernels.attention.base import AttentionBatch, CacheSpec, DeviceArrays
from kernels.attention.flash import FlashBackend
from tests.kernels.cache import Cache
from tests.kernels.flash_stand_in import FlashStandIn
from worker.settings import Settings

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)


def make(
    lengths: list[int],
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Cache:
    return Cache(CacheSpec(2, kv_heads, dim, block_size, dtype, CPU), lengths, heads, seed, "flash")


def check(cache: Cache, work: list[tuple[int, int, int]], padding: int = 0, layer: int = 0, **options: Any) -> None:
    for item, out in zip(work, cache.run(work, padding, layer, **options), strict=True):
        error = (out.double() - cache.oracle(*item, **options)).abs().max()
        assert error <= cache.bound(item[0], options.get("softcap"), rounded_weights=True), item


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 130}, {"window": 10_000}, {"softcap": 3.0}, {"window": 1, "softcap": 2.0}]
)
def test_mixed_batches_equal_the_oracle(
    flash: FlashStandIn, block_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    cache = make([150, 1, 37, 300, 257, 256], block_size=block_size, dtype=dtype)
    for layer in (0, 1):
        cache.run([(0, 0, 100), (3, 0, 260), (4, 0, 256), (5, 0, 127)], layer=layer)
        work = [(0, 100, 101), (1, 0, 1), (2, 0, 37), (3, 260, 300), (4, 256, 257), (5, 127, 256)]
        check(cache, work, padding=5, layer=layer, **options)
    assert set(flash.calls) == {"varlen"}


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 5.0}])
@pytest.mark.parametrize("padding", [0, 3])
def test_pure_decodes_equal_the_oracle_and_take_the_decoding_kernel(
    flash: FlashStandIn, padding: int, options: dict[str, Any]
) -> None:
    lengths = [1, 2, 255, 256, 257, 513]
    cache = make(lengths)
    for s, n in enumerate(lengths):
        if n > 1:
            cache.run([(s, 0, n - 1)])
    flash.calls.clear()
    check(cache, [(s, n - 1, n) for s, n in enumerate(lengths)], padding, **options)
    assert flash.calls == ["kvcache"]


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (2, 2, 64), (4, 1, 80), (9, 3, 64), (8, 8, 128), (5, 1, 24), (2, 1, 256)]
)
def test_head_shapes_equal_the_oracle(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    cache = make([20, 2, 3], heads, kv_heads, dim, dtype=dtype)
    check(cache, [(0, 0, 19), (1, 0, 1), (2, 0, 3)], padding=1)
    check(cache, [(0, 19, 20), (1, 1, 2)])


@pytest.mark.usefixtures("flash")
def test_chunks_and_shared_blocks_give_what_the_whole_gives() -> None:
    """A second sequence begins with the blocks of the first sequence, and continues with its own."""
    cache = make([600, 600])
    (whole,) = cache.run([(0, 0, 600)])
    cache.tables[1] = (*cache.tables[0][:2], cache.tables[1][2])
    for x in (cache.q, cache.k, cache.v):
        x[1] = x[0].clone()
    bound = 2 * cache.bound(0, rounded_weights=True)
    for start, stop in [(512, 513), (513, 590), (590, 600)]:
        (got,) = cache.run([(1, start, stop)])
        assert (got.float() - whole[start:stop].float()).abs().max() <= bound


@pytest.mark.usefixtures("flash")
def test_read_returns_what_was_written() -> None:
    cache = make([300, 6])
    cache.run([(0, 0, 300), (1, 0, 6)], layer=1)
    for s in (0, 1):
        k, v = cache.backend.read(1, cache.tables[s], cache.lengths[s])
        assert torch.equal(k, cache.k[s])
        assert torch.equal(v, cache.v[s])


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("seed", range(8))
def test_flash_agrees_with_the_reference_on_random_batches(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 3, 40, 256, 257, 700]) for _ in range(draw.randint(1, 6))]
    options = {"window": draw.choice([None, 1, 64, 400]), "softcap": draw.choice([None, 8.0])}
    caches = [
        Cache(CacheSpec(2, 2, 24, 256, torch.bfloat16, CPU), lengths, 4, seed, name) for name in ("flash", "reference")
    ]
    steps: list[list[tuple[int, int, int]]] = []
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        work = []
        for s, n in enumerate(lengths):
            count = min(n - done[s], draw.choice([1, 1, 2, 100, 512]))
            if count and draw.random() < 0.7:
                work.append((s, done[s], done[s] + count))
                done[s] += count
        if work:
            steps.append(work)
    for work in steps:
        ours, theirs = (cache.run(work, padding=draw.randint(0, 3), **options) for cache in caches)
        for (s, _, _), got, want in zip(work, ours, theirs, strict=True):
            bound = 2 * caches[0].bound(s, options["softcap"], rounded_weights=True)
            assert (got.float() - want.float()).abs().max() <= bound


@pytest.mark.usefixtures("flash")
def test_a_batch_of_padding_alone_gives_zeros() -> None:
    cache = make([5])
    batch = AttentionBatch(torch.tensor([-1, -1]), torch.tensor([0, 0]), (0,), (), ())
    q = torch.full((2, 6, 16), torch.nan, dtype=torch.bfloat16)
    assert torch.equal(cache.backend.attend(0, q, batch, scale=1.0), torch.zeros_like(q))


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float16 and bfloat16"),
        ({"block_size": 16}, "multiple of 256"),
        ({"head_dim": 12}, "multiples of 8"),
        ({"head_dim": 264}, "up to 256"),
        ({"device": torch.device("meta")}, "does not run on meta"),
    ],
)
def test_a_spec_that_the_library_does_not_run_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"block_size": 256, "head_dim": 64, "dtype": torch.bfloat16, "device": CPU}
    with pytest.raises(ValueError, match=message):
        get_backend("flash", CacheSpec(num_layers=1, num_kv_heads=1, **{**good, **change}))


def test_without_flash_attn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CacheSpec(1, 1, 64, 256, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="does not run on cpu"):
        get_backend("flash", spec)
    monkeypatch.setattr(FlashBackend, "device_types", None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[flash\]'"):
        get_backend("flash", spec)
    monkeypatch.setitem(sys.modules, "flash_attn", object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"flash-attn 2\.8"):
        get_backend("flash", spec)


def test_flash_attn_is_imported_only_when_the_backend_is_created() -> None:
    assert "flash_attn" not in sys.modules


@pytest.mark.usefixtures("flash")
def test_auto_prefers_flash_and_takes_its_block_size() -> None:
    backend = get_backend("auto", CacheSpec(1, 1, 64, 0, torch.bfloat16, CPU))
    assert (backend.name, backend.spec.block_size) == ("flash", 256)


def test_auto_takes_another_backend_if_flash_cannot_run_the_spec(
    flash: FlashStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    backend = get_backend("auto", CacheSpec(1, 1, 64, 16, torch.bfloat16, CPU))
    assert backend.name != "flash"
    assert "multiple of 256" in caplog.text


def test_auto_says_nothing_of_backends_for_other_devices(caplog: pytest.LogCaptureFixture) -> None:
    backend = get_backend("auto", CacheSpec(1, 1, 64, 0, torch.float32, CPU))
    assert backend.spec.block_size == 16
    assert "flash" not in caplog.text


def test_the_setting_offers_every_backend() -> None:
    asked = {Settings(model="m", attention=name).attention for name in ("auto", *backend_names())}
    assert asked == {"auto", *backend_names()}


# ── the stand-in itself ───────────────────────────────────────────────────────────────────────────────────────────


def arguments() -> dict[str, Any]:
    """Of a good call: two decodes."""
    pool = torch.zeros(4, 2, 2, 256, 2, 16, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(2, 1, 4, 16, dtype=torch.bfloat16),
        "k_cache": pool[:, 1, 0],
        "v_cache": pool[:, 1, 1],
        "cache_seqlens": torch.tensor([3, 300], dtype=torch.int32),
        "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
        "softmax_scale": 0.25,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
    }


def varlen(given: dict[str, Any]) -> dict[str, Any]:
    """The same as a mixed batch: three rows and one."""
    given = dict(given)
    given["q"] = given["q"].new_zeros(4, *given["q"].shape[2:])
    given["k"], given["v"] = given.pop("k_cache"), given.pop("v_cache")
    del given["cache_seqlens"]
    ends = {"cu_seqlens_q": [0, 3, 4], "cu_seqlens_k": [0, 3, 303]}
    return (
        given
        | {n: torch.tensor(x, dtype=torch.int32) for n, x in ends.items()}
        | {
            "max_seqlen_q": 3,
            "max_seqlen_k": 300,
        }
    )


def gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


BOTH: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "fp32 queries": ("q", lambda q: q.float(), "fp16 and bf16"),
    "another dtype": ("q", lambda q: q.half(), "same dtype"),
    "gaps in q": ("q", gaps, "contiguous last dimension"),
    "q elsewhere": ("q", lambda q: q.to("meta"), "on CUDA"),
    "heads that do not divide": ("q", lambda q: q[..., :3, :], "must divide"),
    "another head size": ("q", lambda q: q[..., :8], "head size"),
    "an odd row stride": ("q", lambda q: torch.zeros(*q.shape[:-2], 4, 20, dtype=q.dtype)[..., :16], "misaligned"),
    "a table of int64": ("block_table", lambda t: t.long(), "int32"),
    "a table with gaps": ("block_table", lambda t: t.T.contiguous().T, "contiguous last dimension"),
    "a short table": ("block_table", lambda t: t[:, :1], "too short"),
    "a block beyond the pool": ("block_table", lambda t: t + 2, "not there"),
    "a table on the host": ("block_table", lambda t: t.to("meta"), "on CUDA"),
    "a scale in a tensor": ("softmax_scale", torch.tensor, "softmax_scale"),
    "no soft-cap as None": ("softcap", lambda _: None, "softcap"),
    "a window of one number": ("window_size", lambda _: 5, "window_size"),
}
DECODE = {
    "small pages": ("k_cache", lambda k: k[:, :128], "shape of pages"),
    "gaps in the cache": ("k_cache", gaps, "contiguous last dimension"),
    "lengths of int64": ("cache_seqlens", lambda n: n.long(), "int32"),
    "lengths with gaps": ("cache_seqlens", lambda n: torch.stack([n, n], -1)[:, 0], "contiguous"),
    "too few lengths": ("cache_seqlens", lambda n: n[:1], "shape"),
    "one length for all": ("cache_seqlens", lambda _: 3, "must be a tensor"),
}
MIXED = {
    "ends of int64": ("cu_seqlens_q", lambda c: c.long(), "int32"),
    "rows behind the end": ("cu_seqlens_q", lambda c: c.clamp(max=3), "behind"),
    "ends that fall": ("cu_seqlens_k", lambda c: c.flip(0), "rise"),
    "ends of fewer sequences": ("cu_seqlens_k", lambda c: c[:2], "shape"),
    "a short longest query": ("max_seqlen_q", lambda _: 2, "max_seqlen_q"),
    "a short longest context": ("max_seqlen_k", lambda _: 299, "max_seqlen_k"),
    "a longest query in a tensor": ("max_seqlen_q", torch.tensor, "int"),
    "too few tables": ("block_table", lambda t: t[:1], "shape"),
}


@pytest.mark.parametrize("name", [*BOTH, *DECODE])
def test_the_stand_in_refuses_a_wrong_decode(name: str) -> None:
    field, change, message = {**BOTH, **DECODE}[name]
    given = arguments()
    FlashStandIn().flash_attn_with_kvcache(**given)
    with pytest.raises(RuntimeError, match=message):
        FlashStandIn().flash_attn_with_kvcache(**given | {field: change(given[field])})


@pytest.mark.parametrize("name", [*BOTH, *MIXED])
def test_the_stand_in_refuses_a_wrong_mixed_batch(name: str) -> None:
    field, change, message = {**BOTH, **MIXED}[name]
    given = varlen(arguments())
    FlashStandIn().flash_attn_varlen_func(**given)
    with pytest.raises(RuntimeError, match=message):
        FlashStandIn().flash_attn_varlen_func(**given | {field: change(given[field])})


def test_the_stand_in_refuses_pages_that_are_no_multiple_of_256() -> None:
    pool = torch.zeros(4, 2, 128, 2, 16, dtype=torch.bfloat16)
    given = arguments() | {"k_cache": pool[:, 0], "v_cache": pool[:, 1]}
    with pytest.raises(RuntimeError, match="divisible by 256"):
        FlashStandIn().flash_attn_with_kvcache(**given)


@pytest.mark.parametrize("name", ["k", "rotary_cos", "cache_batch_idx", "cache_leftpad", "alibi_slopes"])
def test_the_stand_in_raises_for_arguments_that_it_does_not_support(name: str) -> None:
    with pytest.raises(NotImplementedError):
        FlashStandIn().flash_attn_with_kvcache(**arguments(), **{name: torch.zeros(1)})


def test_the_stand_in_aligns_masks_at_the_end_as_the_library_documents() -> None:
    """Two queries over five keys, and the window's left and right ends are inclusive."""
    pool = torch.zeros(1, 2, 256, 1, 8, dtype=torch.float16)
    pool[0, 1, :5, 0, :5] = torch.eye(5, dtype=torch.float16)
    given: dict[str, Any] = {
        "q": torch.zeros(1, 2, 1, 8, dtype=torch.float16),
        "k_cache": pool[:, 0],
        "v_cache": pool[:, 1],
        "cache_seqlens": torch.tensor([5], dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
    }

    def seen(**options: Any) -> list[list[int]]:
        out = FlashStandIn().flash_attn_with_kvcache(**given, **options)
        return (out[0, :, 0, :5] > 0).int().tolist()

    assert seen(causal=True) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen(causal=False) == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert seen(causal=True, window_size=(2, 0)) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert seen(causal=False, window_size=(1, 1)) == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("work", [[(0, 299, 300), (1, 0, 1)], [(0, 120, 300), (1, 0, 1), (2, 30, 40)]])
def test_arrays_of_the_device_give_the_bits_of_tuples(flash: FlashStandIn, work: list[tuple[int, int, int]]) -> None:
    cache = make([300, 1, 40])
    cache.run([(0, 0, 300), (1, 0, 1), (2, 0, 40)])
    batch = cache.batch(work)
    tables = torch.zeros((9, 5), dtype=torch.int32)  # what a place has behind the blocks of its sequence is stale
    rows = [7 - 2 * s for s in range(len(work))]
    for row, table in zip(rows, batch.block_tables, strict=True):
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    places, contexts, starts = (
        torch.tensor(x, dtype=torch.int32) for x in (rows, batch.context_lens, batch.cu_seqlens)
    )
    none = torch.zeros((0, 2), dtype=torch.int32)
    arrays = DeviceArrays(tables, places, contexts, starts, none, none, 300, 300)
    q = torch.cat([cache.q[s][a:b] for s, a, b in work])
    want = cache.backend.attend(0, q, batch, scale=0.25)
    assert torch.equal(cache.backend.attend(0, q, dataclasses.replace(batch, arrays=arrays), scale=0.25), want)
