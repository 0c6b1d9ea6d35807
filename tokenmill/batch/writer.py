"""Writes the response lines of a run in groups, and deletes their jobs in Redis once the lines are on the disk."""

from __future__ import annotations

import time

from tokenmill.batch.flight import Flights
from tokenmill.batch.output import Outputs

SYNC_S = 1.0
"""How often the written lines are synced to the disk, and their jobs then deleted in Redis."""
FLUSH_LINES = 256
FLUSH_BYTES = 4 << 20
"""Number of lines, and of bytes, from which on the waiting lines are written."""


class Writer:
    """Appends response lines to the outputs of a run.

    Args:
        flights: deletes the jobs of lines that are on the disk.
    """

    def __init__(self, outputs: Outputs, flights: Flights) -> None:
        self._outputs, self._flights = outputs, flights
        self._good: list[bytes] = []
        self._bad: list[bytes] = []
        self._bytes = 0
        """Bytes of the lines in both."""
        self._unsynced: list[str] = []
        """Ids of jobs whose lines may not be on the disk yet."""
        self._synced = time.monotonic()

    def add(self, line: bytes, ok: bool, job_id: str | None = None) -> bool:
        """Take a line; return whether the waiting lines were written.

        Args:
            ok: whether the request succeeded.
            job_id: the job whose result the line holds; None: the line comes from no result.
        """
        (self._good if ok else self._bad).append(line)
        self._bytes += len(line)
        if job_id is not None:
            self._unsynced.append(job_id)
        if len(self._good) + len(self._bad) < FLUSH_LINES and self._bytes <= FLUSH_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write the waiting lines; sync them to the disk if the last sync is `SYNC_S` ago."""
        self._outputs.append(self._good, self._bad)
        self._good, self._bad, self._bytes = [], [], 0
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        """Write the waiting lines and sync all lines to the disk."""
        self.flush()
        self._sync()

    def _sync(self) -> None:
        self._outputs.sync()
        self._flights.forget(self._unsynced)
        self._unsynced = []
        self._synced = time.monotonic()
