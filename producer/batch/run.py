"""The run of a batch file."""

from __future__ import annotations

import threading
from pathlib import Path

from producer.batch.report import BatchReport, OnProgress
from producer.client import Client

WINDOW = 512


def run(
    input_path: str | Path,
    output_path: str | Path,
    errors_path: str | Path | None = None,
    *,
    client: Client,
    window: int = WINDOW,
    priority: str = "normal",
    progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> BatchReport:
    """Run every request of a file that has no line in the outputs yet, and return when each has one.

    Args:
        errors_path: where lines of failed requests go; None: into the output, too.
        window: requests in flight at most.
        progress: called after every write, on this thread.
        stop: set it to make the run end soon: nothing more is submitted, what is in flight goes on in the queue, and
            the next run over the same files takes its results. The report is then not `complete`.

    Raises:
        BatchInvalid: the input is not a batch file; nothing was submitted.
        BatchError: the outputs belong to another input or another run holds them; a file cannot be read or written.
        redis.RedisError: Redis stayed away. Run again to go on.
    """
    raise NotImplementedError


def cancel(
    input_path: str | Path, output_path: str | Path, errors_path: str | Path | None = None, *, client: Client
) -> int:
    """Cancel what a run that has ended, or was killed, left in flight; returns how many requests that were.

    They have no line in the outputs; a later run over the same files submits them anew.

    Raises:
        BatchError: as `run`; in particular while the run still goes on.
    """
    raise NotImplementedError
