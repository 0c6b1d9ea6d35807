"""Samples the next id of each row, vectorised over the batch.

Order: columns beyond the tokenizer are cut off → logprobs → logit_bias → repetition, frequency and presence penalties →
the grammar's mask → banned ids, and before `min_tokens` ids that end the text → temperature → top_k → top_p → min_p →
sampling. Temperature 0: the highest logit after the bans.

Sampling inverts the cumulative distribution at a number in [0, 1) that depends only on (seed, choice, position), so
neither the other rows, nor the row's index in the batch, nor a preemption changes it. All filters together are one
threshold for each row, and probabilities are summed in the order of ids: ids that are equal at the threshold are all
kept, and how equal logits are sorted changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.outputs import TokenLogprobs
from engine.request import SamplingParams
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import uniform
from engine.sampling.row import MIN_TEMPERATURE, Computed, Drawn, PromptRows, Row, Sampled
from engine.sampling.structured import apply_masks
from kernels.ops import argmax

__all__ = ["Computed", "Drawn", "PromptRows", "Row", "Sampled", "Sampler", "token_logprobs", "uniform"]

_TOP = 256
"""Number of highest logits that are sorted to find the limit of top_p, before all logits are sorted."""
_LARGEST = torch.finfo(torch.float32).max


class Sampler:
    """Samples ids. It caches, by `Row.uid`, values that the same rows need in each step."""

    def __init__(self, num_ids: int, device: torch.device | str = "cpu") -> None:
        self.num_ids = num_ids
        """Number of ids of the tokenizer; later columns of the logits are never sampled."""
        self.device = torch.device(device)
        self._uids: tuple[int, ...] = ()
        self._columns: _Columns | None = None
        self._counts: dict[int, _Counts] = {}

    def sample(
        self, logits: Tensor, rows: Seq[Row], last: Tensor | None = None, prompts: Seq[PromptRows] = ()
    ) -> Drawn:
        """Sample one id for each row, and compute the requested logprobs of prompts.

        Args:
            logits: `[R + P, vocab]`: the rows that are sampled, then those of `prompts`; may be overwritten.
            rows: R rows.
            last: int32 `[places]`: the last sampled id of each `Row.place`; needed only if a row has a pending id.
            prompts: prompt rows, P in all.
        """
        if last is not None:
            rows = _with_pending(rows, last)
        sampled = self._sample(logits[: len(rows)], rows)
        if prompts:
            found = self._prompt_logprobs(logits[len(rows) :], prompts)
            sampled = dataclasses.replace(sampled, prompt_logprobs=found)
        return Computed(sampled)

    def _prompt_logprobs(self, logits: Tensor, prompts: Seq[PromptRows]) -> tuple[tuple[TokenLogprobs, ...], ...]:
        found, at = [], 0
        for prompt in prompts:
            end = at + len(prompt.tokens)
            values = logits[at:end, : self.num_ids].float().log_softmax(-1)
            found.append(tuple(token_logprobs(values, prompt.tokens, prompt.top)))
            at = end
        return tuple(found)

    def _sample(self, logits: Tensor, rows: Seq[Row]) -> Sampled:
        """Sample one id for each row of `logits`, `[R, vocab]`, which may be overwritten."""
        logits = logits[:, : self.num_ids]
        places, are_finite = argmax(logits)
        highest, finite = places.tolist(), are_finite.tolist()
        # Rows that need only their highest logit are done; the other rows need a copy of their logits in fp32.
        rest = [i for i, row in enumerate(rows) if not _settled(row, highest[i])]
        if not rest:
            return Sampled(tuple(i if ok else None for i, ok in zip(highest, finite, strict=True)), (None,) * len(rows))
        if len(rest) < len(rows):
            return self._merge(logits, rows, rest, highest, finite)
        return self._choose(logits.float(), rows, finite)

    def _merge(
        self, logits: Tensor, rows: Seq[Row], rest: list[int], highest: list[int], finite: list[bool]
    ) -> Sampled:
        """Combine the highest logits of the settled rows with the ids that are sampled for the other rows."""
        found = self._choose(logits[rest].float(), [rows[i] for i in rest], [finite[i] for i in rest])
        ids: list[int | None] = [i if ok else None for i, ok in zip(highest, finite, strict=True)]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for i, token, values in zip(rest, found.token_ids, found.logprobs, strict=True):
            ids[i], logprobs[i] = token, values
        return Sampled(tuple(ids), tuple(logprobs))

    def _choose(self, logits: Tensor, rows: Seq[Row], finite: list[bool]) -> Sampled:
        """Sample one id for each row of `logits`, fp32 `[R, ids]`, which are overwritten."""
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
        """Discard the cached values of a choice that has ended."""
        self._counts.pop(uid, None)
        if uid in self._uids:
            self._uids, self._columns = (), None

    @property
    def idle(self) -> bool:
        """Whether no state of any row is cached."""
        return not self._counts and self._columns is None

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
            if params.penalised:
                self._counts_of(row).penalise(logits[i], params)
        apply_masks(logits, {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None})
        for i, row in enumerate(rows):
            banned = [i for i in row.banned if i < self.num_ids]
            if banned:
                self._ban(logits[i], banned, row)

    def _ban(self, logits: Tensor, banned: list[int], row: Row) -> None:
        """Set the logits of these ids to -inf, unless no other id is allowed."""
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
    """Parameters, as tensors, of the D rows with a temperature above 0; made again when the rows change."""

    drawn: Tensor
    """int64 [D]: indices of the D rows in the batch."""
    drawn_rows: tuple[int, ...]
    temperature: Tensor
    """fp32 [D, 1]."""
    top_k: Tensor
    """int64 [D]; 0: off."""
    top_p: Tensor
    """fp32 [D]."""
    log_min_p: Tensor
    """fp32 [D, 1]; -inf: off."""
    ranked: tuple[int, ...]
    """Indices of those of the D rows whose highest logits must be sorted."""
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
            temperature=column([max(p.temperature, MIN_TEMPERATURE) for p in params])[:, None],
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            top_p=column([p.top_p for p in params]),
            log_min_p=column([p.min_p for p in params]).log()[:, None],
            ranked=tuple(d for d, p in enumerate(params) if p.top_k > 0 or p.top_p < 1),
            max_top_k=max((p.top_k for p in params), default=0),
        )


def _draw(logits: Tensor, columns: _Columns, noise: Tensor) -> Tensor:
    """Sample one id for each of the D rows; int64 [D]."""
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
    # The clamp is for a grammar that allows no id: it refuses any sampled id, and the request fails.
    return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _edges(scaled: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int) -> Tensor:
    """Return the lowest scaled logit that top_k, then top_p, keep; fp32 [D, 1]. At least one id is kept."""
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
    """Find the lowest logit to keep among the highest ones.

    Args:
        values: `[D, width]`, the highest logits of each row, descending.
        limit: `[D]`, number of values that top_k keeps.
        top_p: `[D]`.
        total: `[D]`, the mass that top_p is a share of; infinity: the mass of the first `limit` values.

    Returns:
        The logits, `[D, 1]`, and whether each lies within `values`, `[D]`.
    """
    width = values.shape[-1]
    inside = torch.arange(width, device=values.device)[None, :] < limit[:, None]
    mass = values.exp().masked_fill(~inside, 0.0).cumsum(-1, dtype=torch.float64)
    wanted = top_p.double() * torch.where(torch.isinf(total), mass[:, -1], total)
    # The first column at which the cumulative mass reaches top_p; it is never past the limit.
    place = torch.searchsorted(mass, wanted[:, None]).squeeze(-1)
    last = (limit - 1).clamp(max=width - 1)
    found = (place < width) | (limit <= width)
    place = torch.where(top_p < 1, torch.minimum(place, last), last)
    found = found & ((top_p < 1) | (limit <= width))
    return values.gather(-1, place[:, None]), found


def _with_pending(rows: Seq[Row], last: Tensor) -> Seq[Row]:
    """Return the rows with their pending ids appended to their tokens."""
    ids = last.tolist()
    return [
        dataclasses.replace(row, tokens=[*row.tokens, max(0, ids[row.place])], pending=False) if row.pending else row
        for row in rows
    ]


def _settled(row: Row, highest: int) -> bool:
    """Return whether the row samples the id of its highest logit, and needs no other logit."""
    params = row.params
    if params.temperature > 0 or params.logprobs is not None or params.logit_bias or row.matcher is not None:
        return False
    if params.penalised:
        return False
    return highest not in row.banned


@dataclass
class _Counts:
    """How often each id occurs in a row, for its penalties."""

    output: Tensor
    """fp32 [ids]: number of occurrences in the output."""
    seen: Tensor
    """bool [ids]: whether the id occurs in prompt or output."""
    seen_tokens: int
    """Number of tokens counted so far, prompt included."""

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
        """Apply the penalties in place.

        Repetition (Keskar et al. 2019): once for each distinct id of prompt and output. Presence and frequency
        (OpenAI's API): for ids of the output.
        """
        if params.repetition_penalty != 1:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            scaled.clamp_(-_LARGEST, _LARGEST)  # infinity minus infinity would be NaN
            logits.copy_(torch.where(self.seen, scaled, logits))
        if params.frequency_penalty:
            logits.sub_(self.output, alpha=params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((self.output > 0).float(), alpha=params.presence_penalty)
