"""The interface to the place where files and batches are kept; `producer.files.folder` is its implementation.

Gateways and clerks share one storage. It holds, for each tenant, a bucket of files and a bucket of batches. An object
in a bucket has an id, a record (JSON), a content (bytes that never change), and, for batches, notes and a workspace.

All methods block: call them in a thread. They raise `OSError` if the storage fails.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final, Protocol

Json = dict[str, Any]

FILE: Final = "file-"
BATCH: Final = "batch_"
"""How ids begin."""
_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


def new_id(prefix: str, now: float | None = None) -> str:
    """Return a new id: the prefix, 12 hex digits of the time in ms, so that ids sort by time, and 20 random ones."""
    moment = time.time() if now is None else now
    return f"{prefix}{int(moment * 1000):012x}{secrets.token_hex(10)}"


def is_id(text: str, prefix: str) -> bool:
    """Return whether `text` has the form of an id with this prefix. Only such ids may become names of folders."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


class Draft(Protocol):
    """A new object whose content is being written. Leaving its `with` block without `commit` deletes it."""

    @property
    def file(self) -> IO[bytes]:
        """Takes the content."""

    def commit(self, object_id: str, record: Json) -> None:
        """Put the object in the bucket, whole, and on the disk."""

    def __enter__(self) -> Draft: ...

    def __exit__(self, *error: object) -> None: ...


class Bucket(Protocol):
    """The files, or the batches, of one tenant. An unknown id raises `KeyError`, where nothing else is said."""

    def ids(self) -> list[str]:
        """Return all ids, oldest first."""

    def load(self, object_id: str) -> Json | None:
        """Return an object's record; None for an unknown id."""

    def save(self, object_id: str, record: Json) -> None:
        """Replace an object's record atomically."""

    def draft(self) -> Draft:
        """Begin a new object whose content comes bit by bit."""

    def add(self, object_id: str, record: Json, source: Path) -> bool:
        """Put a new object in the bucket with the content of `source`; return False if the id is there already."""

    def content(self, object_id: str) -> Path:
        """Return the path of the content, which other names of the same file outlive."""

    def open(self, object_id: str) -> IO[bytes]:
        """Open the content; it stays readable after a `delete`."""

    def note(self, object_id: str, name: str, value: Json) -> bool:
        """Attach a note that never changes; return False if a note of this name is there already."""

    def noted(self, object_id: str, name: str) -> Json | None:
        """Return a note; None if there is none of this name."""

    def workspace(self, object_id: str) -> Path:
        """Return a folder for the work on this object, which is made if it is missing."""

    def clear(self, object_id: str) -> None:
        """Delete the content and the workspace; the record stays."""

    def lock(self, object_id: str) -> AbstractContextManager[bool]:
        """Hold the object's only lock in the block; False: another process holds it. It ends with the process."""

    def delete(self, object_id: str) -> bool:
        """Delete an object; return False for an unknown id."""

    def sweep(self, age_s: float) -> int:
        """Delete what killed processes left unfinished more than `age_s` seconds ago; return how many."""


class Storage(Protocol):
    """All buckets, and the list of batches that have not ended."""

    def tenants(self) -> Iterator[str | None]:
        """Yield the tenants that have a bucket; None for the objects of a gateway without keys."""

    def files(self, tenant: str | None) -> Bucket:
        """Return a tenant's files."""

    def batches(self, tenant: str | None) -> Bucket:
        """Return a tenant's batches."""

    def open_batch(self, batch_id: str, tenant: str | None) -> None:
        """List a batch as one that has not ended."""

    def close_batch(self, batch_id: str) -> None:
        """Take a batch from the list of those that have not ended."""

    def open_batches(self) -> Iterator[tuple[str, str | None, float]]:
        """Yield id, tenant and time of listing, in seconds since 1970, of the batches that have not ended."""

    def remember(self, key: str, value: Json) -> Json:
        """Return the value that was first given for `key` (hex digits); `forget` deletes it after a day."""

    def forget(self, age_s: float) -> int:
        """Delete the values of keys that are older than `age_s` seconds; return how many."""
