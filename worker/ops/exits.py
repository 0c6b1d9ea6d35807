"""Why a worker ended, as its process says it."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit statuses of `tokenmill worker`."""

    OK = 0
    """Asked to stop (SIGTERM, SIGINT), or `--burst` and the queue is empty; nothing is held any more."""
    ERROR = 1
    """A thread of the worker died; the log says why. What it held is handed back where Redis can be reached."""
    USAGE = 2
    """An option or a variable is wrong."""
    LOAD = 3
    """The model could not be loaded."""
    REFUSED = 4
    """The queue does not fit: another lease is configured there, or Redis refuses our credentials."""
    STALLED = 5
    """One engine step took longer than `--stall-seconds`."""
    BROKEN = 6
    """The engine or the tokenizer fails for a fixed prompt of the worker's own. What it held is handed back; no start
    counts."""
