"""Sampling parameters of a batch as arrays: those that stay while the same rows are sampled, and those of one step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampling.noise import uniform_of
from engine.sampling.row import MIN_TEMPERATURE, Row
from kernels.device import aligned, send
from kernels.sampling import DRAWN, SPARES, Choices

_FLOATS = ("temperature", "top_p", "log_min_p", "repetition", "frequency", "presence")
_FIXED = (*_FLOATS, "top_k", "flags", "bias_starts", "bias_rows", "bias_ids", "bias")
_FP32 = (*_FLOATS, "bias")


class Fixed(NamedTuple):
    """Parameters of one row that never change; made once for each row."""

    floats: tuple[float, ...]
    """In the order of `_FLOATS`."""
    top_k: int
    flags: int
    bias_ids: np.ndarray
    bias: np.ndarray
    penalised: bool
    bans: bool
    """Whether some ids may be banned in some step."""
    combined: tuple[np.ndarray, ...]
    """Four arrays of banned ids: those of every step; with those before `min_tokens`; both once more, with those that
    are banned as the first output id."""
    sequences: tuple[tuple[int, ...], ...]
    """Sequences of ids of which the last is banned after the others."""

    @classmethod
    def of(cls, row: Row, num_ids: int) -> Fixed:
        params, bans = row.params, row.params.bans
        bias = {i: value for i, value in params.logit_bias if i < num_ids}
        early, none = row.eos_token_ids | params.stop_token_ids, frozenset[int]()
        always, first = (bans.always, bans.first) if bans else (none, none)
        flags = DRAWN * (params.temperature > 0) + SPARES * (row.matcher is not None or bans is not None)
        return cls(
            floats=(
                max(params.temperature, MIN_TEMPERATURE),
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            ),
            top_k=min(params.top_k, num_ids),
            flags=flags,
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
            penalised=params.penalised,
            bans=bans is not None or params.min_tokens > 0,
            combined=tuple(
                _ids(always | (early if part & 1 else none) | (first if part & 2 else none), num_ids)
                for part in range(4)
            ),
            sequences=tuple(ids for ids in bans.sequences if ids[-1] < num_ids) if bans else (),
        )

    def banned(self, row: Row) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return distinct ids that are banned now, and distinct pairs (id, pending id after which the id is banned)."""
        position = row.position
        now = self.combined[(position < row.params.min_tokens) + 2 * (position == 0)]
        pairs: set[tuple[int, int]] = set()
        for ids in self.sequences:
            known = ids[: -1 - row.pending]
            if not known or tuple(row.tokens[-len(known) :]) == known:
                pairs.add((ids[-1], ids[-2] if row.pending else -1))
        if not pairs:
            return now, []
        now = np.unique(_joined([now, np.array([i for i, after in pairs if after < 0], dtype=np.int32)]))
        return now, sorted((i, after) for i, after in pairs if after >= 0 and i not in now)


@dataclass(frozen=True)
class Table:
    """Parameters that stay as long as the same rows are sampled; `columns` are on the device."""

    rows: tuple[Fixed, ...]
    seeds: np.ndarray
    """uint64 [R], as `indices`: together with the position, the key of a row's random number."""
    indices: np.ndarray
    drawn: bool
    """Whether any row has a temperature above 0."""
    penalised: tuple[int, ...]
    """Indices of the rows with penalties."""
    banning: tuple[int, ...]
    """Indices of the rows in which some ids may be banned."""
    matching: tuple[int, ...]
    """Indices of the rows with a grammar."""
    wanted: tuple[int, ...]
    """Indices of the rows that request logprobs."""
    biased: bool
    """Whether any row has a logit_bias."""
    plain: bool
    """Whether each row always samples the id of its highest logit."""
    columns: dict[str, Tensor]
    """Name → tensor of those fields of `Choices` that stay as long as the same rows are sampled."""

    @classmethod
    def of(cls, rows: Seq[Row], fixed: Seq[Fixed], device: torch.device) -> Table:
        return cls(
            rows=tuple(fixed),
            seeds=np.array([row.noise_seed & (1 << 64) - 1 for row in rows], dtype=np.uint64),
            indices=np.array([row.index for row in rows], dtype=np.uint64),
            drawn=any(one.flags & DRAWN for one in fixed),
            penalised=_where(one.penalised for one in fixed),
            banning=_where(one.bans for one in fixed),
            matching=_where(row.matcher is not None for row in rows),
            wanted=_where(row.params.logprobs is not None for row in rows),
            biased=any(len(one.bias) for one in fixed),
            plain=all(
                one.flags == 0 and not (one.bans or one.penalised or len(one.bias)) and row.params.logprobs is None
                for row, one in zip(rows, fixed, strict=True)
            ),
            columns=_columns(fixed, device),
        )


@dataclass(frozen=True)
class Step:
    """Parameters of one step, not yet on the device."""

    noise: np.ndarray
    """fp64 [R]."""
    slots: np.ndarray
    """int32 [R], as `masks` and `places`: see `Choices`; -1: none."""
    masks: np.ndarray
    places: np.ndarray
    ban_starts: np.ndarray
    """int32 [R + 1]."""
    ban_ids: np.ndarray
    ban_after: np.ndarray
    bits: np.ndarray
    """int32 `[G, words]`."""
    wanted: np.ndarray
    """int32 [2, W]: rows of the logits, and ids (-1: the sampled id), whose log-probabilities are wanted."""

    @classmethod
    def of(cls, table: Table, rows: Seq[Row], num_ids: int, slots: Seq[int], wanted: np.ndarray) -> Step:
        count = len(rows)
        slot, mask = np.full(count, -1), np.full(count, -1)
        slot[list(table.penalised)] = slots
        mask[list(table.matching)] = np.arange(len(table.matching))
        bits = torch.full((len(table.matching), -(-num_ids // 32)), -1, dtype=torch.int32)
        for i, at in enumerate(table.matching):
            matcher = rows[at].matcher
            assert matcher is not None
            matcher.fill(bits, i)
        sizes, ids, after = _bans(table, rows)
        noise = np.zeros(count)
        if table.drawn:
            noise = uniform_of(table.seeds, table.indices, np.array([row.position for row in rows], dtype=np.uint64))
        places = np.array([row.place if row.pending else -1 for row in rows], dtype=np.int32)
        return cls(noise, slot, mask, places, starts(sizes), ids, after, bits.numpy(), wanted)

    def plain(self, table: Table) -> bool:
        """Return whether each row samples the id of its highest unedited logit in this step."""
        return not (table.drawn or self.edits(table))

    def edits(self, table: Table) -> bool:
        """Return whether any row has bias, penalties, a grammar or bans."""
        return bool(table.penalised or table.matching or table.biased or len(self.ban_ids))

    def send(self, table: Table, device: torch.device) -> tuple[Choices, Tensor, Tensor]:
        """Upload the step; return the parameters of the rows, and the rows and the ids of `wanted`."""
        banned_rows = np.repeat(np.arange(len(self.noise)), np.diff(self.ban_starts))
        parts = [
            self.noise.view(np.int32), self.slots, self.masks, self.places, self.ban_starts,
            banned_rows, self.ban_ids, self.ban_after, self.bits.ravel(), *self.wanted,
        ]  # fmt: skip
        sent = send_together(parts, device)
        noise, slots, masks, places, ban_starts, ban_rows, ban_ids, ban_after, bits, wanted, tokens = sent
        choices = Choices(
            **table.columns, noise=noise.view(torch.float64), slots=slots, masks=masks, places=places,
            ban_starts=ban_starts, ban_rows=ban_rows, ban_ids=ban_ids, ban_after=ban_after,
            bits=bits.view(self.bits.shape), drawn=table.drawn, edited=self.edits(table),
        )  # fmt: skip
        return choices, wanted, tokens


def _columns(fixed: Seq[Fixed], device: torch.device) -> dict[str, Tensor]:
    """Upload the parameters that stay as long as the same rows are sampled; return `Table.columns`."""
    floats = torch.tensor([one.floats for one in fixed], dtype=torch.float32).view(-1, len(_FLOATS)).T.contiguous()
    floats[2].log_()
    sizes = np.array([len(one.bias) for one in fixed], dtype=np.int64)
    parts = [
        *floats.numpy().view(np.int32),
        np.array([one.top_k for one in fixed], dtype=np.int32),
        np.array([one.flags for one in fixed], dtype=np.int32),
        starts(sizes),
        np.repeat(np.arange(len(fixed)), sizes),
        _joined([one.bias_ids for one in fixed]),
        _joined([one.bias.view(np.int32) for one in fixed]),
    ]
    sent = dict(zip(_FIXED, send_together(parts, device), strict=True))
    return {name: part.view(torch.float32) if name in _FP32 else part for name, part in sent.items()}


def _bans(table: Table, rows: Seq[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of bans of each row, and of all bans the ids and `Choices.ban_after`."""
    sizes = np.zeros(len(rows), dtype=np.int64)
    ids: list[np.ndarray] = []
    conditions: list[tuple[int, int]] = []
    total = 0
    for i in table.banning:
        now, pairs = table.rows[i].banned(rows[i])
        ids.append(now)
        total += len(now)
        if pairs:
            ids.append(np.array([ban for ban, _ in pairs], dtype=np.int32))
            conditions += [(total + j, after) for j, (_, after) in enumerate(pairs)]
            total += len(pairs)
        sizes[i] = len(now) + len(pairs)
    after = np.full(total, -1, dtype=np.int32)
    for at, pending in conditions:
        after[at] = pending
    return sizes, _joined(ids), after


def starts(sizes: np.ndarray) -> np.ndarray:
    """Return the offset of each of consecutive parts of these sizes, and the end of the last part."""
    return np.concatenate([[0], np.cumsum(sizes)])


def send_together(parts: Seq[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Return one-dimensional arrays of int32 values as tensors on the device, after one upload.

    Each tensor starts at a multiple of 16 bytes, see `kernels.device.aligned`.
    """
    sizes = [aligned(len(part)) for part in parts]
    together = np.zeros(sum(sizes), dtype=np.int32)
    begins = starts(np.array(sizes)).tolist()
    for at, part in zip(begins, parts, strict=False):
        together[at : at + len(part)] = part
    sent = send(together, device)
    return tuple(sent[at : at + len(part)] for at, part in zip(begins, parts, strict=False))


def _joined(arrays: Seq[np.ndarray]) -> np.ndarray:
    """Concatenate int32 arrays; no arrays give an empty one."""
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])


def _ids(ids: Iterable[int], num_ids: int) -> np.ndarray:
    return np.array(sorted(i for i in ids if i < num_ids), dtype=np.int32)


def _where(flags: Iterable[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)
