"""Chooses the next id of each row, vectorised over the batch.

Order: ids that the tokenizer lacks are cut off → logprobs are taken → logit_bias → repetition, frequency and presence
penalties → what the grammar forbids → banned ids, and ends before `min_tokens` → temperature → top_k → top_p → min_p →
one draw.
Temperature 0 takes the highest logit after the bans.

A draw inverts the cumulative distribution at one number in [0, 1) that depends on (seed, choice, position) alone, so
that a row's neighbours, its place in the batch and a preemption don't matter. Filters become one threshold a row, and
ids are summed in their own order: ties at an edge are all kept, and no order of equal logits can leak into the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.outputs import Logprob, TokenLogprobs
from engine.request import SamplingParams
from engine.sampling.structured import Matcher, apply_masks
from kernels.ops import argmax

_TOP = 256
"""How many of a row's highest logits are sorted to find a top_p edge before all of them are."""
_MIN_TEMPERATURE = 1e-6
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler must know of one choice."""

    uid: int
    params: SamplingParams
    noise_seed: int
    index: int
    """Which choice."""
    num_prompt_tokens: int
    tokens: list[int]
    """Prompt and output ids so far (read only)."""
    eos_token_ids: frozenset[int]
    matcher: Matcher | None = None

    @property
    def position(self) -> int:
        """Which output id is drawn, from 0."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def banned(self) -> frozenset[int]:
        """Ids that must not be drawn now: no end before `min_tokens`, and those of `params.bans`."""
        params = self.params
        early = self.eos_token_ids | params.stop_token_ids if self.position < params.min_tokens else frozenset()
        return early if params.bans is None else early | params.bans.now(self.tokens, self.position)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row: the id, or None where the row's logits were not finite."""

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """None where not asked for."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each slice that asked: those of the prompt ids after its rows."""


class Sampler:
    """Keeps what the same rows need step after step; keyed by `Row.uid`, never by the row's place."""

    def __init__(self, num_ids: int, device: torch.device | str = "cpu") -> None:
        self.num_ids = num_ids
        """Ids the tokenizer knows; columns from here on are never sampled."""
        self.device = torch.device(device)
        self._uids: tuple[int, ...] = ()
        self._columns: _Columns | None = None
        self._counts: dict[int, _Counts] = {}

    def sample(self, logits: Tensor, rows: Seq[Row]) -> Sampled:
        """One id for each row of `logits` `[R, vocab]`, which it may overwrite."""
        logits = logits[:, : self.num_ids]
        places, are_finite = argmax(logits)
        highest, finite = places.tolist(), are_finite.tolist()
        # What needs no more than its highest logit is done: the rest costs copies of all logits in fp32.
        rest = [i for i, row in enumerate(rows) if not _settled(row, highest[i])]
        if not rest:
            return Sampled(tuple(i if ok else None for i, ok in zip(highest, finite, strict=True)), (None,) * len(rows))
        if len(rest) < len(rows):
            return self._merge(logits, rows, rest, highest, finite)
        return self._choose(logits.float(), rows, finite)

    def _merge(
        self, logits: Tensor, rows: Seq[Row], rest: list[int], highest: list[int], finite: list[bool]
    ) -> Sampled:
        """The highest logits of the settled rows, and what is chosen for the rest."""
        found = self._choose(logits[rest].float(), [rows[i] for i in rest], [finite[i] for i in rest])
        ids: list[int | None] = [i if ok else None for i, ok in zip(highest, finite, strict=True)]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for i, token, values in zip(rest, found.token_ids, found.logprobs, strict=True):
            ids[i], logprobs[i] = token, values
        return Sampled(tuple(ids), tuple(logprobs))

    def _choose(self, logits: Tensor, rows: Seq[Row], finite: list[bool]) -> Sampled:
        """One id for each row of fp32 `logits` `[R, ids]`, which are overwritten."""
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[wanted].log_softmax(-1) if wanted else None
        self._edit(logits, rows)
        columns = self._columns_of(rows)
        ids = logits.argmax(-1)
        if columns.drawn.numel():
            ids[columns.drawn] = _draw(logits[columns.drawn], columns, self._noise(rows, columns))
        chosen = tuple(i if ok else None for i, ok in zip(ids.tolist(), finite, strict=True))
        self._count(rows, chosen)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for i, values in zip(wanted, raw if raw is not None else (), strict=True):
            token = chosen[i]
            if token is not None:
                (logprobs[i],) = token_logprobs(values[None], [token], rows[i].params.logprobs or 0)
        return Sampled(chosen, tuple(logprobs))

    def forget(self, uid: int) -> None:
        """A choice has ended: keep nothing of it."""
        self._counts.pop(uid, None)
        if uid in self._uids:
            self._uids, self._columns = (), None

    def _columns_of(self, rows: Seq[Row]) -> _Columns:
        uids = tuple(row.uid for row in rows)
        if self._columns is None or uids != self._uids:
            self._uids, self._columns = uids, _Columns.of(rows, self.device)
        return self._columns

    def _noise(self, rows: Seq[Row], columns: _Columns) -> Tensor:
        drawn = [rows[i] for i in columns.drawn_rows]
        keys = [(row.noise_seed, row.index, row.position) for row in drawn]
        return torch.from_numpy(uniform(keys)).to(self.device)

    # ── bias, penalties, bans ─────────────────────────────────────────────────────────────────────────────────────

    def _edit(self, logits: Tensor, rows: Seq[Row]) -> None:
        for i, row in enumerate(rows):
            params = row.params
            if params.logit_bias:
                ids, biases = zip(*params.logit_bias, strict=True)
                logits[i, list(ids)] += torch.tensor(biases, device=self.device)
            if _penalised(params):
                self._counts_of(row).penalise(logits[i], params)
        apply_masks(logits, {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None})
        for i, row in enumerate(rows):
            banned = [i for i in row.banned if i < self.num_ids]
            if banned:
                self._ban(logits[i], banned, row)

    def _ban(self, logits: Tensor, banned: list[int], row: Row) -> None:
        """Forbid these ids, unless nothing else is allowed."""
        before = logits[banned].clone()
        logits[banned] = -torch.inf
        if (row.matcher is not None or row.params.bans is not None) and bool(logits.amax().isneginf()):
            logits[banned] = before

    def _counts_of(self, row: Row) -> _Counts:
        counts = self._counts.get(row.uid)
        if counts is None or counts.seen_tokens != len(row.tokens):
            counts = self._counts[row.uid] = _Counts.of(row, self.num_ids, self.device)
        return counts

    def _count(self, rows: Seq[Row], chosen: tuple[int | None, ...]) -> None:
        for row, token in zip(rows, chosen, strict=True):
            if token is not None and row.uid in self._counts:
                self._counts[row.uid].add(token)


@dataclass(frozen=True)
class _Columns:
    """The parameters of the D rows that are drawn (temperature above 0), as tensors; rebuilt when rows change."""

    drawn: Tensor
    """int64 [D]: their places in the batch."""
    drawn_rows: tuple[int, ...]
    temperature: Tensor
    """fp32 [D, 1]."""
    top_k: Tensor
    """int64 [D]; 0 where off."""
    top_p: Tensor
    """fp32 [D]."""
    log_min_p: Tensor
    """fp32 [D, 1]; -inf where off."""
    ranked: tuple[int, ...]
    """Which of the D need their highest logits sorted."""
    max_top_k: int

    @classmethod
    def of(cls, rows: Seq[Row], device: torch.device) -> _Columns:
        drawn = tuple(i for i, row in enumerate(rows) if row.params.temperature > 0)
        params = [rows[i].params for i in drawn]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            drawn=torch.tensor(drawn, dtype=torch.int64, device=device),
            drawn_rows=drawn,
            temperature=column([max(p.temperature, _MIN_TEMPERATURE) for p in params])[:, None],
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            top_p=column([p.top_p for p in params]),
            log_min_p=column([p.min_p for p in params]).log()[:, None],
            ranked=tuple(d for d, p in enumerate(params) if p.top_k > 0 or p.top_p < 1),
            max_top_k=max((p.top_k for p in params), default=0),
        )


def _draw(logits: Tensor, columns: _Columns, noise: Tensor) -> Tensor:
    """One id for each of the D rows: int64 [D]."""
    # The highest logit becomes 0, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / columns.temperature
    threshold = columns.log_min_p.clone()
    if columns.ranked:
        ranked = torch.tensor(columns.ranked, device=logits.device)
        edge = _edges(scaled[ranked], columns.top_k[ranked], columns.top_p[ranked], columns.max_top_k)
        threshold[ranked] = torch.maximum(threshold[ranked], edge)
    weights = scaled.exp().masked_fill_(scaled < threshold, 0.0)
    mass = weights.cumsum(-1, dtype=torch.float64)
    target = noise[:, None] * mass[:, -1:]
    # The clamp is for a grammar that allows nothing: it refuses whatever is drawn, and the request ends.
    return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _edges(scaled: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int) -> Tensor:
    """The lowest scaled logit that top_k, then top_p leave in: fp32 [D, 1]. At least one id stays."""
    num_ids = scaled.shape[-1]
    width = min(num_ids, max(_TOP, max_top_k))
    limit = torch.where(top_k > 0, top_k.clamp(max=num_ids), num_ids)
    values = scaled.topk(width, dim=-1).values
    total = torch.where(limit <= width, torch.inf, scaled.exp().sum(-1, dtype=torch.float64))
    edge, found = _edge_in(values, limit, top_p, total)
    if not bool(found.all()):
        rest = (~found).nonzero().squeeze(-1)
        everything = scaled[rest].sort(dim=-1, descending=True).values
        edge[rest] = _edge_in(everything, limit[rest], top_p[rest], total[rest])[0]
    return edge


def _edge_in(values: Tensor, limit: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(edge [D, 1], whether it lies within `values` [D]); `values` [D, width] are the highest, descending.

    `total` [D] is the mass that top_p is a share of; infinity means the mass of the first `limit` values.
    """
    width = values.shape[-1]
    inside = torch.arange(width, device=values.device)[None, :] < limit[:, None]
    mass = values.exp().masked_fill(~inside, 0.0).cumsum(-1, dtype=torch.float64)
    wanted = top_p.double() * torch.where(torch.isinf(total), mass[:, -1], total)
    # The first place where the mass reaches the wanted share; places past the limit can't be it.
    place = torch.searchsorted(mass, wanted[:, None]).squeeze(-1)
    last = (limit - 1).clamp(max=width - 1)
    found = (place < width) | (limit <= width)
    place = torch.where(top_p < 1, torch.minimum(place, last), last)
    found = found & ((top_p < 1) | (limit <= width))
    return values.gather(-1, place[:, None]), found


def _settled(row: Row, highest: int) -> bool:
    """Whether the row's id is that of its highest logit, whatever else it asks for."""
    params = row.params
    if params.temperature > 0 or params.logprobs is not None or params.logit_bias or row.matcher is not None:
        return False
    if _penalised(params):
        return False
    return highest not in row.banned


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass
class _Counts:
    """How often each id occurs: what the penalties of one row need."""

    output: Tensor
    """fp32 [ids]: occurrences in the output."""
    seen: Tensor
    """bool [ids]: occurs in prompt or output."""
    seen_tokens: int
    """Tokens counted so far, prompt included."""

    @classmethod
    def of(cls, row: Row, num_ids: int, device: torch.device) -> _Counts:
        tokens = torch.tensor(row.tokens, dtype=torch.int64, device=device)
        output = torch.bincount(tokens[row.num_prompt_tokens :], minlength=num_ids)[:num_ids]
        seen = torch.bincount(tokens, minlength=num_ids)[:num_ids] > 0
        return cls(output.float(), seen, len(row.tokens))

    def add(self, token: int) -> None:
        self.output[token] += 1
        self.seen[token] = True
        self.seen_tokens += 1

    def penalise(self, logits: Tensor, params: SamplingParams) -> None:
        """Repetition: prompt and output, once per distinct id. Presence and frequency: output only (OpenAI)."""
        if params.repetition_penalty != 1:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            scaled.clamp_(-_LARGEST, _LARGEST)  # infinity minus infinity would be no number
            logits.copy_(torch.where(self.seen, scaled, logits))
        if params.frequency_penalty:
            logits.sub_(self.output, alpha=params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((self.output > 0).float(), alpha=params.presence_penalty)


def token_logprobs(values: Tensor, tokens: Seq[int], top: int) -> list[TokenLogprobs]:
    """For each row of log-probabilities `[R, ids]`: its token's and the `top` highest, equal ones by id."""
    chosen = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None]).squeeze(-1).tolist()
    ranked = _ranked(values, top) if top else [()] * len(tokens)
    return [TokenLogprobs(Logprob(token, mine), best) for token, mine, best in zip(tokens, chosen, ranked, strict=True)]


def _ranked(values: Tensor, top: int) -> list[tuple[Logprob, ...]]:
    """The `top` highest of each row. `topk` takes any of equal ones, so ties at its edge are looked at again."""
    top = min(top, values.shape[-1])
    best, ids = values.topk(top, dim=-1)
    ties = ((values >= best[:, -1:]).sum(-1) > top).tolist()
    rows = list(zip(best.tolist(), ids.tolist(), strict=True))
    for i, tied in enumerate(ties):
        if tied:
            candidates = (values[i] >= best[i, -1]).nonzero().squeeze(-1)
            rows[i] = values[i, candidates].tolist(), candidates.tolist()
    return [
        tuple(
            Logprob(token, p) for p, token in sorted(zip(*row, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        )
        for row in rows
    ]


_MASK = (1 << 64) - 1


def uniform(keys: Seq[tuple[int, int, int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A number in [0, 1) for each (seed, choice, position), with 52 random bits and no state.

    52, not 53: times a total it then stays below that total even after rounding.

    Two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    2014).
    """
    seeds, choices, positions = (np.array([k[i] & _MASK for k in keys], dtype=np.uint64) for i in range(3))
    with np.errstate(over="ignore"):
        x = _mix(seeds + (choices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x + (positions + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return (x >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
