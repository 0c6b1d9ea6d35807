"""The sampler in Triton: one launch for the ids of a batch, one program for each row, and one for log-probabilities.

`kernels.sampling` describes the functions; `kernels.sampling_reference` computes the same in torch. What a program does
with the values of its row is in `kernels.triton.row`.

Estimate for an H100, 128 rows of 128k ids in bf16, from the bytes and instructions of one row on one multiprocessor,
not measured: a pass that only reads takes 10 to 15 µs, one with weights 15 to 20 µs, one with pivots 45 µs. So greedy
rows take 10 µs, a temperature alone 35 µs, top_k or top_p of a peaked distribution 120 µs, of a flat one 200 µs. One
row takes almost as long as 128; splitting rows over programs would help only batches of a few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sampling_reference as reference
from kernels.triton.launch import launch
from kernels.triton.row import INF, LOWEST, STAGES, count_above, ordered, scaled_values, scan, select, unordered, weight

if TYPE_CHECKING:
    from kernels.sampling_reference import Choices

SCAN, SCAN_WARPS = 4096, 16
"""Ids of one iteration, and warps, of greedy rows."""
BLOCK = 1024
"""Ids of one iteration of a pass."""
LIST = 4096
"""Values that bisection holds in registers."""
SAMPLE = 512
"""Values of a row from which pivots are taken."""
SPARSE: tl.constexpr = tl.constexpr(128)
"""Biases or bans of one iteration."""
WARPS, REGISTERS = 8, 255
"""Warps of a program, and the limit of registers of a thread: for sm_80 ptxas would rather spill than take over 128."""

_LARGEST: tl.constexpr = tl.constexpr(reference.LARGEST)
_DRAWN: tl.constexpr = tl.constexpr(reference.DRAWN)
_SPARES: tl.constexpr = tl.constexpr(reference.SPARES)
_UNIT: tl.constexpr = tl.constexpr(1.0 / reference.SCALE)


# ── bias, penalties, grammar, bans ────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _penalised(x, held, repetition, frequency, presence):
    """Apply the penalties to logits; `held` are their counts, see `kernels.sampling.sample`."""
    scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(held > 0, tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST), x)
    x = tl.fma((held >> 1).to(tl.float32), -frequency, x)
    return tl.where(held > 1, x - presence, x)


@triton.jit
def _allowed(x, bits, cols, ruled):
    """Return the logits with those that a grammar forbids at -inf, in the first `ruled` columns."""
    allowed = (tl.load(bits + (cols >> 5), mask=cols < ruled, other=-1) >> (cols & 31)) & 1
    return tl.where(allowed > 0, x, -INF)


@triton.jit
def _edit(
    source, values, held, bits, repetition, frequency, presence, counted, ruled,
    bias_start, bias_end, bias_ids, biases, num_ids, width, out_width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the logits of a row with bias, penalties and grammar to `values`.

    `counted` and `ruled` are the number of columns to which penalties and grammar apply: all or none.
    """
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(source + cols, mask=cols < width, other=0.0).to(tl.float32)
        x = _penalised(x, tl.load(held + cols, mask=cols < counted, other=0), repetition, frequency, presence)
        tl.store(values + cols, _allowed(x, bits, cols, ruled), mask=cols < out_width)
    tl.debug_barrier()
    for start in range(bias_start, bias_end, SPARSE):
        entries = start + tl.arange(0, SPARSE)
        inside = entries < bias_end
        cols = tl.load(bias_ids + entries, mask=inside, other=0)
        x = tl.load(source + cols, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(biases + entries, mask=inside, other=0.0)
        number = tl.load(held + cols, mask=inside & (cols < counted), other=0)
        x = _penalised(x, number, repetition, frequency, presence)
        tl.store(values + cols, _allowed(x, bits, cols, ruled), mask=inside)
    tl.debug_barrier()


@triton.jit
def _ban(values, before, start, end, ban_ids, ban_after, pending, spares, num_ids, width, BLOCK: tl.constexpr):
    """Set the banned logits of a row to -inf; return the highest logit and its first index.

    With `spares` the bans do not hold if they leave no id.
    """
    for at in range(start, end, SPARSE):
        entries, cols, banned = _bans(at, end, ban_ids, ban_after, pending)
        tl.store(before + entries, tl.load(values + cols, mask=banned, other=0.0), mask=banned)
    tl.debug_barrier()
    for at in range(start, end, SPARSE):
        entries, cols, banned = _bans(at, end, ban_ids, ban_after, pending)
        tl.store(values + cols, tl.full([SPARSE], -INF, tl.float32), mask=banned)
    tl.debug_barrier()
    best, first = -INF + 0.0 * start, start * 0
    scans = start * 0
    while scans < 2:
        best, first, _bad, _worse = scan(values, num_ids, width, 2 * BLOCK)
        scans += 1
        if spares & (best == -INF) & (end > start) & (scans == 1):
            for at in range(start, end, SPARSE):
                entries, cols, banned = _bans(at, end, ban_ids, ban_after, pending)
                tl.store(values + cols, tl.load(before + entries, mask=banned, other=0.0), mask=banned)
            tl.debug_barrier()
        else:
            scans += 1
    return best, first


@triton.jit
def _bans(at, end, ban_ids, ban_after, pending):
    """Return the indices of some bans, their ids, and whether they hold after the pending id."""
    entries = at + tl.arange(0, SPARSE)
    inside = entries < end
    after = tl.load(ban_after + entries, mask=inside, other=-3)
    banned = inside & ((after == -1) | (after == pending))
    return entries, tl.load(ban_ids + entries, mask=inside, other=0), banned


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _greedy(logits, out, stride, num_ids, width, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    _best, at, bad, _worse = scan(logits + row.to(tl.int64) * stride, num_ids, width, BLOCK)
    tl.store(out + row, tl.where(bad, -1, at))


@triton.jit
def _sample(
    logits, scratch, listed, before, out, counts, last, bits,
    temperatures, top_ps, log_min_ps, repetitions, frequencies, presences, top_ks, flags, noise,
    slots, masks, places, bias_starts, bias_ids, biases, ban_starts, ban_ids, ban_after,
    stride, num_ids, width, row_width, words,
    EDIT: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (row). EDIT: some rows have bias, penalties, a grammar or bans; `scratch` gets the edited logits.

    `row_width` is the width of `scratch` and of `counts`.
    """
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    source = logits + wide * stride
    flag = tl.load(flags + row)
    best, at, bad, _worse = scan(source, num_ids, width, 2 * BLOCK)
    if EDIT:
        values, columns = scratch + wide * row_width, row_width
        slot, mask, place = tl.load(slots + row), tl.load(masks + row), tl.load(places + row)
        held = counts + slot.to(tl.int64) * row_width
        pending = tl.load(last + place, mask=place >= 0, other=-2)
        if not bad:
            _edit(
                source, values, held, bits + mask.to(tl.int64) * words,
                tl.load(repetitions + row), tl.load(frequencies + row), tl.load(presences + row),
                tl.where(slot >= 0, row_width, 0), tl.where(mask >= 0, num_ids, 0),
                tl.load(bias_starts + row), tl.load(bias_starts + row + 1), bias_ids, biases,
                num_ids, width, row_width, BLOCK,
            )  # fmt: skip
            best, at = _ban(
                values, before, tl.load(ban_starts + row), tl.load(ban_starts + row + 1), ban_ids, ban_after, pending,
                (flag & _SPARES) > 0, num_ids, row_width, BLOCK,
            )  # fmt: skip
    else:
        values, columns = source, width
    chosen = at
    if (flag & _DRAWN) > 0:
        chosen = num_ids - 1 + row * 0  # a grammar that allows no id refuses any sampled one, and the request fails
        if (not bad) & (best > -INF):
            chosen = _draw(
                values, best, tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row),
                tl.load(log_min_ps + row), tl.load(noise + row), num_ids, columns, listed + wide * LIST,
                BLOCK, LIST, SAMPLE, BLOCKS,
            )  # fmt: skip
    chosen = tl.where(bad, -1, chosen)
    tl.store(out + row, chosen)
    if EDIT:
        counted = (slot >= 0) & (chosen >= 0)
        tl.store(held + chosen, tl.load(held + chosen, mask=counted, other=0) + 2, mask=counted)


@triton.jit
def _draw(
    values, best, temperature, top_k, top_p, log_min_p, noise, num_ids, width, listed,
    BLOCK: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the id at which the sum of the weights of all ids up to it exceeds `noise` times the total."""
    edge = top_k * 0 + LOWEST
    count = num_ids + top_k * 0
    for step in range(2):  # top_k, then top_p
        mass = step == 1
        if tl.where(mass, top_p < 1, top_k > 0):
            wanted = top_k.to(tl.int64)
            if mass:
                # The mass that top_p is a share of: that of exactly `top_k` ids, whatever is equal to the last of them.
                floor = tl.where(top_k > 0, edge, LOWEST - 1)
                above, total = count_above(values, best, temperature, 0.0, num_ids, width, floor, BLOCK)
                total += (count - above).to(tl.int64) * weight(unordered(edge))
                wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                wanted = tl.maximum(tl.minimum(wanted, total), 1)
            edge = select(
                values, best, temperature, 0.0, num_ids, width, wanted, edge, count, listed, mass,
                BLOCK, LIST, SAMPLE,
            )  # fmt: skip
            count = tl.where(mass, count, top_k)
    threshold = tl.maximum(log_min_p, unordered(edge))
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.int64)
    for block in tl.range(0, tl.cdiv(num_ids, BLOCK), num_stages=STAGES):
        kept = _kept(values, best, temperature, threshold, num_ids, width, block, BLOCK)
        sums = tl.where(index == block, tl.sum(kept, 0), sums)
    total = tl.sum(sums, 0)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    base = tl.sum(tl.where(index < block, sums, 0), 0)
    ends = base + tl.cumsum(_kept(values, best, temperature, threshold, num_ids, width, block, BLOCK), 0)
    return block * BLOCK + tl.sum((ends <= target).to(tl.int32), 0)


@triton.jit
def _kept(values, best, temperature, threshold, num_ids, width, block, BLOCK: tl.constexpr):
    """Return the weights of a block of ids, 0 for those below the threshold."""
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = scaled_values(values, cols, num_ids, width, best, temperature, 0.0)
    return tl.where((cols < num_ids) & (x >= threshold), weight(x), 0)


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["top"])
def _logprobs(
    logits, rows, tokens, ids, listed, chosen, best_ids, best_values, stride, num_ids, width, top,
    BLOCK: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Program (wanted row)."""
    one = tl.program_id(0)
    wide = one.to(tl.int64)
    row = tl.load(rows + one)
    token = tl.load(tokens + one)
    if token < 0:
        token = tl.maximum(tl.load(ids + row), 0)
    values = logits + row.to(tl.int64) * stride
    best, _at, _bad, bad = scan(values, num_ids, width, 2 * BLOCK)
    if bad:
        tl.store(chosen + one, float("nan"))
        for start in range(0, top, SPARSE):
            lanes = start + tl.arange(0, SPARSE)
            tl.store(best_ids + wide * top + lanes, tl.minimum(lanes, num_ids - 1), mask=lanes < top)
            tl.store(best_values + wide * top + lanes, tl.full([SPARSE], float("nan"), tl.float32), mask=lanes < top)
    else:
        _count, total = count_above(values, best, 1.0, 0.0, num_ids, width, LOWEST - 1, BLOCK)
        offset = tl.log(total.to(tl.float64) * _UNIT).to(tl.float32)
        mine = tl.load(values + token).to(tl.float32)
        tl.store(chosen + one, mine - best - offset)
        if top > 0:
            low = row * 0 + LOWEST
            edge = select(
                values, best, 1.0, offset, num_ids, width, top + wide * 0, low, num_ids + low * 0,
                listed + wide * LIST, False, BLOCK, LIST, SAMPLE,
            )  # fmt: skip
            best_ids += wide * top
            best_values += wide * top
            _emit(values, best, offset, num_ids, width, top, edge, best_ids, best_values, BLOCK)


@triton.jit
def _emit(values, best, offset, num_ids, width, top, edge, best_ids, best_values, BLOCK: tl.constexpr):
    """Write the ids and values above a key, then the first of those equal to it, `top` in all."""
    ties, _total = count_above(values, best, 1.0, offset, num_ids, width, edge, BLOCK)
    higher = ties * 0
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = scaled_values(values, cols, num_ids, width, best, 1.0, offset)
        keys = ordered(x)
        above = ((cols < num_ids) & (keys > edge)).to(tl.int32)
        equal = ((cols < num_ids) & (keys == edge)).to(tl.int32)
        if tl.sum(above + equal, 0) > 0:
            at = tl.where(above > 0, higher + tl.cumsum(above, 0), ties + tl.cumsum(equal, 0)) - 1
            kept = (above + equal > 0) & (at < top)
            tl.store(best_ids + at, cols, mask=kept)
            tl.store(best_values + at, x, mask=kept)
        higher += tl.sum(above, 0)
        ties += tl.sum(equal, 0)


# ── launches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def highest(logits: Tensor, num_ids: int) -> Tensor:
    """Implement `kernels.sampling.highest`."""
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        launch(
            _greedy, (rows,), logits, out, logits.stride(0), num_ids, logits.shape[1],
            BLOCK=_block(num_ids, SCAN), num_warps=SCAN_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sample(
    logits: Tensor, choices: Choices, num_ids: int, counts: Tensor, last: Tensor | None, scratch: Tensor
) -> Tensor:
    """Implement `kernels.sampling.sample`."""
    c, rows, device = choices, logits.shape[0], logits.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    listed = torch.empty((rows, LIST), dtype=torch.float32, device=device)
    before = torch.empty(len(c.ban_ids), dtype=torch.float32, device=device)
    if rows > len(scratch) and c.edited:
        scratch = torch.empty((rows, scratch.shape[1]), dtype=torch.float32, device=device)
    block = _block(num_ids, BLOCK)
    launch(
        _sample, (rows,),
        logits, scratch, listed, before, out, counts, c.slots if last is None else last, c.bits,
        c.temperature, c.top_p, c.log_min_p, c.repetition, c.frequency, c.presence, c.top_k, c.flags, c.noise,
        c.slots, c.masks, c.places, c.bias_starts, c.bias_ids, c.bias, c.ban_starts, c.ban_ids, c.ban_after,
        logits.stride(0), num_ids, logits.shape[1], scratch.shape[1], -(-num_ids // 32),
        EDIT=c.edited, BLOCK=block, LIST=LIST, SAMPLE=SAMPLE,
        BLOCKS=triton.next_power_of_2(triton.cdiv(num_ids, block)),
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, ids: Tensor, num_ids: int, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `kernels.sampling.logprobs`."""
    count, device = len(rows), logits.device
    chosen = torch.empty(count, dtype=torch.float32, device=device)
    best_ids = torch.empty((count, top), dtype=torch.int32, device=device)
    best_values = torch.empty((count, top), dtype=torch.float32, device=device)
    listed = torch.empty((count if top else 0, LIST), dtype=torch.float32, device=device)
    launch(
        _logprobs, (count,),
        logits, rows, tokens, ids, listed, chosen, best_ids, best_values,
        logits.stride(0), num_ids, logits.shape[1], top,
        BLOCK=_block(num_ids, BLOCK), LIST=LIST, SAMPLE=SAMPLE,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return chosen, best_ids, best_values


def _block(num_ids: int, most: int) -> int:
    return min(most, max(64, 1 << (num_ids - 1).bit_length()))
