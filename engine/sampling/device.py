"""Samples ids on a GPU without waiting for it; only `Drawn.result` waits, for one event.

Rows, parameters and order are those of `engine.sampling.sampler`, and so are the ids: the random numbers are computed
on the host and uploaded. A step uploads one array, and one more if other rows than in the last step are sampled, or if
a row with penalties is new. The device itself applies what depends on a pending id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.outputs import Logprob, TokenLogprobs
from engine.sampling.counts import Counts
from engine.sampling.row import Drawn, PromptRows, Row, Sampled
from engine.sampling.sampler import Sampler
from engine.sampling.table import Fixed, Step, Table
from kernels import sampling
from kernels.device import Download


class DeviceSampler:
    """Samples ids on a GPU. All memory that outlives a step is allocated when the sampler is created."""

    def __init__(self, num_ids: int, device: torch.device | str, max_rows: int) -> None:
        """Create a sampler.

        Args:
            num_ids: number of ids of the tokenizer; later columns of the logits are never sampled.
            device: the device of the logits.
            max_rows: maximum number of rows of a step.
        """
        self.num_ids = num_ids
        self.device = torch.device(device)
        width = -(-num_ids // 16) * 16  # so that the kernels can load 64 bytes at a time
        self._counts = Counts(max_rows, num_ids, width, self.device)
        self._scratch = torch.empty((max_rows, width), dtype=torch.float32, device=self.device)
        self._fixed: dict[int, Fixed] = {}
        self._uids: tuple[int, ...] = ()
        self._table: Table | None = None

    @property
    def bytes(self) -> int:
        """Bytes of device memory that the sampler holds between steps."""
        return self._counts.values.nbytes + self._scratch.nbytes

    @property
    def idle(self) -> bool:
        """Whether no state of any row is cached."""
        return not self._fixed and not self._uids and self._counts.idle

    def sample(
        self, logits: Tensor, rows: Seq[Row], last: Tensor | None = None, prompts: Seq[PromptRows] = ()
    ) -> Drawn:
        """Start to sample one id for each row, and to compute the requested logprobs of prompts.

        Args:
            logits: `[R + P, vocab]`: the rows that are sampled, then those of `prompts`; not changed.
            rows: R rows.
            last: int32 `[places]`: the last sampled id of each `Row.place`; needed only if a row has a pending id.
            prompts: prompt rows, P in all.
        """
        table = self._table_of(rows)
        if table.plain and not prompts:
            ids = sampling.highest(logits[: len(rows)], self.num_ids)
            return _Drawn(ids, Download(ids), tuple(rows), (), ())
        wanted = _wanted(table, len(rows), prompts)
        slots = self._counts.slots([rows[i] for i in table.penalised], last) if table.penalised else []
        step = Step.of(table, rows, self.num_ids, slots, wanted)
        ids, found = self._launch(logits, len(rows), table, step, last, max(_tops(table, rows, prompts), default=0))
        return _Drawn(ids, Download(ids, *found), tuple(rows), table.wanted, tuple(prompts))

    def _launch(
        self, logits: Tensor, num_rows: int, table: Table, step: Step, last: Tensor | None, top: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upload the step; return the sampled ids, and the results of `kernels.sampling.logprobs` if any are wanted."""
        plain, wanted = step.plain(table), step.wanted.size > 0
        if plain and not wanted:
            return sampling.highest(logits[:num_rows], self.num_ids), ()
        choices, places, tokens = step.send(table, self.device)
        if plain:
            ids = sampling.highest(logits[:num_rows], self.num_ids)
        else:
            counts, scratch = self._counts.values, self._scratch
            ids = sampling.sample(logits[:num_rows], choices, self.num_ids, counts, last, scratch)
        if not wanted:
            return ids, ()
        top = min(top, self.num_ids)
        return ids, sampling.logprobs(logits, places, tokens, ids, self.num_ids, top)

    def forget(self, uid: int) -> None:
        """Discard the state of a choice that has ended."""
        self._counts.forget(uid)
        self._fixed.pop(uid, None)
        if uid in self._uids:
            self._uids, self._table = (), None

    def _table_of(self, rows: Seq[Row]) -> Table:
        uids = tuple(row.uid for row in rows)
        if self._table is None or uids != self._uids:
            for row in rows:
                if row.uid not in self._fixed:
                    self._fixed[row.uid] = Fixed.of(row, self.num_ids)
            self._table = Table.of(rows, [self._fixed[uid] for uid in uids], self.device)
            self._uids = uids
        return self._table


def sampler_on(device: torch.device, num_ids: int, max_rows: int) -> Sampler | DeviceSampler:
    """Return the sampler for logits on this device; the arguments are those of `DeviceSampler`."""
    return Sampler(num_ids, device) if device.type == "cpu" else DeviceSampler(num_ids, device, max_rows)


def _wanted(table: Table, num_rows: int, prompts: Seq[PromptRows]) -> np.ndarray:
    """Return the rows of the logits whose log-probabilities are requested, and the ids (-1: sampled), int32 [2, W]."""
    tokens = [token for prompt in prompts for token in prompt.tokens]
    rows = [*table.wanted, *range(num_rows, num_rows + len(tokens))]
    return np.array([rows, [-1] * len(table.wanted) + tokens], dtype=np.int32)


def _tops(table: Table, rows: Seq[Row], prompts: Seq[PromptRows]) -> list[int]:
    return [*(rows[i].params.logprobs or 0 for i in table.wanted), *(prompt.top for prompt in prompts)]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Ids and logprobs that are being copied to the host (a `Drawn`)."""

    ids: Tensor
    download: Download
    rows: tuple[Row, ...]
    wanted: tuple[int, ...]
    """Indices of the rows that request logprobs."""
    prompts: tuple[PromptRows, ...]

    def result(self) -> Sampled:
        ids, *found = self.download.wait()
        tokens = tuple(None if i < 0 else i for i in ids.tolist())
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if not found:
            return Sampled(tokens, tuple(logprobs))
        entries = _Entries.of(*found)
        for i, row in enumerate(self.wanted):
            token = tokens[row]
            if token is not None:
                logprobs[row] = entries.entry(i, token, self.rows[row].params.logprobs or 0)
        at, prompts = len(self.wanted), []
        for prompt in self.prompts:
            prompts.append(tuple(entries.entry(at + j, token, prompt.top) for j, token in enumerate(prompt.tokens)))
            at += len(prompt.tokens)
        return Sampled(tokens, tuple(logprobs), tuple(prompts))


@dataclass(frozen=True, slots=True)
class _Entries:
    """Log-probabilities of W ids, and for each of them the most likely ids of its row, the most likely first."""

    chosen: list[float]
    ids: list[list[int]]
    values: list[list[float]]

    @classmethod
    def of(cls, chosen: Tensor, ids: Tensor, values: Tensor) -> _Entries:
        order = np.lexsort((ids.numpy(), -values.numpy()), axis=-1)
        ranked = (np.take_along_axis(x.numpy(), order, axis=-1).tolist() for x in (ids, values))
        return cls(chosen.tolist(), *ranked)

    def entry(self, i: int, token: int, top: int) -> TokenLogprobs:
        best = tuple(map(Logprob, self.ids[i][:top], self.values[i][:top]))
        return TokenLogprobs(Logprob(token, self.chosen[i]), best)
