"""Counts on the device how often each id occurs in the rows with penalties."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.sampling.row import Row
from kernels.device import send


class Counts:
    """The counts of each row with penalties, in a slot of a tensor of the device.

    A row's tokens are uploaded when it gets a slot; after that the device counts each id that it samples. If no slot is
    free, the row that was sampled longest ago loses its slot.
    """

    def __init__(self, num_slots: int, num_ids: int, width: int, device: torch.device) -> None:
        """Allocate slots of `width` columns, at least `num_ids`."""
        self._num_ids = num_ids
        self.values = torch.empty((num_slots, width), dtype=torch.int32, device=device)
        """int32 `[slots, width]`: twice the number of occurrences in the output, plus 1 if the id is in the prompt."""
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[int, int] = {}
        """uid → slot; the row that was sampled longest ago comes first."""
        self._seen: dict[int, int] = {}
        """uid → number of tokens that are counted in its slot, the pending one included."""

    @property
    def idle(self) -> bool:
        """Whether no row has a slot."""
        return not self._slots and not self._seen

    def slots(self, rows: Seq[Row], last: Tensor | None) -> list[int]:
        """Return the slots of these rows, with the counts of all their tokens. The device adds the id sampled next.

        Raises:
            IndexError: there are more rows than slots.
        """
        if len(rows) > len(self.values):
            raise IndexError(f"{len(rows)} rows with penalties in a step, but only {len(self.values)} slots")
        for row in rows:
            if row.uid in self._slots:
                self._slots[row.uid] = self._slots.pop(row.uid)
        missing = [row for row in rows if self._seen.get(row.uid) != len(row.tokens) + row.pending]
        if missing:
            self._fill(missing, {row.uid for row in rows}, last)
        self._seen.update((row.uid, len(row.tokens) + row.pending + 1) for row in rows)
        return [self._slots[row.uid] for row in rows]

    def forget(self, uid: int) -> None:
        """Free the slot of a row."""
        self._seen.pop(uid, None)
        slot = self._slots.pop(uid, None)
        if slot is not None:
            self._free.append(slot)

    def _fill(self, rows: Seq[Row], needed: set[int], last: Tensor | None) -> None:
        """Count the tokens of these rows in their slots; no row whose uid is in `needed` loses its slot."""
        width = self.values.shape[1]
        cells, amounts = [], []
        for row in rows:
            if row.uid not in self._slots:
                if not self._free:
                    self.forget(next(uid for uid in self._slots if uid not in needed))
                self._slots[row.uid] = self._free.pop()
            ids, found = _amounts(row, self._num_ids)
            cells.append(ids + self._slots[row.uid] * width)
            amounts.append(found)
        device = self.values.device
        slots = [self._slots[row.uid] for row in rows]
        self.values.index_fill_(0, send(np.array(slots), device), 0)
        flat = self.values.view(-1)
        flat.scatter_(0, send(np.concatenate(cells), device), send(np.concatenate(amounts), device))
        pending = [(slot, row.place) for slot, row in zip(slots, rows, strict=True) if row.pending]
        if pending and last is not None:
            at, places = send(np.array(pending), device).unbind(1)
            added = last[places]
            flat.scatter_add_(0, at * width + added.clamp(min=0), 2 * (added >= 0).int())


def _amounts(row: Row, num_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids of a row, int64, and their entries in `Counts.values`, int32."""
    tokens = np.array(row.tokens, dtype=np.int64)
    output = np.zeros(len(tokens), dtype=bool)
    output[row.num_prompt_tokens :] = True
    kept = tokens < num_ids
    ids, at = np.unique(tokens[kept], return_inverse=True)
    outputs = np.bincount(at[output[kept]], minlength=len(ids))
    prompts = np.bincount(at[~output[kept]], minlength=len(ids)) > 0
    return ids, (2 * outputs + prompts).astype(np.int32)
