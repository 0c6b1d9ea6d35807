"""The exit statuses of a worker."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit statuses of `tokenmill worker`."""

    OK = 0
    """SIGTERM or SIGINT, or `--burst` and the queue is empty; the worker holds no job any more."""
    ERROR = 1
    """A thread of the worker died; the log says why. Its jobs are handed back if Redis can be reached."""
    USAGE = 2
    """An option or a variable is wrong."""
    LOAD = 3
    """The model could not be loaded."""
    REFUSED = 4
    """The queue has another lease, or Redis refuses the worker's credentials."""
    STALLED = 5
    """One engine step took longer than `--stall-seconds`."""
    BROKEN = 6
    """The engine or the tokenizer fails for a fixed prompt of the worker's own. Its jobs are handed back; no start
    counts."""
