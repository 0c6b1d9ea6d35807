"""The progress, the report and the errors of a batch run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.protocol.errors import TokenmillError

SHOWN_FAULTS = 100
"""Maximum number of faults of an input file that are listed; further faults are only counted."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The state of a file when a run ends.

    `total` counts the file's requests; each succeeded or failed request has its line in an output.
    """

    total: int
    succeeded: int
    failed: int

    @property
    def done(self) -> int:
        """Number of requests that have their line in an output."""
        return self.succeeded + self.failed

    @property
    def complete(self) -> bool:
        """Whether every request has its line; False only if the run was stopped."""
        return self.done == self.total


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running batch; passed to the caller after every write."""

    total: int
    succeeded: int
    failed: int
    resumed: int
    """How many of the succeeded and failed requests an earlier run had written."""
    in_flight: int

    @property
    def done(self) -> int:
        """Number of requests that have their line in an output."""
        return self.succeeded + self.failed


OnProgress = Callable[[Progress], None]


class Fault(NamedTuple):
    """An error in an input file."""

    line: int | None
    """Number of the line, counted from 1, blank lines included; None: the file as a whole."""
    code: str
    """OpenAI's code: `invalid_json_line`, `duplicate_custom_id`, `empty_file`, …"""
    message: str
    param: str | None = None
    """The key that is wrong, such as `custom_id` or `body.model`; None: no single key."""

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.code}: {self.message}"


class BatchError(TokenmillError):
    """A run cannot continue. Lines that were written stay, and a later run continues from them."""


class BatchStopped(BatchError):
    """A run was stopped before it had a report: while its input was checked, or while Redis was away."""


class BatchNotFound(BatchError):
    """Redis knows no request of a run that is to be cancelled: it may be another Redis than the run's."""


class BatchInvalid(BatchError):
    """The input is not a batch file; nothing was submitted.

    Args:
        faults: the first `SHOWN_FAULTS` faults.
        count: number of all faults.
    """

    def __init__(self, faults: Sequence[Fault], count: int) -> None:
        self.faults = tuple(faults)
        self.count = count
        shown = "\n".join(map(str, self.faults))
        more = f"\nand {count - len(self.faults)} more" if count > len(self.faults) else ""
        super().__init__(shown + more)
