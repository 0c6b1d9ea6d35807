"""The input file: read once from beginning to end, then line by line at any position.

    with Source(path, spool_dir) as source:
        for line in source.lines(): …           # Raw(number, offset, data); data None: too long
        source.digest                           # of the whole content, once `lines` has ended
        source.read(offset, length)

Only LF ends a line: JSON strings may hold U+2028 and similar characters. A byte-order mark and a CR before LF do not
belong to a line. An input without random access (gzip, a pipe) is first copied to a temporary file.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from tokenmill.batch.report import BatchError, BatchInvalid, Fault

MAX_LINE_BYTES = 32 << 20
"""A longer line is a fault of the file. The worker has its own, usually lower, limit (`--max-body-bytes`)."""
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_BLOCK = 1 << 20


class Raw(NamedTuple):
    """A line that is not blank."""

    number: int
    """Counted from 1, blank lines included."""
    offset: int
    """Bytes from the beginning of the content."""
    data: bytes | None
    """None for a line longer than `MAX_LINE_BYTES`."""


class Source:
    """An input file, plain or gzip.

    Args:
        spool_dir: folder for the copy of an input without random access.

    Raises:
        BatchError: the input cannot be opened or copied.
        BatchInvalid: the input is broken gzip.
    """

    def __init__(self, path: Path, spool_dir: Path) -> None:
        self.path = path
        self.digest = ""
        """SHA-256 of the content in hex, once `lines` has ended."""
        try:
            self._file = _open(path, spool_dir)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BatchInvalid([Fault(None, "invalid_file", f"{path}: broken gzip: {error}")], 1) from None
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def lines(self) -> Iterator[Raw]:
        """Yield all lines that are not blank."""
        digest = hashlib.sha256()
        offset, number = 0, 0
        self._file.seek(0)
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            digest.update(data)
            start, number = offset, number + 1
            offset += len(data)
            if len(data) > MAX_LINE_BYTES:
                while not data.endswith(b"\n") and (data := self._file.readline(_BLOCK)):
                    digest.update(data)
                    offset += len(data)
                yield Raw(number, start, None)
                continue
            if number == 1 and data.startswith(_BOM):
                data, start = data[len(_BOM) :], start + len(_BOM)
            if not data.isspace() and data:
                yield Raw(number, start, data)
        self.digest = digest.hexdigest()

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes that are there now; fewer than `length` at the end of the file.

        Raises:
            BatchError: the file can no longer be read.
        """
        try:
            return os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None


def _open(path: Path, spool_dir: Path) -> IO[bytes]:
    file = path.open("rb")
    try:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        zipped = file.peek(2)[:2] == _GZIP
        if regular and not zipped:
            return file
        spool = tempfile.TemporaryFile(dir=spool_dir)  # noqa: SIM115 - its reader closes it
        try:
            if zipped:
                with gzip.open(file) as plain:
                    shutil.copyfileobj(plain, spool, _BLOCK)
            else:
                shutil.copyfileobj(file, spool, _BLOCK)
        except BaseException:
            spool.close()
            raise
    except BaseException:
        file.close()
        raise
    file.close()
    return spool
