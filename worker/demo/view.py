"""The output of `tokenmill demo`: a live table on a terminal, plain lines elsewhere, and the final table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmill.protocol.result import Result

STYLES = {
    "queued": "dim",
    "running": "cyan",
    "succeeded": "green",
    "cancelled": "yellow",
    "failed": "red",
    "expired": "red",
    "lost": "red",
}


@dataclass
class Row:
    """One request of the demo. Written only by the thread that reads its stream."""

    name: str
    question: str
    states: list[str] = field(default_factory=lambda: ["queued"])
    """All states so far; appended after the other fields are set, so that a state is never seen without them."""
    text: str = ""
    tokens: int = 0
    """Output tokens, from the result."""
    first_token_ms: float | None = None
    """Time from the submit to the first token, measured by the worker."""
    error: str | None = None
    started_at: float | None = None
    """`time.monotonic()` when a worker started the job."""
    ended_at: float = 0.0

    def restart(self) -> None:
        """Note that a worker starts the text, perhaps not for the first time."""
        self.text = ""
        self.started_at = self.started_at or time.monotonic()
        self.states.append("running")

    def end(self, state: str, result: Result) -> None:
        """Note the job's result."""
        self.tokens = result.usage.completion_tokens or 0
        self.first_token_ms = result.timings.first_token_ms
        self.text = result.text or self.text
        self.error = result.error.message if result.error else None
        self.ended_at = time.monotonic()
        self.states.append(state)

    def lose(self, error: str) -> None:
        """Note that the job's stream can no longer be read, because of `error`."""
        self.error, self.ended_at = error, time.monotonic()
        self.states.append("lost")

    @property
    def state(self) -> str:
        return self.states[-1]

    @property
    def ended(self) -> bool:
        return self.state not in ("queued", "running")

    def tail(self, width: int) -> str:
        """Return the end of the text as one line of at most `width` characters."""
        line = " ".join(self.text.split())
        return line if len(line) <= width else "…" + line[1 - width :]


class View:
    """Shows the rows while they change."""

    def __init__(self, console: Console, rows: list[Row]) -> None:
        self._console = console
        self._rows = rows
        self._printed = dict.fromkeys((row.name for row in rows), 0)
        """Row → number of its states that were printed as lines."""
        self._start = time.monotonic()
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show a live table for the length of the block on a terminal; elsewhere `refresh` prints changes as lines."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, auto_refresh=False) as self._live:
            yield

    def refresh(self) -> None:
        """Show the rows as they are now."""
        if self._live is not None:
            self._live.refresh()
            return
        seconds = time.monotonic() - self._start
        for row in self._rows:
            for state in row.states[self._printed[row.name] :]:
                self._printed[row.name] += 1
                text = "" if state in ("queued", "running") else f": {row.tail(90)}"
                line = f"{seconds:6.1f}s  {row.name:<10} {state}{text}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(expand=True, box=None, pad_edge=False)
        table.add_column("request", no_wrap=True)
        table.add_column("state", no_wrap=True, width=9)
        table.add_column("text", no_wrap=True, ratio=1)
        width = max(20, self._console.width - 26)
        for row in self._rows:
            table.add_row(row.name, _state(row), Text(row.tail(width) or row.question, "" if row.text else "dim"))
        return table


def summary(rows: list[Row]) -> Table:
    """Return the final table: status, tokens and time to the first token of each request."""
    table = Table(box=None, pad_edge=False)
    table.add_column("request", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("first token", justify="right", no_wrap=True)
    for row in rows:
        first = "-" if row.first_token_ms is None else f"{row.first_token_ms:.0f} ms"
        table.add_row(row.name, _state(row), str(row.tokens), first)
    return table


def _state(row: Row) -> Text:
    return Text(row.state, STYLES.get(row.state, ""))
