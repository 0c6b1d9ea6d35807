"""flash-attn 2.8.3 for machines that have none: refuses what the library refuses or would read wrongly, and computes
the right result in plain torch.

The signatures are the library's. Rules are those of its flash_attn_interface.py and csrc/flash_attn/flash_api.cpp, and
stricter where it would silently copy (a last dimension with gaps makes it copy the whole cache) or silently go wrong (a
table that is too short, a longest length that is not, memory off a 16-byte boundary). What no backend of ours uses
(ALiBi, dropout, appending, batch indices) is refused.
"""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_PAGE = 256
_MAX_DIM = 256
_MAX_SPLITS = 128


class FlashStandIn:
    """Put an instance in the place of the module `flash_attn`."""

    __version__ = "2.8.3"
    __spec__ = ModuleSpec("flash_attn", None)  # other libraries check that it exists

    def __init__(self, device_type: str = "cpu") -> None:
        """`device_type` is what counts as the GPU."""
        self.device_type = device_type
        self.calls: list[str] = []
        """The functions called, in order."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """`q` is `[T, heads, head_dim]`, and so is the output; `k`, `v` are `[blocks, page, kv_heads, head_dim]`."""
        self.calls.append("varlen")
        if dropout_p or alibi_slopes is not None or deterministic or return_attn_probs:
            raise NotImplementedError("the stand-in has no dropout, ALiBi, deterministic backward or probabilities")
        _check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
        self._check_common(q, k, v, block_table, softmax_scale, causal, window_size, softcap)
        assert block_table is not None
        sequences = block_table.shape[0]
        _check(sequences > 0, "batch size must be positive")
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            self._check_ints(name, ends, (sequences + 1,))
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            _check(type(longest) is int, f"{name} must be an int")
        rows, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        counts, lengths = ([b - a for a, b in pairwise(x)] for x in (rows, ends))
        _check(rows[0] == ends[0] == 0 and min(counts) >= 0 and min(lengths) >= 0, "cu_seqlens must rise from 0")
        _check(rows[-1] == q.shape[0], "rows of q behind cu_seqlens_q would hold anything")
        _check(max_seqlen_q >= max(counts), "max_seqlen_q is too small")
        _check(max_seqlen_k >= max(lengths), "max_seqlen_k is too small")
        if max_seqlen_q == 1:
            _check(rows[-1] == sequences, "with max_seqlen_q = 1 every sequence must have a row")
        pieces = [
            _attend(q[start:stop], *_gather(k, v, table, length), softmax_scale, causal, window_size, softcap)
            for (start, stop), table, length in zip(pairwise(rows), block_table.tolist(), lengths, strict=True)
        ]
        return torch.cat(pieces)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """`q` is `[S, rows, heads, head_dim]`, and so is what it returns."""
        self.calls.append("kvcache")
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
        if any(x is not None for x in unused) or not rotary_interleaved or return_softmax_lse:
            raise NotImplementedError("the stand-in does not append, rotate, pad or return more than the output")
        _check(q.dim() == 4, "q must be (batch_size, seqlen, nheads, headdim)")
        self._check_common(q, k_cache, v_cache, block_table, softmax_scale, causal, window_size, softcap)
        assert block_table is not None
        _check(type(num_splits) is int and 0 <= num_splits <= _MAX_SPLITS, "num_splits > 128 not supported")
        _check(q.shape[0] > 0, "batch size must be positive")
        _check(block_table.shape[0] == q.shape[0], "block_table must have shape (batch_size, max_num_blocks_per_seq)")
        # An int becomes one length for each block, not for each sequence.
        _check(isinstance(cache_seqlens, Tensor), "cache_seqlens must be a tensor where there is a block_table")
        assert isinstance(cache_seqlens, Tensor)
        self._check_ints("cache_seqlens", cache_seqlens, (q.shape[0],))
        pieces = [
            _attend(rows, *_gather(k_cache, v_cache, table, length), softmax_scale, causal, window_size, softcap)
            for rows, table, length in zip(q, block_table.tolist(), cache_seqlens.tolist(), strict=True)
        ]
        return torch.stack(pieces)

    def _check_common(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor | None,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> None:
        _check(block_table is not None, "the stand-in has paged KV only")
        assert block_table is not None
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check(x.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
            _check(x.dtype == q.dtype, f"query and {name} must have the same dtype")
            self._check_device(name, x, q)
            _check(x.stride(-1) == 1, f"{name} must have contiguous last dimension")
            aligned = x.storage_offset() % 8 == 0 and all(s % 8 == 0 for s in x.stride()[:-1])
            _check(aligned, f"{name} is read 16 bytes at a time: misaligned address")
            _check(not x.requires_grad, "there is no backward")
        heads, dim = q.shape[-2:]
        _check(k.dim() == 4, "k must be (num_blocks, page_block_size, nheads_k, headdim)")
        _check(k.shape == v.shape and k.shape[3] == dim, "k and v must have the shape of pages, and q's head size")
        _check(dim % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
        _check(0 < dim <= _MAX_DIM, "FlashAttention forward only supports head dimension at most 256")
        _check(heads % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        _check(k.shape[1] % _PAGE == 0, "Paged KV cache block size must be divisible by 256")
        _check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        _check(block_table.dim() == 2, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
        _check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        self._check_device("block_table", block_table, q)
        _check(softmax_scale is None or type(softmax_scale) is float, "softmax_scale must be a float")
        _check(type(causal) is bool, "causal must be a bool")
        _check(type(softcap) is float and softcap >= 0, "softcap must be a float from 0 on")
        whole = type(window_size) is tuple and len(window_size) == 2 and all(type(side) is int for side in window_size)
        _check(whole and min(window_size) >= -1, "window_size must be two ints from -1 on")

    def _check_ints(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        _check(x.dtype == torch.int32, f"{name} must have dtype int32")
        _check(x.device.type == self.device_type, f"{name} must be on CUDA")
        _check(x.is_contiguous(), f"{name} must be contiguous")
        _check(tuple(x.shape) == shape, f"{name} must have shape {shape}")

    def _check_device(self, name: str, x: Tensor, q: Tensor) -> None:
        _check(x.device.type == self.device_type and x.device == q.device, f"{name} must be on CUDA, where q is")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _gather(k: Tensor, v: Tensor, table: list[int], length: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, each `[length, kv_heads, head_dim]`: nothing else of the cache is looked at."""
    page = k.shape[1]
    pages = table[: -(-length // page)]
    _check(len(pages) * page >= length, "block_table is too short")
    _check(all(0 <= block < k.shape[0] for block in pages), "block_table names a block that is not there")
    return tuple(x[pages].flatten(0, 1)[:length] for x in (k, v))  # type: ignore[return-value]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One sequence: `[rows, heads, head_dim]`. Row i is at position `i + keys - rows`; a row without keys gives zero.

    Weights are rounded to the dtype of V before they are multiplied with it, their sum is not, as in the library.
    """
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ wide_k.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(rows, device=q.device)[:, None] + (k.shape[0] - rows)
    distance = at - torch.arange(k.shape[0], device=q.device)  # how far a key is behind
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)).exp()
    out: Any = weights.to(q.dtype).float() @ wide_v / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return out.transpose(0, 1).to(q.dtype)  # type: ignore[no-any-return]
