"""Normalise and rotate queries and keys, and store K and V in the paged cache, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_HEADS = 8
"""Heads of a program."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write(
    qkv,
    queries,
    k,
    v,
    slots,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    block_stride,
    token_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Program (row, range of heads). A row with slot -1 stores no K and V.

    NARROW: the norm rounds to the input's dtype before the product with its weight.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * LANES + tl.arange(0, LANES)
    halves = tl.arange(0, WIDTH)
    mask = (heads < HEADS + 2 * KV_HEADS)[:, None] & (halves < HALF)[None, :]
    base = qkv + (row * (HEADS + 2 * KV_HEADS) + heads) * (2 * HALF)
    left = tl.load(base[:, None] + halves[None, :], mask=mask, other=0.0)
    right = tl.load(base[:, None] + (HALF + halves)[None, :], mask=mask, other=0.0)
    dtype = left.dtype
    is_value = (heads >= HEADS + KV_HEADS)[:, None]
    first, second = left.to(tl.float32), right.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (heads < HEADS)[:, None]
        inside = (halves < HALF)[None, :]
        q_first = tl.load(q_weight + halves[None, :], mask=inside, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + HALF + halves[None, :], mask=inside, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + halves[None, :], mask=inside, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + HALF + halves[None, :], mask=inside, other=0.0).to(tl.float32)
        normed_first, normed_second = first * scale, second * scale
        if NARROW:
            normed_first, normed_second = normed_first.to(dtype).to(tl.float32), normed_second.to(dtype).to(tl.float32)
        normed_first = (normed_first * tl.where(is_query, q_first, k_first)).to(dtype).to(tl.float32)
        normed_second = (normed_second * tl.where(is_query, q_second, k_second)).to(dtype).to(tl.float32)
        first, second = tl.where(is_value, first, normed_first), tl.where(is_value, second, normed_second)
    if ROTATE:
        c = tl.load(cos + row * HALF + halves, mask=halves < HALF, other=0.0)[None, :]
        s = tl.load(sin + row * HALF + halves, mask=halves < HALF, other=0.0)[None, :]
        turned_first, turned_second = first * c - second * s, second * c + first * s
        first, second = tl.where(is_value, first, turned_first), tl.where(is_value, second, turned_second)
    first, second = first.to(dtype), second.to(dtype)
    target = queries + (row * HEADS + heads) * (2 * HALF)
    asked = mask & (heads < HEADS)[:, None]
    tl.store(target[:, None] + halves[None, :], first, mask=asked)
    tl.store(target[:, None] + (HALF + halves)[None, :], second, mask=asked)
    slot = tl.load(slots + row)
    if slot >= 0:
        place = (slot // BLOCK) * block_stride + (slot % BLOCK) * token_stride
        keys = k + place + (heads - HEADS) * (2 * HALF)
        stored = mask & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
        tl.store(keys[:, None] + halves[None, :], first.to(k.dtype.element_ty), mask=stored)
        tl.store(keys[:, None] + (HALF + halves)[None, :], second.to(k.dtype.element_ty), mask=stored)
        values = v + place + (heads - HEADS - KV_HEADS) * (2 * HALF)
        stored = mask & is_value
        tl.store(values[:, None] + halves[None, :], first.to(v.dtype.element_ty), mask=stored)
        tl.store(values[:, None] + (HALF + halves)[None, :], second.to(v.dtype.element_ty), mask=stored)


def write_rotated(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys, and store K and V.

    Args:
        qkv: `[T, heads + 2 * kv_heads, head_dim]`, contiguous; `head_dim` is even.
        k, v: `[blocks, block size, kv_heads, head_dim]` views of the pool; all but the first dimension without gaps.
        slots: int64 `[T]`: `block id * block size + offset` of each row, -1 for padding.
        norms: weights of the queries' and the keys' RMSNorm, each `[head_dim]`, and its epsilon.
        rotation: cos and sin, each fp32 `[T, head_dim / 2]`, contiguous.

    Returns:
        The queries, `[T, heads, head_dim]`.
    """
    rows, total, dim = qkv.shape
    kv_heads = k.shape[2]
    heads = total - 2 * kv_heads
    queries = qkv.new_empty((rows, heads, dim))
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    cos, sin = (qkv, qkv) if rotation is None else rotation
    launch(
        _write, (rows, triton.cdiv(total, _HEADS)),
        qkv, queries, k, v, slots, q_weight, k_weight, cos, sin, eps, k.stride(0), k.stride(1),
        BLOCK=k.shape[1], HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, WIDTH=triton.next_power_of_2(dim // 2),
        LANES=_HEADS, NORM=norms is not None, NARROW=q_weight.dtype == qkv.dtype, ROTATE=rotation is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return queries
