"""Ctrl-C in the commands, from the first import to the last.

A command begins with `guard`: from then on Ctrl-C ends the process at once, with status 130 and without a traceback,
whatever is being imported. While there is work to undo, `interruptible` makes Ctrl-C a `KeyboardInterrupt` again. A
process that was started with SIGINT ignored, as shells start background processes of scripts, still ignores SIGINT;
only commands that install a handler of their own (the worker, `batch run`) shut down gracefully.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports more, during which Ctrl-C is not handled
import os

TYPE_CHECKING = False  # equals `typing.TYPE_CHECKING`, without the import of typing
if TYPE_CHECKING:
    from types import FrameType, TracebackType

INTERRUPTED = 130
"""128 + SIGINT, the exit status that shells use."""


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def guard() -> None:
    """Make Ctrl-C end the process at once, unless SIGINT is ignored or has a handler. On the main thread only."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


class interruptible:
    """Make Ctrl-C raise `KeyboardInterrupt` within the block, instead of ending the process as `guard` does."""

    def __enter__(self) -> None:
        self._guarded = signal.getsignal(signal.SIGINT) is _leave
        if self._guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._guarded:
            signal.signal(signal.SIGINT, _leave)
