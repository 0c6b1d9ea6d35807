"""The sampler's operations on a device in plain torch: used where the Triton kernels do not run.

`kernels.sampling` describes the functions. No operation needs a value that only the device knows, so the host never
waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops_reference import argmax

SCALE = 1 << 44
"""Integer that stands for the weight 1. Sums over 2^18 ids stay below 2^62."""
LOWEST = -2139095041
"""Ordered bits of minus infinity, the lowest value that a row may hold."""
LARGEST = torch.finfo(torch.float32).max
DRAWN, SPARES = 1, 2
"""Bits of `Choices.flags`: the row has a temperature above 0; its bans do not hold if they leave no id."""
_CHUNK = 1 << 21
"""Elements of the rows that plain torch handles at a time, because its intermediate results take 40 bytes for each."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Parameters of R rows, on the device of the logits. A part that no row needs is empty."""

    temperature: Tensor
    """fp32 [R], above 0."""
    top_p: Tensor
    """fp32 [R]."""
    log_min_p: Tensor
    """fp32 [R]; -inf: off."""
    repetition: Tensor
    """fp32 [R], as `frequency` and `presence`: the penalties."""
    frequency: Tensor
    presence: Tensor
    top_k: Tensor
    """int32 [R]; 0: off."""
    flags: Tensor
    """int32 [R]: DRAWN, SPARES."""
    noise: Tensor
    """fp64 [R]: where the cumulative distribution is inverted, from 0 to below 1."""
    slots: Tensor
    """int32 [R]: row of `counts`; -1: no penalties."""
    masks: Tensor
    """int32 [R]: row of `bits`; -1: no grammar."""
    places: Tensor
    """int32 [R]: index of the row's pending id in `last`; -1: no id is pending."""
    bias_starts: Tensor
    """int32 [R + 1]: the entries of each row in `bias_ids`."""
    bias_rows: Tensor
    """int32 [B]; the pairs of row and id are distinct."""
    bias_ids: Tensor
    bias: Tensor
    """fp32 [B]."""
    ban_starts: Tensor
    """int32 [R + 1]: the entries of each row in `ban_ids`."""
    ban_rows: Tensor
    """int32 [N]; only one of the entries of a row and an id holds at a time."""
    ban_ids: Tensor
    ban_after: Tensor
    """int32 [N]: the id is banned only after this pending id; -1: always."""
    bits: Tensor
    """int32 `[G, ids / 32]`: one bit for each id that a grammar allows."""
    drawn: bool
    """Whether any row is DRAWN."""
    edited: bool
    """Whether any row has bias, penalties, a grammar or bans."""


def highest(logits: Tensor, num_ids: int) -> Tensor:
    """Implement `kernels.sampling.highest`."""
    places, finite = argmax(logits[:, :num_ids])
    return torch.where(finite, places, -1).int()


def sample(
    logits: Tensor, choices: Choices, num_ids: int, counts: Tensor, last: Tensor | None, scratch: Tensor
) -> Tensor:
    """Implement `kernels.sampling.sample`, without using `scratch`."""
    values = logits[:, :num_ids].to(torch.float32, copy=True)
    lowest, best = torch.aminmax(values, dim=-1)
    finite = torch.isfinite(lowest) & torch.isfinite(best)
    if choices.edited:
        edit(values, choices, counts, last)
    ids = values.argmax(-1)
    if choices.drawn:
        step = max(1, _CHUNK // num_ids)
        drawn = [_draw(values[i : i + step], choices, slice(i, i + step)) for i in range(0, len(values), step)]
        ids = torch.where((choices.flags & DRAWN) > 0, torch.cat(drawn), ids)
    ids = torch.where(finite, ids, -1)
    if choices.edited:
        added = 2 * ((choices.slots >= 0) & finite).int()
        at = choices.slots.clamp(min=0).long() * counts.shape[1] + ids.clamp(min=0)
        counts.view(-1).scatter_add_(0, at, added)
    return ids.int()


# ── bias, penalties, grammar, bans ────────────────────────────────────────────────────────────────────────────────────


def edit(values: Tensor, choices: Choices, counts: Tensor, last: Tensor | None) -> None:
    """Apply bias, penalties, grammars and bans to `values`, fp32 `[R, ids]`, in place."""
    num_ids = values.shape[1]
    flat = values.view(-1)
    if len(choices.bias):
        flat.scatter_add_(0, choices.bias_rows.long() * num_ids + choices.bias_ids, choices.bias)
    step = max(1, _CHUNK // num_ids)
    for i in range(0, len(values), step):
        part = slice(i, i + step)
        _penalise(values[part], choices, part, counts)
        if len(choices.bits):
            _mask(values[part], choices.masks[part], choices.bits)
    if len(choices.ban_ids):
        _ban(values, choices, last)


def _penalise(values: Tensor, choices: Choices, part: slice, counts: Tensor) -> None:
    """Apply the penalties; see `engine.sampling.sampler`. Rows without penalties keep their bits."""
    slots = choices.slots[part]
    held = torch.where((slots >= 0)[:, None], counts[slots.clamp(min=0).long(), : values.shape[1]], 0)
    repetition = choices.repetition[part, None]
    scaled = torch.where(values > 0, values / repetition, values * repetition).clamp_(-LARGEST, LARGEST)
    values.copy_(torch.where(held > 0, scaled, values))
    output = (held >> 1).float()
    values.sub_(output * choices.frequency[part, None])
    values.sub_((output > 0).float() * choices.presence[part, None])


def _mask(values: Tensor, masks: Tensor, bits: Tensor) -> None:
    """Set the ids that the grammars forbid to -inf."""
    shifts = torch.arange(32, dtype=torch.int32, device=values.device)
    words = bits[masks.clamp(min=0).long()]
    allowed = ((words[:, :, None] >> shifts) & 1).view(len(words), -1)[:, : values.shape[1]] > 0
    values.masked_fill_(~allowed & (masks >= 0)[:, None], -torch.inf)


def _ban(values: Tensor, choices: Choices, last: Tensor | None) -> None:
    """Set the banned ids to -inf, except in rows with SPARES that would be left without an id."""
    rows, after = choices.ban_rows.long(), choices.ban_after
    banned = after < 0
    if last is not None:
        places = choices.places[rows]
        banned = banned | ((places >= 0) & (last[places.clamp(min=0).long()] == after))
    at = rows * values.shape[1] + choices.ban_ids
    flat = values.view(-1)
    before = flat[at]
    flat.scatter_reduce_(0, at, torch.where(banned, -torch.inf, torch.inf), "amin")
    empty = values.amax(-1).isneginf() & ((choices.flags & SPARES) > 0)
    flat.scatter_(0, at, torch.where(empty[rows], before, flat[at]))


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw(values: Tensor, choices: Choices, part: slice) -> Tensor:
    """Draw one id for each row; int64. Rows without a temperature get any id."""
    # The highest logit becomes 0, so that a tiny temperature cannot overflow.
    scaled = (values - values.amax(-1, keepdim=True)) / choices.temperature[part, None]
    weights = (scaled.exp().nan_to_num_(0).double() * SCALE).long()  # NaN: a grammar allows no id
    keys = ordered(scaled)
    threshold = torch.maximum(choices.log_min_p[part], unordered(_edges(keys, weights, choices, part)))
    mass = weights.masked_fill_(scaled < threshold[:, None], 0).cumsum(-1)
    total = mass[:, -1]
    target = torch.minimum((choices.noise[part] * total).long(), total - 1).clamp(min=0)
    # The clamp is for a grammar that allows no id: it refuses any sampled id, and the request fails.
    return torch.searchsorted(mass, target[:, None], right=True).squeeze(-1).clamp(max=values.shape[-1] - 1)


def _edges(keys: Tensor, weights: Tensor, choices: Choices, part: slice) -> Tensor:
    """Return the ordered bits of the lowest scaled logit that top_k, then top_p, keep; int64 `[R]`."""
    num_ids = keys.shape[-1]
    top_k, top_p = choices.top_k[part], choices.top_p[part]
    limit = torch.where(top_k > 0, top_k, num_ids).clamp(max=num_ids).long()
    low = torch.full_like(limit, LOWEST)
    edge = torch.where(top_k > 0, _edge(keys, torch.ones_like(keys), limit, low), low)
    # The mass that top_p is a share of: that of exactly `limit` ids, whatever is equal to the last of them.
    above = keys > edge[:, None]
    ties = limit - above.sum(-1)
    equal = weights.masked_fill(keys != edge[:, None], 0).amax(-1)
    total = torch.where(top_k > 0, weights.masked_fill(~above, 0).sum(-1) + ties * equal, weights.sum(-1))
    wanted = torch.minimum((top_p.double() * total).ceil().long(), total).clamp(min=1)
    return torch.where(top_p < 1, _edge(keys, weights, wanted, edge), edge)


def _edge(keys: Tensor, amounts: Tensor, wanted: Tensor, low: Tensor) -> Tensor:
    """Return, for each row, the highest key such that the amounts of all keys from it on reach `wanted`.

    Args:
        keys: int32 `[R, ids]`, none above 0.
        amounts: integers `[R, ids]`, none negative.
        wanted: int64 `[R]`, at least 1.
        low: int64 `[R]`: keys for which the amounts are known to reach `wanted`.
    """
    high = torch.ones_like(low)
    for _ in range(31):
        middle = (low + high) >> 1
        enough = torch.where(keys >= middle[:, None], amounts, 0).sum(-1) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def ordered(values: Tensor) -> Tensor:
    """Return integers in the order of these fp32 values; int32."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unordered(keys: Tensor) -> Tensor:
    """Return the fp32 values that `ordered` maps to these integers."""
    bits = keys.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────────────────────────


def logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, ids: Tensor, num_ids: int, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `kernels.sampling.logprobs`."""
    chosen, best, values = [], [], []
    step = max(1, _CHUNK // num_ids)
    falling = 0xFFFFFFFF - torch.arange(num_ids, device=logits.device) if top else None
    for i in range(0, len(rows), step):
        at = rows[i : i + step].long()
        logs = logits[at, :num_ids].float().log_softmax(-1)
        mine = tokens[i : i + step].long()
        if len(ids):
            mine = torch.where(mine < 0, ids[at.clamp(max=len(ids) - 1)].long(), mine)
        chosen.append(logs.gather(-1, mine.clamp(min=0)[:, None]).squeeze(-1))
        if falling is not None:
            pairs = (ordered(logs).long() << 32) | falling
            found = 0xFFFFFFFF - (pairs.topk(top, dim=-1).values & 0xFFFFFFFF)
            best.append(found.int())
            values.append(logs.gather(-1, found))
    none = logits.new_empty((len(rows), 0))
    if not top:
        return torch.cat(chosen), none.int(), none.float()
    return torch.cat(chosen), torch.cat(best), torch.cat(values)
