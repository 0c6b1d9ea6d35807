"""Parts of the sampler in Triton that look at the values of a row: weights, and thresholds without a sort.

A weight is an integer of 45 bits, so every sum is exact, and no result depends on how a row is cut into blocks.
`select` finds the lowest value that top_k or top_p keeps in passes over the row: each counts, or weighs, what lies
above eight pivots, which are values of a sample of the row, until so few values remain that registers hold them, where
bisection ends the search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import sampling_reference as reference

STAGES: tl.constexpr = tl.constexpr(4)
"""Iterations of a pass whose values are loaded at the same time."""
LOWEST: tl.constexpr = tl.constexpr(reference.LOWEST)
INF: tl.constexpr = tl.constexpr(float("inf"))
_BITS: tl.constexpr = tl.constexpr(reference.SCALE.bit_length() - 1)
_MOST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """Return integers in the order of fp32 values; -0.0 must not occur."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled_values(values, cols, num_ids, width, best, temperature, offset):
    """Load values and return `(value - best) / temperature - offset`, at most 0; -inf for columns beyond the ids.

    `width` is the number of columns that may be loaded: a multiple of 16 where the memory allows, so that loads are
    wide, which `num_ids` often is not.
    """
    x = tl.load(values + cols, mask=cols < width, other=0.0).to(tl.float32)
    x = tl.div_rn(x - best, temperature) - offset
    x = tl.where(x == 0.0, 0.0, x)  # one zero, not two
    return tl.where(cols < num_ids, x, -INF)


@triton.jit
def weight(x):
    """Return `exp(x)` in units of 2^-44, for x of at most 0. The polynomial is that of Cephes's `expf` (1 ulp)."""
    x = tl.maximum(x, -40.0)
    n = tl.floor(tl.fma(x, 1.4426950408889634, 0.5))
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << (_BITS - 23)
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@triton.jit
def _amount(x, mass):
    """Return what a value adds to a sum: its weight, or 1."""
    return tl.where(mass, weight(x), 1)


@triton.jit
def scan(values, num_ids, width, BLOCK: tl.constexpr):
    """Return the highest value, its first index, whether any value is not finite, and whether any is NaN or +inf."""
    best = tl.full([BLOCK], -INF, tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(values + cols, mask=cols < width, other=0.0).to(tl.float32)
        x = tl.where(cols < num_ids, x, 0.0)
        bad |= tl.where(tl.abs(x) < INF, 0, 1) | tl.where(x < INF, 0, 2)
        x = tl.where(cols < num_ids, x, -INF)
        at = tl.where(x > best, cols, at)
        best = tl.where(x > best, x, best)
    highest = tl.max(best, 0)
    first = tl.min(tl.where(best == highest, at, _MOST), 0)
    return highest, first, tl.max(bad & 1, 0) > 0, tl.max(bad & 2, 0) > 0


# ── the threshold of top_k and top_p ──────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _pivots(values, best, temperature, offset, num_ids, width, low, high, spread, SAMPLE: tl.constexpr):
    """Return eight keys from `low` to below `high`, int32 [8].

    They are values of a sample of the row, of the ranks 1/64 to 55/64 among those between `low` and `high`; if these
    are few, or `spread` is set, keys at equal distances.
    """
    j = tl.arange(0, 8)
    at = (tl.arange(0, SAMPLE).to(tl.int64) * num_ids // SAMPLE).to(tl.int32)
    keys = ordered(scaled_values(values, at, num_ids, width, best, temperature, offset))
    held = ((keys >= low) & (keys < high)).to(tl.int32)
    size = tl.sum(held, 0)
    rank = size * tl.where(j < 2, 3 * j + 1, 9 * j - 8) // 64 + 1
    lows = tl.zeros([8], tl.int32) + low
    highs = tl.zeros([8], tl.int32) + high
    for _ in range(31):
        middle = lows + ((highs - lows) >> 1)
        count = tl.sum(tl.where(keys[:, None] >= middle[None, :], held[:, None], 0), 0)
        lows = tl.where(count >= rank, middle, lows)
        highs = tl.where(count >= rank, highs, middle)
    step = tl.maximum((high - low) // 9, 1)
    even = tl.minimum(low + step * (j + 1), high - 1)
    return tl.where((size < 64) | spread, even, lows)


@triton.jit
def _reached(values, best, temperature, offset, num_ids, width, pivots, mass, BLOCK: tl.constexpr):
    """Return, for each of eight keys, the sum of the amounts of all values from it on; int64 [8]."""
    sums = tl.zeros([8, BLOCK], tl.int64)
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)[None, :]
        x = scaled_values(values, cols, num_ids, width, best, temperature, offset)
        sums += tl.where(ordered(x) >= pivots[:, None], _amount(x, mass), 0)
    return tl.sum(sums, 1)


@triton.jit
def _gather(
    values, best, temperature, offset, num_ids, width, low, high, listed, mass, BLOCK: tl.constexpr, LIST: tl.constexpr
):
    """Write the first values from `low` to below `high` to `listed`.

    Returns:
        Their number, the lowest and highest of their keys, and the sum of the amounts of all values from `high` on.
    """
    count = low * 0
    least = tl.full([BLOCK], _MOST, tl.int32)
    most = tl.full([BLOCK], -_MOST, tl.int32)
    above = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = scaled_values(values, cols, num_ids, width, best, temperature, offset)
        keys = ordered(x)
        above += tl.where(keys >= high, _amount(x, mass), 0)
        held = (cols < num_ids) & (keys >= low) & (keys < high)
        least = tl.minimum(least, tl.where(held, keys, _MOST))
        most = tl.maximum(most, tl.where(held, keys, -_MOST))
        found = tl.sum(held.to(tl.int32), 0)
        if (found > 0) & (count < LIST):
            at = count + tl.cumsum(held.to(tl.int32), 0) - 1
            tl.store(listed + at, x, mask=held & (at < LIST))
        count += found
    tl.debug_barrier()
    return count, tl.min(least, 0), tl.max(most, 0), tl.sum(above, 0)


@triton.jit
def select(
    values, best, temperature, offset, num_ids, width, wanted, low, count, listed, mass,
    BLOCK: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Return the highest key such that the amounts of all values from it on reach `wanted`.

    Args:
        values, best, temperature, offset, num_ids, width: the row, see `_scaled`.
        wanted: at least 1; int64.
        low: a key for which the amounts reach `wanted`.
        count: about how many values lie from `low` on.
        listed: fp32 [LIST]; overwritten.
        mass: whether the amounts are weights, see `_amount`.
    """
    high = low * 0 + 1  # no value is above 0, whose key is 0
    above = wanted * 0
    rounds = low * 0
    more = rounds == 0
    while more:
        if count > LIST:
            spread = (rounds & 1) == 1  # each second round shortens the interval of keys at least 8 times
            pivots = _pivots(values, best, temperature, offset, num_ids, width, low, high, spread, SAMPLE)
            sums = _reached(values, best, temperature, offset, num_ids, width, pivots, mass, BLOCK)
            low = tl.maximum(low, tl.max(tl.where(sums >= wanted, pivots, LOWEST), 0))
            high = tl.minimum(high, tl.min(tl.where(sums >= wanted, 1, pivots), 0))
        count, least, most, above = _gather(
            values, best, temperature, offset, num_ids, width, low, high, listed, mass, BLOCK, LIST
        )
        if count > 0:
            low, high = least, most + 1
        rounds += 1
        more = (count > LIST) & (high - low > 1)
    if high - low > 1:
        lanes = tl.arange(0, LIST)
        x = tl.load(listed + lanes, mask=lanes < count, other=-INF)
        keys = ordered(x)
        amounts = tl.where(lanes < count, _amount(x, mass), 0)
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            enough = above + tl.sum(tl.where(keys >= middle, amounts, 0), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def count_above(values, best, temperature, offset, num_ids, width, key, BLOCK: tl.constexpr):
    """Return the number of values above a key, int32, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, num_ids, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = scaled_values(values, cols, num_ids, width, best, temperature, offset)
        held = (cols < num_ids) & (ordered(x) > key)
        count += held.to(tl.int32)
        total += tl.where(held, weight(x), 0)
    return tl.sum(count, 0), tl.sum(total, 0)
