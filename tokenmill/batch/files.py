"""The files of a run, opened and checked together."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.batch.index import Index
from tokenmill.batch.output import Outputs, check_paths
from tokenmill.batch.report import BatchError, BatchReport
from tokenmill.batch.source import Source
from tokenmill.batch.validate import Validator

PathLike = str | Path


@dataclass(frozen=True)
class Files:
    """The opened files of a run, with the index of the input's lines."""

    source: Source
    index: Index
    outputs: Outputs
    url: str
    """The URL that all lines of the input have."""

    @property
    def report(self) -> BatchReport:
        """The state of the files: how many requests have their line."""
        return BatchReport(self.index.total, self.outputs.succeeded, self.outputs.failed)


@contextmanager
def opened(
    input_path: PathLike,
    output_path: PathLike,
    errors_path: PathLike | None,
    stop: threading.Event,
    url: str | None = None,
) -> Iterator[Files]:
    """Open and check all files, and mark the requests that are done; changes no file.

    Args:
        url: the URL that all lines must have; None: any URL, the same in all lines.
    """
    source_path, output = Path(input_path), Path(output_path)
    errors = None if errors_path is None else Path(errors_path)
    check_paths(source_path, output, errors)
    try:
        with ExitStack() as stack:
            source = stack.enter_context(Source(source_path, output.parent))
            validator = Validator(source, stop, url)
            index = validator.index()
            stack.callback(index.close)
            outputs = stack.enter_context(Outputs(output, errors, source.digest))
            outputs.recover(index)
            yield Files(source, index, outputs, validator.url)
    except sqlite3.Error as error:
        raise BatchError(f"the temporary index: {error}; TMPDIR names the folder for it") from None
