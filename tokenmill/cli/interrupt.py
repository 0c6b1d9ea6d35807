"""Ctrl-C in the commands, from the first import to the last.

A command begins with `guard`: as long as there is nothing to be undone, the process ends at once, with the status of a
Ctrl-C and without a traceback, whatever is being imported. `interruptible` makes Ctrl-C a `KeyboardInterrupt` again,
for as long as there is. A process that was started with SIGINT ignored, as shells start what a script puts into the
background, goes on ignoring it; only what installs a handler of its own (the worker, `batch run`) ends in order.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself imports more, for longer than a Ctrl-C takes
import os

TYPE_CHECKING = False  # as typing's
if TYPE_CHECKING:
    from types import FrameType, TracebackType

INTERRUPTED = 130
"""128 + SIGINT, as shells say it."""


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def guard() -> None:
    """End the process at once on Ctrl-C, unless it is ignored or somebody handles it. On the main thread only."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


class interruptible:
    """Raise `KeyboardInterrupt` within the block on Ctrl-C, where `guard` would end the process."""

    def __enter__(self) -> None:
        self._guarded = signal.getsignal(signal.SIGINT) is _leave
        if self._guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._guarded:
            signal.signal(signal.SIGINT, _leave)
