"""The table: its lines, the process of each row, and the time boxes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_OURS = ("bench", "engine", "kernels", "tests", "worker", "producer", "tokenmill")
_LAST_START = 0.75
"""Share of its time box after which a row begins no further check."""
_KILL_SECONDS = 5
"""Seconds that a process has to end after it was terminated."""


class Skip(Exception):
    """A check cannot run here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What a row runs on."""

    reduced: bool = False
    """Whether sizes are tiny, kernels interpreted and the GPU pretended (`--cpu`)."""
    device: str = "cuda"
    folder: Path = Path(tempfile.gettempdir())
    """Folder for files of the run, which is deleted at its end."""
    seconds: float = 60.0
    """Time box of the row."""
    small: bool = False
    """Whether a GPU gets the sizes of the reduced form, too."""

    def pick(self, full: Any, reduced: Any) -> Any:
        """Return the first value on a GPU, the second in the reduced form."""
        return reduced if self.reduced or self.small else full


@dataclass(frozen=True)
class Line:
    """One line of the table, of one check or one measurement."""

    what: str
    detail: str
    result: str = "ok"
    """ok, FAILED, skipped, timeout; yes or no for a claim; empty for a measurement."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers of the line, for `--json` and for claims."""


Check = Callable[[Setup], Iterator[Line]]


@dataclass(frozen=True)
class Row:
    """A row of the table: one function, which yields one or several lines."""

    number: str
    name: str
    seconds: float
    """Time box."""
    function: str
    """`module:function` in this package; imported in the row's own process."""
    proves: bool = True
    """Whether the exit status is 1 if the row fails, crashes or does not end in its time box."""
    pretends: bool = True
    """Whether the reduced form runs the whole function on the pretended GPU; else the function enters it."""


def check(what: str, test: Callable[[], str | Line]) -> Line:
    """Run one check of a row, and return its line: FAILED if it raises, skipped if it raises `Skip`."""
    try:
        said = test()
        return said if isinstance(said, Line) else Line(what, said)
    except Skip as reason:
        return Line(what, str(reason), "skipped")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        return Line(what, str(error), "FAILED" if missing in _OURS else "skipped")
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are to run
        traceback.print_exc(limit=-3)
        return Line(what, f"{type(error).__name__}: {error}", "FAILED")


class Table:
    """Runs rows, prints each line as soon as it is known, and keeps the lines for `--json` and the exit status."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        """
        Args:
            setup: what the rows run on; each gets its own time box.
            seconds: time after which no row begins, and the row that runs is ended.
        """
        self.setup, self.seconds = setup, seconds
        self.start = time.monotonic()
        self.lines: list[tuple[Row, float, Line]] = []

    @property
    def left(self) -> float:
        """Seconds until `seconds` have passed since the table was begun."""
        return self.start + self.seconds - time.monotonic()

    def run(self, row: Row) -> None:
        """Run a row in a process of its own, for at most its time box."""
        box = min(row.seconds, self.left)
        if box <= 1:
            self.add(row, 0.0, Line(row.name, "no time is left", "timeout"))
            return
        begun = time.monotonic()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        setup = dataclasses.replace(self.setup, seconds=box)
        process = context.Process(target=_child, args=(row, setup, theirs), daemon=False)
        process.start()
        theirs.close()
        ended = self._receive(row, ours, begun, box)
        _end(process)
        if not ended:
            late = time.monotonic() - begun >= box
            said = f"did not end within {box:.0f} s" if late else f"its process died with status {process.exitcode}"
            self.add(row, time.monotonic() - begun, Line(row.name, said, "timeout" if late else "FAILED"))

    def _receive(self, row: Row, lines: Connection, begun: float, box: float) -> bool:
        """Print the lines of a row as they come; return whether the row ended."""
        last = begun
        while lines.poll(max(0.0, begun + box - time.monotonic())):
            try:
                line = lines.recv()
            except EOFError:
                return False
            if line is None:
                return True
            now = time.monotonic()
            self.add(row, now - last, line)
            last = now
        return False

    def add(self, row: Row, seconds: float, line: Line) -> None:
        """Print a line and keep it."""
        self.lines.append((row, seconds, line))
        detail = " ".join(line.detail.split())[:200]
        print(f"{row.number:>3} {line.what:<44}{line.result:<8}{seconds:>6.1f} s  {detail}", flush=True)

    @property
    def failed(self) -> list[str]:
        """The checks that failed or did not end, of the rows that prove something; in the reduced form of all rows."""
        lines = [line for row, _, line in self.lines if row.proves or self.setup.reduced]
        return [line.what for line in lines if line.result in ("FAILED", "timeout")]

    def values(self, number: str) -> dict[str, float]:
        """Return all numbers of a row."""
        return {key: x for row, _, line in self.lines if row.number == number for key, x in line.values.items()}

    def write(self, path: Path, about: dict[str, Any]) -> None:
        """Write the table as JSON."""
        rows = [
            {"row": row.number, "seconds": round(seconds, 2), **dataclasses.asdict(line)}
            for row, seconds, line in self.lines
        ]
        path.write_text(json.dumps({**about, "lines": rows}, indent=1) + "\n")


def _child(row: Row, setup: Setup, lines: Connection) -> None:
    """Run a row in its own process, and send its lines; None at the end."""
    begun = time.monotonic()
    if setup.reduced and row.number != "1":  # row 1 compiles, ahead of time
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        module, _, name = row.function.partition(":")
        function: Check = getattr(importlib.import_module(f"bench.gpu_check.{module}"), name)
        with machine(setup) if row.pretends else nullcontext():
            for line in function(setup):
                lines.send(line)
                if time.monotonic() - begun > _LAST_START * setup.seconds:
                    lines.send(Line(row.name, "its time is nearly up: what would follow is left out", "skipped"))
                    break
    except Exception as error:  # noqa: BLE001 - a line of the table, not the end of the run
        lines.send(check(row.name, partial(_again, error)))
    lines.send(None)
    lines.close()


def _again(error: Exception) -> str:
    raise error


def machine(setup: Setup) -> AbstractContextManager[Any]:
    """Return a context in which there is a GPU: the real one, or in the reduced form a pretended one."""
    if not setup.reduced:
        return nullcontext()
    from tests.pretend_gpu import pretend_gpu

    pretended: AbstractContextManager[Any] = pretend_gpu()
    return pretended


def _end(process: Any) -> None:
    """End a process that has no more to say."""
    process.join(_KILL_SECONDS if process.exitcode is None else 0)
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(_KILL_SECONDS)
