"""Rows of live sequences in the tables of a device.

A place is the index of a sequence's row in the block tables and in the tensor of last ids. The rows are a cache: a
sequence without a place gets one when it runs, if none is free that of a sequence that is not in the step. The only
value that a step cannot get from the host is a pending id, which the step right before it sampled; a sequence that is
in both steps keeps its place.

The place of an ended sequence may be given to another one while a step with the ended one is in flight: the device
executes steps and uploads in the order of their launches, so it reads the old row before the new one is written.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain
from operator import is_

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence

Ints = NDArray[np.int32]


class Places:
    """Assigns places to sequences."""

    def __init__(self, count: int, lost: Callable[[int], None] = lambda uid: None) -> None:
        """Create `count` free places. `lost` is called with the `uid` of each sequence that loses its place."""
        self._lost = lost
        self._free = list(range(count))[::-1]
        self._of: dict[int, int] = {}
        """`Sequence.uid` → place, in the order in which they were given."""

    def of(self, seqs: Seq[Sequence]) -> list[int]:
        """Return the places of all sequences of a step, after assigning one to each sequence that has none.

        Raises:
            ValueError: there are more sequences than places.
        """
        places = self._of
        try:
            return [places[seq.uid] for seq in seqs]
        except KeyError:
            self._give(seqs)
            return [places[seq.uid] for seq in seqs]

    def forget(self, uid: int) -> None:
        """Free the place of a sequence; ignore one without a place."""
        place = self._of.pop(uid, None)
        if place is not None:
            self._free.append(place)
            self._lost(uid)

    def _give(self, seqs: Seq[Sequence]) -> None:
        wanted = dict.fromkeys(seq.uid for seq in seqs)
        missing = [uid for uid in wanted if uid not in self._of]
        idle = (uid for uid in list(self._of) if uid not in wanted)
        while len(self._free) < len(missing):
            uid = next(idle, None)
            if uid is None:
                raise ValueError(f"a step has {len(wanted)} sequences, but the device's tables have fewer rows")
            self.forget(uid)
        for uid in missing:
            self._of[uid] = self._free.pop()

    def __len__(self) -> int:
        """Return the number of sequences that have a place."""
        return len(self._of)


class BlockTables:
    """A copy on the host of the block tables on the device, which tells which entries have to be uploaded.

    A sequence replaces the list of its blocks whenever it loses them. While the list is the same, the entries of full
    computed blocks don't change: only those from the block of the first computed token on are compared.
    """

    def __init__(self, places: int, blocks: int, block_size: int) -> None:
        self.entries: Ints = np.full((places, blocks), -1, np.int32)
        """`[places, blocks]`: block ids on the device after all uploads that were launched; -1: unknown."""
        self._flat = self.entries.reshape(-1)
        self._lists: list[list[int] | None] = [None] * places
        """The list whose blocks are in each row."""
        self._block_size = block_size

    def update(self, seqs: Seq[Sequence], places: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Copy the block tables of the sequences of a step into `entries`, and return what changed.

        Args:
            seqs: S sequences.
            places: `[S]`.
            starts: `[S]`: first token that the step computes.
            counts: `[S]`: number of tokens that the step computes.

        Returns:
            Flat index into `entries` and new value of each entry that changed, `[D]` each.

        Raises:
            ValueError: a sequence has more blocks than a row holds.
        """
        size, width, known = self._block_size, self.entries.shape[1], self._lists
        tables = [seq.block_table for seq in seqs]
        first = starts // size
        last = (starts + counts - 1) // size
        if last.max() >= width:
            raise ValueError(f"a sequence of {int(last.max()) + 1} blocks is longer than the device's tables")
        rows = places.tolist()
        if not all(map(is_, map(known.__getitem__, rows), tables)):
            for i, (row, table) in enumerate(zip(rows, tables, strict=True)):
                if known[row] is not table:
                    known[row], first[i] = table, 0
        at = places * width + first
        if (first == last).all():
            values = np.array([table[i] for table, i in zip(tables, first.tolist(), strict=True)], np.int32)
        else:
            spans = [table[a : b + 1] for table, a, b in zip(tables, first.tolist(), last.tolist(), strict=True)]
            values = np.array(list(chain.from_iterable(spans)), np.int32)
            at = ramps(at, last - first + 1)
        changed = np.flatnonzero(self._flat[at] != values)
        at, values = at[changed], values[changed]
        self._flat[at] = values
        return at, values

    def forget(self) -> None:
        """Treat all entries on the device as unknown; called when an upload may not have been launched."""
        self.entries.fill(-1)
        self._lists = [None] * len(self._lists)


def ramps(starts: Ints, counts: Ints) -> Ints:
    """Return `counts[0]` consecutive numbers from `starts[0]` on, then `counts[1]` from `starts[1]` on, and so on."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) + np.repeat(starts - ends + counts, counts)
