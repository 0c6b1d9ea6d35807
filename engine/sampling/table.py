"""Parameters of the rows of a batch as arrays: those that stay while the rows stay, and those of one step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.noise import uniform_of
from engine.sampling.row import Row
from kernels.device import send
from kernels.sampling import DRAWN, SPARES, Choices

_MIN_TEMPERATURE = 1e-6
_FLOATS = ("temperature", "top_p", "log_min_p", "repetition", "frequency", "presence")


class Fixed(NamedTuple):
    """What a row never changes; made once for each row."""

    floats: tuple[float, ...]
    """In the order of `_FLOATS`."""
    top_k: int
    flags: int
    bias_ids: np.ndarray
    bias: np.ndarray
    penalised: bool
    bans: bool
    """Whether some ids may be banned in some step."""
    always: np.ndarray
    """The ids that are banned in every step."""
    early: np.ndarray
    """The ids that are banned before `min_tokens`."""
    first: np.ndarray
    """The ids that are banned as the first output id."""
    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, row: Row, num_ids: int) -> Fixed:
        params, bans = row.params, row.params.bans
        bias = {i: value for i, value in params.logit_bias if i < num_ids}
        flags = DRAWN * (params.temperature > 0) + SPARES * (row.matcher is not None or bans is not None)
        return cls(
            floats=(
                max(params.temperature, _MIN_TEMPERATURE),
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
            penalised=penalised(params),
            bans=bans is not None or params.min_tokens > 0,
            always=_ids(bans.always if bans else (), num_ids),
            early=_ids(row.eos_token_ids | params.stop_token_ids, num_ids),
            first=_ids(bans.first if bans else (), num_ids),
            sequences=tuple(ids for ids in bans.sequences if ids[-1] < num_ids) if bans else (),
        )

    def banned(self, row: Row) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return the distinct ids that are banned now, and distinct pairs (id, pending id after which it is banned)."""
        position = row.position
        arrays = [self.always]
        if position < row.params.min_tokens:
            arrays.append(self.early)
        if position == 0:
            arrays.append(self.first)
        pairs: set[tuple[int, int]] = set()
        for ids in self.sequences:
            known = ids[: -1 - row.pending]
            if not known or tuple(row.tokens[-len(known) :]) == known:
                pairs.add((ids[-1], ids[-2] if row.pending else -1))
        arrays.append(np.array(sorted(i for i, after in pairs if after < 0), dtype=np.int32))
        arrays = [ids for ids in arrays if len(ids)]
        now = arrays[0] if len(arrays) == 1 else np.unique(_joined(arrays))
        return now, sorted((i, after) for i, after in pairs if after >= 0 and i not in now)


def penalised(params: SamplingParams) -> bool:
    """Return whether a request has any penalty."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass(frozen=True)
class Table:
    """Parameters that stay as long as the same rows are sampled, on the device."""

    rows: tuple[Fixed, ...]
    seeds: np.ndarray
    """uint64 [R], as `indices`: parts of the key of the noise."""
    indices: np.ndarray
    drawn: bool
    penalised: tuple[int, ...]
    """Indices of the rows with penalties."""
    banning: tuple[int, ...]
    """Indices of the rows in which some ids may be banned."""
    matching: tuple[int, ...]
    """Indices of the rows with a grammar."""
    wanted: tuple[int, ...]
    """Indices of the rows that request logprobs."""
    biased: bool
    parts: tuple[Tensor, ...]
    """On the device, int32: the columns of `_FLOATS` (fp32), `top_k`, `flags`, then of the bias entries the starts
    [R + 1], rows, ids and values (fp32)."""

    @classmethod
    def of(cls, rows: Seq[Row], fixed: Seq[Fixed], device: torch.device) -> Table:
        floats = torch.tensor([one.floats for one in fixed], dtype=torch.float32).view(-1, 6).T.contiguous()
        floats[2].log_()
        sizes = np.array([len(one.bias) for one in fixed], dtype=np.int64)
        parts = [
            *floats.numpy().view(np.int32),
            np.array([one.top_k for one in fixed], dtype=np.int32),
            np.array([one.flags for one in fixed], dtype=np.int32),
            starts(sizes),
            np.repeat(np.arange(len(rows)), sizes),
            _joined([one.bias_ids for one in fixed]),
            _joined([one.bias.view(np.int32) for one in fixed]),
        ]
        return cls(
            rows=tuple(fixed),
            seeds=np.array([row.noise_seed & (1 << 64) - 1 for row in rows], dtype=np.uint64),
            indices=np.array([row.index for row in rows], dtype=np.uint64),
            drawn=any(one.flags & DRAWN for one in fixed),
            penalised=_where(one.penalised for one in fixed),
            banning=_where(one.bans for one in fixed),
            matching=_where(row.matcher is not None for row in rows),
            wanted=_where(row.params.logprobs is not None for row in rows),
            biased=bool(sizes.any()),
            parts=send_together(parts, device),
        )


@dataclass(frozen=True)
class Step:
    """Parameters of one step, not yet on the device."""

    noise: np.ndarray
    """fp64 [R]."""
    slots: np.ndarray
    """int32 [R], as `masks` and `places`; -1: none."""
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
        """Return whether each row samples the id of its highest logit, whatever the others are."""
        return not (table.drawn or self.edits(table))

    def edits(self, table: Table) -> bool:
        """Return whether any row has bias, penalties, a grammar or bans."""
        return bool(table.penalised or table.matching or table.biased or len(self.ban_ids))

    def send(self, table: Table, device: torch.device) -> tuple[Choices, Tensor, Tensor]:
        """Upload the step; return the parameters of the rows, and both rows of `wanted`."""
        banned_rows = np.repeat(np.arange(len(self.noise)), np.diff(self.ban_starts))
        parts = [
            self.noise.view(np.int32), self.slots, self.masks, self.places, self.ban_starts,
            banned_rows, self.ban_ids, self.ban_after, self.bits.ravel(), *self.wanted,
        ]  # fmt: skip
        sent = send_together(parts, device)
        noise, slots, masks, places, ban_starts, ban_rows, ban_ids, ban_after, bits, wanted, tokens = sent
        *floats, top_k, flags, bias_starts, bias_rows, bias_ids, bias = table.parts
        columns = {name: part.view(torch.float32) for name, part in zip(_FLOATS, floats, strict=True)}
        choices = Choices(
            **columns, top_k=top_k, flags=flags, noise=noise.view(torch.float64), slots=slots, masks=masks,
            places=places, bias_starts=bias_starts, bias_rows=bias_rows, bias_ids=bias_ids,
            bias=bias.view(torch.float32), ban_starts=ban_starts, ban_rows=ban_rows, ban_ids=ban_ids,
            ban_after=ban_after, bits=bits.view(self.bits.shape), drawn=table.drawn, edited=self.edits(table),
        )  # fmt: skip
        return choices, wanted, tokens


def _bans(table: Table, rows: Seq[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of bans of each row, and the ids and pending ids of all bans."""
    sizes = np.zeros(len(rows), dtype=np.int64)
    ids: list[np.ndarray] = []
    after: list[np.ndarray] = []
    for i in table.banning:
        now, pairs = table.rows[i].banned(rows[i])
        ids.append(now)
        after.append(np.full(len(now), -1, dtype=np.int32))
        if pairs:
            found = np.array(pairs, dtype=np.int32)
            ids.append(found[:, 0])
            after.append(found[:, 1])
        sizes[i] = len(now) + len(pairs)
    return sizes, _joined(ids), _joined(after)


def starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each of consecutive parts of these sizes starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)])


def send_together(parts: Seq[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Return one-dimensional arrays of int32 values as tensors on the device, after one upload.

    Each tensor starts at a multiple of 16 bytes: Triton compiles a kernel again for pointers that do not.
    """
    sizes = [-(-len(part) // 4) * 4 for part in parts]
    together = np.zeros(sum(sizes), dtype=np.int32)
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        together[at : at + len(part)] = part
        at += size
    pieces = torch.split(send(together, device), sizes)
    return tuple(piece[: len(part)] for piece, part in zip(pieces, parts, strict=True))


def _joined(arrays: Seq[np.ndarray]) -> np.ndarray:
    """Return int32 arrays, of which there may be none, as one."""
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])


def _ids(ids: Iterable[int], num_ids: int) -> np.ndarray:
    return np.array(sorted(i for i in ids if i < num_ids), dtype=np.int32)


def _where(flags: Iterable[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)
