"""What a batch run tells its caller: counts while it goes on, a report at its end, or why it did not begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHOWN_FAULTS = 100
"""Faults of an input file that are listed; the others are only counted."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """How a file stands. `total` counts its requests; each succeeded or failed one has its line in an output."""

    total: int
    succeeded: int
    failed: int

    @property
    def complete(self) -> bool:
        """Every request has its line; False only where the run was told to stop."""
        return self.succeeded + self.failed == self.total


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after every write."""

    total: int
    succeeded: int
    failed: int
    resumed: int
    """Lines of those that an earlier run had written."""
    in_flight: int

    @property
    def done(self) -> int:
        return self.succeeded + self.failed


OnProgress = Callable[[Progress], None]


class Fault(NamedTuple):
    """One thing that is wrong with an input file."""

    line: int | None
    """Counted from 1, blank ones too; None: the file as a whole."""
    code: str
    """OpenAI's: `invalid_json_line`, `duplicate_custom_id`, `empty_file`, …"""
    message: str

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.code}: {self.message}"


class BatchError(Exception):
    """A run cannot go on; what was written stays and a later run goes on from it."""


class BatchStopped(BatchError):
    """Told to stop before there was anything to report."""


class BatchInvalid(BatchError):
    """The input file is not a batch; nothing was submitted.

    Args:
        faults: the first `SHOWN_FAULTS` of them.
        count: how many there are.
    """

    def __init__(self, faults: Sequence[Fault], count: int) -> None:
        self.faults = tuple(faults)
        self.count = count
        shown = "\n".join(map(str, self.faults))
        more = f"\nand {count - len(self.faults)} more" if count > len(self.faults) else ""
        super().__init__(shown + more)
