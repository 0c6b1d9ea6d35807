"""The lines of an input file, in bounded memory: a temporary SQLite database that grows on disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TABLE = """
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA cache_size = -16384;
    CREATE TABLE lines (
        number INTEGER PRIMARY KEY, offset INTEGER, length INTEGER, prefix INTEGER, custom_id TEXT, done INTEGER
    );
"""
_REPEATED = """
    SELECT again.number, first.number FROM lines AS again
    JOIN (SELECT custom_id, MIN(number) AS number FROM lines GROUP BY custom_id HAVING COUNT(*) > 1) AS first
    USING (custom_id) WHERE again.number > first.number ORDER BY again.number
"""
_PLAN = """
    SELECT number, offset, length, custom_id FROM (
        SELECT *, CASE prefix WHEN 0 THEN number ELSE MIN(number) OVER (PARTITION BY prefix) END AS leader FROM lines
    ) WHERE done = 0 ORDER BY leader, number
"""


class Line(NamedTuple):
    """The place of a request in the input."""

    number: int
    offset: int
    length: int
    custom_id: str


class Index:
    """The lines of one input. Call `close` at the end; its file has no name and disappears with the process."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(_TABLE)
        self.total = 0

    def add(self, rows: Iterable[tuple[int, int, int, int, str]]) -> None:
        """Add rows (number, offset, length, prefix, custom id). Lines with the same prefix, except 0, stay together."""
        self._db.execute("BEGIN")
        self.total += self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, 0)", rows).rowcount
        self._db.execute("COMMIT")

    def seal(self) -> None:
        """End adding lines: from now on `repeated`, `take` and `plan` may be called."""
        self._db.execute("CREATE INDEX by_custom_id ON lines (custom_id)")
        self._db.execute("BEGIN")  # never committed: the file has no other reader, and a commit for each `take` is slow

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Yield each line whose custom id an earlier line has, as pairs (line, first such line), in order."""
        yield from self._db.execute(_REPEATED)

    def take(self, custom_id: str) -> bool:
        """Note that a request has its line in an output; return False for an unknown request or a second line."""
        update = "UPDATE lines SET done = 1 WHERE custom_id = ? AND done = 0"
        return self._db.execute(update, (custom_id,)).rowcount == 1

    def plan(self) -> Iterator[Line]:
        """Yield the lines that have no line in an output yet.

        Lines with the same prefix come together, at the place of the first of them in the file, whether that is done or
        not: so the order is the same in every run.
        """
        yield from map(Line._make, self._db.execute(_PLAN))

    def close(self) -> None:
        """Delete the database."""
        self._db.close()
