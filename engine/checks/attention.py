"""Checks an attention backend on a GPU against fp64 on the CPU: sequences of many lengths, in random blocks of a pool
whose other slots hold NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checks.compare import differs, random
from engine.checks.usage import Usage
from kernels.attention.base import AttentionBackend, AttentionBatch
from kernels.attention.reference import ReferenceBackend

_PIECES = ((1, 1), (17, 1), (300, 1), (1025, 1), (5, 5), (40, 40), (200, 130), (33, 7), (257, 3))
"""Context and number of rows of each sequence: decodes, some of them long enough to be split, and chunks."""
_SMALL_WINDOW = 50
"""Length of a window that is checked, too, since an error at the edge of a long window changes little. Kernels get the
length at run time, so one length stands for all."""
_LONGEST = 4096
"""Longest window that is checked at its real length, in tokens."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Sequences in a pool, with their keys and values on the CPU."""

    batch: AttentionBatch
    prefill: AttentionBatch
    """All tokens of all sequences."""
    keys: Tensor
    """`[tokens, kv_heads, head_dim]` in the dtype of the cache: the tokens of the first sequence, of the second, …"""
    values: Tensor
    queries: Tensor
    """`[rows, heads, head_dim]`."""
    blocks: int


def check_attention(usage: Usage, backend: AttentionBackend) -> str | None:
    """Compare the attention of a backend with fp64; return what is wrong, or None.

    Args:
        usage: the model's.
        backend: made for `usage.spec` (one layer); the check binds it to a pool of its own.
    """
    for window in usage.windows:
        for length in _lengths(window):
            wrong = _check_window(usage, backend, length)
            if wrong is not None:
                return wrong
    return None


def check_write(usage: Usage, backend: AttentionBackend) -> str | None:
    """Compare the norm, rotation and store of keys and values with the reference; arguments as in `check_attention`."""
    case = _case(usage, _PIECES, backend.spec.block_size)
    rows = case.keys.shape[0]
    heads, dim = usage.num_heads, usage.spec.head_dim
    qkv = random((rows, heads + 2 * usage.spec.num_kv_heads, dim), usage.dtype, 11)
    norms, rotation = _extras(usage, rows)
    spec = dataclasses.replace(backend.spec, device=torch.device("cpu"))
    reference = ReferenceBackend(spec)
    found = []
    for target, device in ((backend, usage.device), (reference, torch.device("cpu"))):
        target.bind(_poisoned(case.blocks, target.block_bytes, device))
        batch = _batch_on(case.prefill, device)
        there = None if norms is None else (norms[0].to(device), norms[1].to(device), norms[2])
        turned = None if rotation is None else (rotation[0].to(device), rotation[1].to(device))
        queries = target.write_rotated(0, qkv.clone().to(device), batch, norms=there, rotation=turned)
        read = [target.read(0, table, context) for table, context in _tables(case.prefill)]
        found.append((queries, torch.cat([k for k, _ in read]), torch.cat([v for _, v in read])))
    for name, got, want in zip(("queries", "keys", "values"), *found, strict=True):
        wrong = differs(f"{name} after write_rotated", got, want, 2)
        if wrong is not None:
            return wrong
    return None


def check_invariance(usage: Usage, backend: AttentionBackend) -> str | None:
    """Compare the bits of sequences alone and in chunks with those in a batch; arguments as in `check_attention`."""
    case = _case(usage, _PIECES, backend.spec.block_size)
    device = usage.device
    backend.bind(_poisoned(case.blocks, backend.block_bytes, device))
    backend.write(0, case.keys.to(device), case.values.to(device), _batch_on(case.prefill, device))
    for window in usage.windows:
        wrong = _depends_on_batch(usage, backend, case, window)
        if wrong is not None:
            return wrong
    return None


def _depends_on_batch(usage: Usage, backend: AttentionBackend, case: _Case, window: int | None) -> str | None:
    """Compute each sequence of a case alone, whole and in two parts, and return what differs from the batch in bits."""
    device = usage.device
    options = {"scale": usage.scale, "window": window, "softcap": usage.softcap}
    queries, whole = case.queries.to(device), case.batch
    together = backend.attend(0, queries, _batch_on(whole, device), **options)  # type: ignore[arg-type]
    for s, (context, count) in enumerate(_PIECES):
        for start, end in dict.fromkeys(((0, count), (0, max(1, count // 2)), (count // 2, count))):
            part = _batch([whole.block_tables[s]], (context - count + end,), (end - start,), backend.spec.block_size)
            rows = slice(whole.cu_seqlens[s] + start, whole.cu_seqlens[s] + end)
            alone = backend.attend(0, queries[rows], _batch_on(part, device), **options)  # type: ignore[arg-type]
            if not torch.equal(alone.cpu(), together[rows].cpu()):
                where = f"rows {start} to {end} of a sequence of {context} tokens with window {window}"
                return f"{where} have other bits alone"
    return None


def _check_window(usage: Usage, backend: AttentionBackend, window: int | None) -> str | None:
    pieces = _PIECES if window is None or window <= _SMALL_WINDOW else ((window + 40, 1), (window + 40, 20))
    case = _case(usage, pieces, backend.spec.block_size)
    device = usage.device
    backend.bind(_poisoned(case.blocks, backend.block_bytes, device))
    backend.write(0, case.keys.to(device), case.values.to(device), _batch_on(case.prefill, device))
    options = {"scale": usage.scale, "window": window, "softcap": usage.softcap}
    got = backend.attend(0, case.queries.to(device), _batch_on(case.batch, device), **options)  # type: ignore[arg-type]
    want = _exact(case, usage, window)
    return differs(f"attention with window {window}", got, want, 4)


def _lengths(window: int | None) -> tuple[int | None, ...]:
    """Return the windows to check for a window of the model."""
    if window is None:
        return (None,)
    return tuple(dict.fromkeys((min(window, _SMALL_WINDOW), *((window,) if window <= _LONGEST else ()))))


def _exact(case: _Case, usage: Usage, window: int | None) -> Tensor:
    """Return attention in fp64, `[rows, heads, head_dim]`."""
    group = usage.num_heads // usage.spec.num_kv_heads
    outs, token = [], 0
    batch = case.batch
    for s, context in enumerate(batch.context_lens):
        rows = slice(batch.cu_seqlens[s], batch.cu_seqlens[s + 1])
        q = case.queries[rows].double()
        k, v = (x[token : token + context].double().repeat_interleave(group, 1) for x in (case.keys, case.values))
        token += context
        scores = torch.einsum("thd,shd->hts", q, k) * usage.scale
        if usage.softcap is not None:
            scores = usage.softcap * torch.tanh(scores / usage.softcap)
        at = torch.arange(context)
        positions = torch.arange(context - q.shape[0], context)[:, None]
        visible = at <= positions
        if window is not None:
            visible &= at > positions - window
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,shd->thd", weights, v))
    return torch.cat(outs)


def _case(usage: Usage, pieces: tuple[tuple[int, int], ...], block_size: int) -> _Case:
    """Return sequences of random tokens whose blocks lie in random order."""
    spec, tokens = usage.spec, sum(context for context, _ in pieces)
    counts = [-(-context // block_size) for context, _ in pieces]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [tuple(order[sum(counts[:s]) : sum(counts[: s + 1])]) for s in range(len(pieces))]
    contexts = tuple(context for context, _ in pieces)
    shape = (tokens, spec.num_kv_heads, spec.head_dim)
    rows = sum(count for _, count in pieces)
    # Scores are peaked: if they were flat, a wrong key would change little.
    spread = 2.0 / (usage.scale * spec.head_dim**0.5)
    return _Case(
        batch=_batch(tables, contexts, tuple(count for _, count in pieces), block_size),
        prefill=_batch(tables, contexts, contexts, block_size),
        keys=random(shape, usage.dtype, 1),
        values=random(shape, usage.dtype, 2),
        queries=(random((rows, usage.num_heads, spec.head_dim), torch.float32, 3) * spread).to(usage.dtype),
        blocks=blocks,
    )


def _batch(
    tables: list[tuple[int, ...]], contexts: tuple[int, ...], counts: tuple[int, ...], block_size: int
) -> AttentionBatch:
    """Return the batch of the last `counts` tokens of each sequence, with tensors on the CPU."""
    slots: list[int] = []
    positions: list[int] = []
    starts = [0]
    for table, context, count in zip(tables, contexts, counts, strict=True):
        at = range(context - count, context)
        positions += at
        slots += [table[p // block_size] * block_size + p % block_size for p in at]
        starts.append(len(slots))
    return AttentionBatch(
        slots=torch.tensor(slots), positions=torch.tensor(positions), cu_seqlens=tuple(starts), context_lens=contexts,
        block_tables=tuple(tables),
    )  # fmt: skip


def _batch_on(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    return AttentionBatch(
        slots=batch.slots.to(device), positions=batch.positions.to(device), cu_seqlens=batch.cu_seqlens,
        context_lens=batch.context_lens, block_tables=batch.block_tables,
    )  # fmt: skip


def _tables(batch: AttentionBatch) -> list[tuple[tuple[int, ...], int]]:
    return list(zip(batch.block_tables, batch.context_lens, strict=True))


def _extras(usage: Usage, rows: int) -> tuple[tuple[Tensor, Tensor, float] | None, tuple[Tensor, Tensor] | None]:
    """Return random norms of the heads and a random rotation; None for what the model does not have."""
    dim, norms, rotation = usage.spec.head_dim, None, None
    if usage.head_norm:
        dtype = torch.float32 if usage.wide_norms else usage.dtype
        norms = random((dim,), dtype, 12), random((dim,), dtype, 13), usage.eps
    if usage.rotated:
        angles = 3 * random((rows, dim // 2), torch.float32, 14)
        rotation = angles.cos(), angles.sin()
    return norms, rotation


def _poisoned(blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Return a pool whose bytes are NaN in every floating-point format."""
    return torch.full((blocks, block_bytes), 0xFF, dtype=torch.uint8, device=device)
