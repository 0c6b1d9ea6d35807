"""The file `<output>.state`: binds an output to its input, and holds the random part of the ids of its jobs."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tokenmill.batch.report import BatchError
from tokenmill.durable import replace_file


@dataclass(frozen=True, slots=True)
class State:
    """The content of `<output>.state`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    digest: str
    """SHA-256 of the input's content."""
    salt: str
    errors: str | None
    """Path of the error file, relative to the output's folder; None: failed requests go to the output."""
    generation: int = 1
    """Increases when the requests in flight are cancelled, so that the next run submits them under new ids."""
    format: int = 1
    root: str | None = None
    """`Keys.root` of the queue to which this generation was submitted; None: it has not been submitted."""

    @property
    def group(self) -> str:
        """Name of the group of this run's jobs."""
        return f"batch-{self.salt}-{self.generation}"

    def job_id(self, number: int) -> str:
        """Return the id of a line's job: 128 bits that cannot be guessed, the same in every run."""
        key = f"{self.salt}-{self.generation}-{number}".encode()
        return hashlib.blake2b(key, digest_size=16).hexdigest()


_STATE = TypeAdapter(State)


def note_of(output: Path) -> Path:
    """Return the path of an output's state file."""
    return output.parent / (output.name + ".state")


def load(note: Path) -> State | None:
    """Read a state file; return None if there is no such file.

    Raises:
        BatchError: the file cannot be read, or is not a state file.
    """
    try:
        state = _STATE.validate_json(note.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BatchError(f"{note}: not readable: {error.strerror or error}") from None
    except ValidationError:
        raise BatchError(f"{note}: is not the state of a batch run: remove the file or name another output") from None
    if state.format != 1:
        raise BatchError(f"{note}: was written by another version of tokenmill; continue with that version")
    return state


def save(note: Path, state: State) -> None:
    """Replace a state file atomically; it is on the disk when this returns.

    Raises:
        BatchError: the file cannot be written; the old file stays.
    """
    try:
        replace_file(note, orjson.dumps(asdict(state), option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise BatchError(f"{note}: {error.strerror or error}") from None
