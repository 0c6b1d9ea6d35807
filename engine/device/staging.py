"""The arrays of a step on a GPU: filled on the host by numpy, and copied to the device in one piece.

    pinned, 2 in turn   [ contexts | starts | places | short | rows | extra ... ]    int32
                             │ one copy, up to what the step uses
    device     [ last | contexts | starts | places | short | rows | extra ... ]

All sections except `extra` are at fixed addresses, which a CUDA graph needs; `extra` follows the rows of the step.
`last` holds the id that was sampled last for each place. It lies in the same memory as the rows, so that one gather
returns the input ids of all rows: from the row itself, or from `last` if the host does not know the id yet.

The copy of the next step may be launched while the last step still runs: the device executes both in the order of their
launches. A pinned buffer is overwritten only after the event that follows its copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.device.places import Ints
from kernels.device import aligned

ID, POSITION, SLOT, SOURCE = range(4)
"""Columns of `rows`."""
Array = TypeVar("Array", Ints, Tensor)


@dataclass(frozen=True, slots=True)
class Sections(Generic[Array]):
    """Views of the parts of a buffer, which has room for S sequences and T rows."""

    contexts: Array
    """`[S]`: number of tokens of each sequence in the pool after the step; padding: 0."""
    starts: Array
    """`[S + 1]`: first row of each sequence, and the number of rows; padding: the number of rows."""
    places: Array
    """`[S]`: place of each sequence; padding: -1."""
    short: Array
    """`[S, 2]`: sequence and first token of each work item of a short piece, see `AttentionBackend.tile_tokens`.
    Padding: -1, 0."""
    rows: Array
    """`[T, 4]`: id (0 if the host does not know it), position, slot, and index of the input id in the device's buffer.
    Padding: 0, 0, -1, and the index of its own id."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and offsets of the sections of a buffer, in int32 entries."""

    places: int
    """Number of places: entries of `last`."""
    sequences: int
    tokens: int
    extra: int
    """Entries behind the rows."""

    @property
    def before(self) -> int:
        """Entries of the device's buffer before the sections: those of `last`."""
        return aligned(self.places)

    @property
    def before_rows(self) -> int:
        """Entries of the sections before `rows`."""
        s = self.sequences
        return 2 * aligned(s) + aligned(s + 1) + aligned(2 * s)

    @property
    def size(self) -> int:
        """Entries of all sections and `extra`."""
        return self.before_rows + 4 * self.tokens + self.extra

    def sections(self, buffer: Array) -> Sections[Array]:
        """Return the views of a buffer of `size` entries."""
        s, starts = self.sequences, aligned(self.sequences)
        places = starts + aligned(s + 1)
        short = places + aligned(s)
        rows = self.before_rows
        return Sections(
            contexts=buffer[:s],
            starts=buffer[starts : starts + s + 1],
            places=buffer[places : places + s],
            short=buffer[short : short + 2 * s].reshape(s, 2),
            rows=buffer[rows : rows + 4 * self.tokens].reshape(self.tokens, 4),
        )

    def own_ids(self) -> Ints:
        """Return, for each of the T rows, the index of its id in the device's buffer."""
        first = self.before + self.before_rows
        return np.arange(first, first + 4 * self.tokens, 4, dtype=np.int32)


class Pinned:
    """A pinned buffer of the host, filled for one step and then copied."""

    def __init__(self, layout: Layout, on_gpu: bool) -> None:
        self.tensor = torch.zeros(layout.size, dtype=torch.int32, pin_memory=on_gpu)
        self.array: Ints = self.tensor.numpy()
        self.sections = layout.sections(self.array)
        self._event: torch.cuda.Event | None = None

    def sent(self) -> None:
        """Record an event; called directly after the copy of the buffer to the GPU was launched."""
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Wait until the last copy of the buffer is done; usually it is, since the host has waited for its step."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            self._event.synchronize()
        self._event = None


class Staging:
    """The two pinned buffers of the host, used in turn, and the buffer of the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._on_gpu = device.type != "cpu"
        self._pinned = [Pinned(layout, self._on_gpu) for _ in range(2)]
        self.buffer = torch.zeros(layout.before + layout.size, dtype=torch.int32, device=device)
        """`last` and the sections."""
        self.last = self.buffer[: layout.places]
        """int32 `[places]`: the last id that was sampled for each place."""
        self._target = self.buffer[layout.before :]
        self.device: Sections[Tensor] = layout.sections(self._target)

    def next(self) -> Pinned:
        """Return the pinned buffer for the next step, after waiting until no copy reads it."""
        self._pinned.reverse()
        pinned = self._pinned[0]
        pinned.wait()
        return pinned

    def send(self, pinned: Pinned, rows: int, extra: Seq[Ints]) -> list[Tensor]:
        """Launch the copy of a buffer to the device.

        Args:
            pinned: the buffer that `next` returned.
            rows: number of rows in use, padding included; the rows after them are not copied.
            extra: arrays to append, at most `Layout.extra` entries together, each rounded up to `aligned`.

        Returns:
            The arrays of `extra` on the device.
        """
        used, spans = self.layout.before_rows + 4 * rows, []
        for array in extra:
            spans.append((used, used + array.size))
            pinned.array[used : used + array.size] = array.reshape(-1)
            used += aligned(array.size)
        self._target[:used].copy_(pinned.tensor[:used], non_blocking=True)
        if self._on_gpu:
            pinned.sent()
        return [self._target[start:end] for start, end in spans]
