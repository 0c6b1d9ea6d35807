"""The output files and the note beside them that binds them to one input.

A line is appended whole, and only what is complete counts: what a crash left of a torn last line is cut off when the
file is opened again. So the outputs themselves say what is done. `<output>.state` says for which input, and holds the
random part of the jobs' ids, which makes a line that is submitted again meet its own job.

A lock on each file, which ends with its process, keeps two runs apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from producer.batch.index import Index
from producer.batch.report import BatchError

_BLOCK = 1 << 16
_ESCAPES = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Inside of JSON strings; readers that split lines at any of Unicode's separators shall find one object a line."""


@dataclass(frozen=True, slots=True)
class State:
    """What `<output>.state` holds."""

    digest: str
    """SHA-256 of the input's content."""
    salt: str
    errors: str | None
    """The error file, seen from the output's folder."""
    generation: int = 1
    """Goes up when what is in flight was cancelled, so that it gets new ids."""
    format: int = 1

    @property
    def group(self) -> str:
        """The group of this run's jobs."""
        return f"batch-{self.salt}-{self.generation}"

    def job_id(self, number: int) -> str:
        """The id of a line's job: 128 bits that nobody can guess, the same at every run."""
        key = f"{self.salt}-{self.generation}-{number}".encode()
        return hashlib.blake2b(key, digest_size=16).hexdigest()


class OutputFile:
    """A file of response lines, locked and without a torn last line.

    Raises:
        BatchError: it cannot be opened, is no regular file, or another run has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by its owner
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror or error}") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise BatchError(f"{path}: is no regular file; what is done is read back from the output")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._cut_torn()
        except BlockingIOError:
            self._file.close()
            raise BatchError(f"{path}: another run writes to it") from None
        except OSError as error:
            self._file.close()
            raise BatchError(f"{path}: {error.strerror or error}") from None

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _cut_torn(self) -> None:
        end = self.size
        while end > 0:
            start = max(0, end - _BLOCK)
            newline = os.pread(self._file.fileno(), end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < self.size:
            self._file.truncate(end)

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it holds.

        Raises:
            BatchError: a line is none of ours.
        """
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                try:
                    line = orjson.loads(data)
                    line["custom_id"], (line["response"] or {}).get("status_code")
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                    raise BatchError(f"{self.path}: line {number} is no line of a batch's output") from None
                yield line

    def append(self, lines: list[bytes]) -> None:
        """Add whole lines, each ending with LF.

        Raises:
            BatchError: they could not be written; a later run cuts off what is there of the last one.
        """
        data = b"".join(lines)
        for plain, escape in _ESCAPES:
            data = data.replace(plain, escape)
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None

    def sync(self) -> None:
        """Returns when what was added is on the disk."""
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise BatchError(f"{self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        self._file.close()


class Outputs:
    """Both outputs of a run; where no error file is named, errors go to the output too.

    Args:
        digest: of the input.

    Raises:
        BatchError: they cannot be opened, are another run's, or belong to another input.
    """

    def __init__(self, output: Path, errors: Path | None, digest: str) -> None:
        self._note = output.parent / (output.name + ".state")
        if errors is not None and _same(errors, self._note):
            raise BatchError(f"{errors}: is where the state of {output} is kept; name another error file")
        with contextlib.ExitStack() as opened:
            self._output = OutputFile(output)
            opened.callback(self._output.close)
            self._errors = self._output
            if errors is not None and not _same(errors, output):
                self._errors = OutputFile(errors)
                opened.callback(self._errors.close)
            self._files = list(dict.fromkeys((self._output, self._errors)))
            own = None if self._errors is self._output or errors is None else os.path.relpath(errors, output.parent)
            self.state = self._claim(digest, own)
            self._opened = opened.pop_all()
        self.succeeded = self.failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def _claim(self, digest: str, errors: str | None) -> State:
        held = any(file.size for file in self._files)
        state = self._read()
        if state is not None and state.digest == digest and (state.errors == errors or not held):
            if state.errors != errors:
                self._save(state := replace(state, errors=errors))
            return state
        output = self._output.path
        if held and state is None:
            names = " and ".join(str(file.path) for file in self._files if file.size)
            raise BatchError(f"{names} exists and is no output of a batch run: remove it or name another")
        if held and state is not None and state.digest != digest:
            raise BatchError(
                f"{output} belongs to another input, or this one was changed: name another output, or remove "
                f"it with its error file and {self._note.name} to start anew"
            )
        if held and state is not None:
            raise BatchError(f"{output} was begun with the error file {state.errors}, not {errors}: name the same one")
        self._save(state := State(digest, secrets.token_hex(16), errors))
        return state

    def _read(self) -> State | None:
        try:
            state = State(**orjson.loads(self._note.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError, TypeError) as error:
            raise BatchError(f"{self._note}: not readable: {error}") from None
        if state.format != 1:
            raise BatchError(f"{self._note}: written by another version")
        return state

    def _save(self, state: State) -> None:
        """All of it or nothing, and on the disk before any job is submitted under its ids."""
        fresh = self._note.with_name(self._note.name + ".new")
        try:
            with fresh.open("wb") as file:
                file.write(orjson.dumps(asdict(state), option=orjson.OPT_APPEND_NEWLINE))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._note)
            folder = os.open(self._note.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise BatchError(f"{self._note}: {error.strerror or error}") from None

    def recover(self, index: Index) -> None:
        """Count what is there and take it out of the plan."""
        for file in self._files:
            for line in file.lines():
                if not index.take(str(line["custom_id"])):
                    raise BatchError(f"{file.path}: custom_id {line['custom_id']!r} is twice there or not in the input")
                ok = (line["response"] or {}).get("status_code") == 200
                self.succeeded += ok
                self.failed += not ok

    def append(self, good: list[bytes], bad: list[bytes]) -> None:
        """Add lines of requests that succeeded and of those that failed."""
        if good:
            self._output.append(good)
            self.succeeded += len(good)
        if bad:
            self._errors.append(bad)
            self.failed += len(bad)

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def next_generation(self) -> None:
        """From now on lines are submitted under new ids."""
        self._save(replace(self.state, generation=self.state.generation + 1))
        self.state = replace(self.state, generation=self.state.generation + 1)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()
