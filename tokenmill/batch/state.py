"""The note beside an output, `<output>.state`: which input it belongs to, and what the ids of its jobs are made of."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tokenmill.batch.report import BatchError


@dataclass(frozen=True, slots=True)
class State:
    """What `<output>.state` holds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    digest: str
    """SHA-256 of the input's content."""
    salt: str
    errors: str | None
    """The error file, seen from the output's folder."""
    generation: int = 1
    """Goes up when what is in flight was cancelled, so that it gets new ids."""
    format: int = 1
    root: str | None = None
    """What every key of the queue starts with to which this generation was submitted; None: it was not."""

    @property
    def group(self) -> str:
        """The group of this run's jobs."""
        return f"batch-{self.salt}-{self.generation}"

    def job_id(self, number: int) -> str:
        """The id of a line's job: 128 bits that nobody can guess, the same at every run."""
        key = f"{self.salt}-{self.generation}-{number}".encode()
        return hashlib.blake2b(key, digest_size=16).hexdigest()


_STATE = TypeAdapter(State)


def note_of(output: Path) -> Path:
    """Where the state of an output is kept."""
    return output.parent / (output.name + ".state")


def load(note: Path) -> State | None:
    """The state in `note`; None where there is no such file.

    Raises:
        BatchError: the file cannot be read, or is something else.
    """
    try:
        state = _STATE.validate_json(note.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BatchError(f"{note}: not readable: {error.strerror or error}") from None
    except ValidationError:
        raise BatchError(
            f"{note}: not readable as the state of a batch run: remove it or name another output"
        ) from None
    if state.format != 1:
        raise BatchError(f"{note}: written by another version")
    return state


def save(note: Path, state: State) -> None:
    """Replace `note`: all of it or nothing, and on the disk when this returns.

    Raises:
        BatchError: it cannot be written; what was there stays.
    """
    # A name that nothing else has: under any fixed one there could be somebody's file.
    fresh = note.with_name(f"{note.name}.{secrets.token_hex(8)}")
    try:
        try:
            with fresh.open("xb") as file:
                file.write(orjson.dumps(asdict(state), option=orjson.OPT_APPEND_NEWLINE))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(note)
        finally:
            fresh.unlink(missing_ok=True)
        folder = os.open(note.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BatchError(f"{note}: {error.strerror or error}") from None
