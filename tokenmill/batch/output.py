"""The output files of a run, and the state file beside them that binds them to one input.

The outputs are the only record of what is done. Lines are appended whole, and only whole lines count: an incomplete
last line, left by a crash, is cut off when the run continues. `<output>.state` names the input, and holds the random
part of the ids of the jobs: so a line that is submitted again gets the id of its earlier job.

A lock on each file, which ends with its process, keeps two runs apart. No file is created, cut or written before all
files have been checked to belong to this run:

    check_paths(input, output, errors)
    with Outputs(output, errors, digest) as outputs:   # opens and locks the files that exist
        outputs.recover(index)                         # checks that every line belongs to this run
        outputs.begin(keys.root)                       # the first change to any file
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from tokenmill.batch.index import Index
from tokenmill.batch.report import BatchError
from tokenmill.batch.response import LINE_START
from tokenmill.batch.state import State, load, note_of, save

_BLOCK = 1 << 16
_ESCAPES = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Escapes of Unicode's line separators in JSON strings, for readers that split lines at any of these."""


def check_paths(source: Path, output: Path, errors: Path | None) -> None:
    """Check the paths of a run's files before any file is opened.

    Raises:
        BatchError: two paths lead to one file, or an output cannot be a regular file.
    """
    note = note_of(output)
    outputs = [output] if errors is None else [output, errors]
    for path in outputs:
        if path.suffix == ".gz":
            raise BatchError(f"{path}: outputs are not compressed; name a file without .gz")
        if _same(path, source):
            raise BatchError(f"{path}: is the input; name another output")
        _check_kind(path)
        if _same(path, note):
            raise BatchError(f"{path}: is where the state of {output} is kept; name another file")
    if _same(source, note):
        raise BatchError(f"{source}: the input is where the state of {output} is kept; name another output")


def _check_kind(path: Path) -> None:
    try:
        found: os.stat_result | None = path.stat()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror or error}") from None
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise BatchError(f"{path}: is not a regular file; a run reads from its outputs which requests are done")
    folder = path.parent.resolve()
    if not folder.is_dir():
        raise BatchError(f"{path}: No such file or directory: {path.parent} is not a folder")
    # /dev/stdout may lead to a regular file, but the state file cannot be kept beside it.
    if folder == Path("/dev") or folder.is_relative_to("/proc"):
        raise BatchError(f"{path}: is not the name of a regular file; name the file itself")


class OutputFile:
    """A locked file of response lines. Opening it changes nothing; `begin` creates a file that is missing.

    Raises:
        BatchError: the file cannot be opened, or another run has locked it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        if path.exists():
            self._open(os.O_RDWR)

    def _open(self, flags: int) -> None:
        try:
            descriptor = os.open(os.path.realpath(self.path), flags | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(descriptor, "a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileExistsError):
            self.close()
            raise BatchError(f"{self.path}: another run writes to it") from None
        except OSError as error:
            self.close()
            raise BatchError(f"{self.path}: {error.strerror or error}") from None

    @property
    def _opened(self) -> IO[bytes]:
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open")
        return self._file

    @property
    def is_there(self) -> bool:
        """Whether the file exists."""
        return self._file is not None

    @property
    def size(self) -> int:
        """Size in bytes; 0 for a file that is missing."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def begin(self) -> bool:
        """Create a missing file, or cut off an incomplete last line; return whether the file was created.

        Raises:
            BatchError: the file cannot be created or cut, or another run has just created it.
        """
        if self._file is None:
            self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            return True
        try:
            if (end := self._whole()) < self.size:
                self._file.truncate(end)
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None
        return False

    def _whole(self) -> int:
        """Return the position behind the last whole line."""
        end = self.size
        while end > 0:
            start = max(0, end - _BLOCK)
            newline = os.pread(self._opened.fileno(), end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def check_torn(self) -> None:
        """Check that the bytes behind the last whole line may be cut off: they must begin a response line.

        A power cut may have left zeros there.

        Raises:
            BatchError: these bytes do not begin a response line.
        """
        if self._file is None:
            return
        torn = os.pread(self._file.fileno(), len(LINE_START), self._whole()).rstrip(b"\0")
        if not LINE_START.startswith(torn):
            raise BatchError(
                f"{self.path}: its last line is no line of a batch's output; remove the file or name another file"
            )

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines as objects.

        Raises:
            BatchError: a line is not a response line.
        """
        if self._file is None:
            return
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    return
                try:
                    line = orjson.loads(data)
                    line["custom_id"], (line["response"] or {}).get("status_code")
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                    raise BatchError(
                        f"{self.path}: line {number} is no line of a batch's output; remove the file or name another"
                    ) from None
                yield line

    def append(self, lines: list[bytes]) -> None:
        """Append whole lines, each ending with LF.

        Raises:
            BatchError: the lines could not be written; a later run cuts off an incomplete last line.
        """
        data = b"".join(lines)
        for plain, escape in _ESCAPES:
            data = data.replace(plain, escape)
        left = memoryview(data)
        try:
            while left:
                left = left[self._opened.write(left) or 0 :]
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None

    def sync(self) -> None:
        """Sync all lines to the disk."""
        try:
            os.fdatasync(self._opened.fileno())
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Outputs:
    """The output and the error file of a run. Without an error file, lines of failed requests go to the output.

    Args:
        digest: SHA-256 of the input.

    Raises:
        BatchError: a file cannot be opened, is locked by another run, or belongs to another input. Nothing was changed.
    """

    def __init__(self, output: Path, errors: Path | None, digest: str) -> None:
        self._note = note_of(output)
        with contextlib.ExitStack() as opened:
            self._output = OutputFile(output)
            opened.callback(self._output.close)
            self._errors = self._output
            if errors is not None and not _same(errors, output):
                self._errors = OutputFile(errors)
                opened.callback(self._errors.close)
            self._files = list(dict.fromkeys((self._output, self._errors)))
            own = None if self._errors is self._output or errors is None else os.path.relpath(errors, output.parent)
            self._saved = load(self._note)
            self.state = self._claim(digest, own)
            self._opened = opened.pop_all()
        self.succeeded = self.failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def _claim(self, digest: str, errors: str | None) -> State:
        """Return the state of these files, if they belong to this input, or are empty and no run has submitted.

        Raises:
            BatchError: the files belong to another input, or to no run.
        """
        state = self._saved
        output = self._output.path
        if not any(file.size for file in self._files):
            if state is not None and state.digest == digest:
                return replace(state, errors=errors)
            if state is None or state.root is None or not self._output.is_there:
                return State(digest, secrets.token_hex(16), errors)
            # Requests of another input may be in flight, and only this state knows their ids.
        if state is None:
            names = " and ".join(str(file.path) for file in self._files if file.size)
            raise BatchError(f"{names} exists and is no output of a batch run: remove it or name another file")
        if state.digest != digest:
            raise BatchError(
                f"{output} belongs to another input, or the input was changed: name another output, or remove the "
                f"output, its error file and {self._note.name} to start again (`tokenmill batch cancel` with the other "
                "input cancels its requests in flight)"
            )
        if state.errors != errors:
            raise BatchError(
                f"{output} was begun with the error file {state.errors}, not {errors}: name the same error file"
            )
        return state

    def recover(self, index: Index) -> None:
        """Count the lines of the outputs, and mark their requests in the index as done. Changes no file.

        Raises:
            BatchError: a line does not belong to this run.
        """
        for file in self._files:
            for line in file.lines():
                if not index.take(str(line["custom_id"])):
                    raise BatchError(
                        f"{file.path}: custom_id {line['custom_id']!r} is there twice or not in the input: name the "
                        "output of this input"
                    )
                ok = (line["response"] or {}).get("status_code") == 200
                self.succeeded += ok
                self.failed += not ok
            file.check_torn()

    def begin(self, root: str | None) -> None:
        """Prepare the files for appending: the first change to any file.

        Args:
            root: `Keys.root` of the queue; None: no request has been submitted, and none will be.

        Raises:
            BatchError: a file cannot be created or written; files that were created here have been removed again.
        """
        made: list[OutputFile] = []
        try:
            for file in self._files:
                if file.begin():
                    made.append(file)
            self._save(replace(self.state, root=root))
        except BaseException:
            for file in made:
                os.unlink(os.path.realpath(file.path))
            raise

    def require_begun(self, root: str) -> None:
        """Check that a run over these files has submitted to the queue whose keys start with `root`.

        Raises:
            BatchError: no run has submitted to that queue; nothing was changed.
        """
        output = self._output.path
        if self._saved is None:
            raise BatchError(
                f"{output}: no batch run has begun here ({self._note.name} is missing); name the output of the run"
            )
        if self._saved.digest != self.state.digest:
            raise BatchError(f"{output} belongs to another input, or the input was changed; name the input of the run")
        if self._saved.errors != self.state.errors:
            raise BatchError(
                f"{output} was begun with the error file {self._saved.errors}, not {self.state.errors}: "
                "name the same error file"
            )
        if self._saved.root not in (None, root):
            raise BatchError(
                f"{output}: its requests went to the queue with the keys {self._saved.root}…, not {root}…: "
                "name the same --queue and --prefix"
            )

    def _save(self, state: State) -> None:
        self.state = state
        if state != self._saved:
            save(self._note, state)
            self._saved = state

    def append(self, good: list[bytes], bad: list[bytes]) -> None:
        """Append the lines of requests that succeeded (`good`) and that failed (`bad`)."""
        if good:
            self._output.append(good)
            self.succeeded += len(good)
        if bad:
            self._errors.append(bad)
            self.failed += len(bad)

    def sync(self) -> None:
        """Sync all lines of both files to the disk."""
        for file in self._files:
            file.sync()

    def next_generation(self) -> None:
        """Make later runs submit the remaining lines under new ids, none of which has been submitted yet."""
        self._save(replace(self.state, generation=self.state.generation + 1, root=None))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
