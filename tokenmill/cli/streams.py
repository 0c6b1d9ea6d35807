"""The standard streams of the commands: closed pipes, full disks, terminals that lack some characters."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

from tokenmill.cli.console import Exit

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a standard output that is a file."""


def drop_output() -> None:
    """Discard the buffered output of a stream whose reader has ended, as `head` does."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(BrokenPipeError):
            stream.flush()
            continue
        _to_nowhere(stream)


def _to_nowhere(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def written() -> Iterator[None]:
    """Flush standard output at the end of the block, and turn an output that cannot be written into an exit status.

    Within the block a character that the terminal's encoding lacks is written as an escape such as `\\u2026`.

    Raises:
        SystemExit: standard output has no reader any more (130), or its disk is full (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None: the process was started with a closed standard output
                sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(Exit.INTERRUPTED)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(f"cannot write the output: {error.strerror}", file=sys.stderr)
        _to_nowhere(sys.stdout)
        sys.exit(Exit.USAGE)
