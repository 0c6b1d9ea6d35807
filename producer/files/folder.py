"""Keeps files and batches in a folder that gateways and clerks share.

    <root>/tenant-<name>/files/<id>/{record.json,content}          <root>/open/… without keys
    <root>/tenant-<name>/batches/<id>/{record.json,content,work/,lock, notes}
    <root>/.batches/<id>       the batches that have not ended
    <root>/.keys/<hex>         idempotency keys

An object is written into a folder with a hidden name, synced, and renamed; it is deleted by a rename and then
emptied. So each name holds a whole object at any time.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import orjson

from producer.files.storage import BATCH, FILE, Json, is_id
from tokenmill.durable import create_file, new_file, replace_file, sync_folder

_TENANT: Final = "tenant-"
"""Before the name of a tenant, which may be `.` or `..`."""
_NO_TENANT: Final = "open"
_RECORD: Final = "record.json"
_CONTENT: Final = "content"
_DRAFT: Final = ".new-"
_DELETED: Final = ".gone-"


class FolderDraft:
    """A new object in a folder with a hidden name."""

    def __init__(self, bucket: FolderBucket) -> None:
        self._bucket = bucket
        bucket.ensure()
        self.path = bucket.path / f"{_DRAFT}{secrets.token_hex(16)}"
        self.path.mkdir()
        self._file: IO[bytes] = (self.path / _CONTENT).open("xb")

    @property
    def file(self) -> IO[bytes]:
        return self._file

    def commit(self, object_id: str, record: Json) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._bucket.take_in(self.path, object_id, record)

    def __enter__(self) -> FolderDraft:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the disk is full: the content goes anyway
            self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)


class FolderBucket:
    """The objects of one kind of one tenant."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self._prefix = path, prefix

    def ensure(self) -> None:
        """Make the bucket's folder, on the disk too."""
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            sync_folder(self.path.parent.parent)

    def _of(self, object_id: str) -> Path:
        if not is_id(object_id, self._prefix):
            raise KeyError(object_id)
        return self.path / object_id

    def ids(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path) if is_id(name, self._prefix))
        except FileNotFoundError:
            return []

    def load(self, object_id: str) -> Json | None:
        return self._read(object_id, _RECORD)

    def _read(self, object_id: str, name: str) -> Json | None:
        try:
            value: Any = orjson.loads((self._of(object_id) / name).read_bytes())
        except (KeyError, FileNotFoundError):
            return None
        except orjson.JSONDecodeError as error:
            raise OSError(f"{object_id}: {name} is damaged: {error}") from None
        return dict(value)

    def save(self, object_id: str, record: Json) -> None:
        try:
            replace_file(self._of(object_id) / _RECORD, orjson.dumps(record))
        except FileNotFoundError:
            raise KeyError(object_id) from None

    def draft(self) -> FolderDraft:
        return FolderDraft(self)

    def add(self, object_id: str, record: Json, source: Path) -> bool:
        if self.load(object_id) is not None:
            return False
        with self.draft() as draft:
            content = draft.path / _CONTENT
            content.unlink()
            try:
                os.link(source, content)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                shutil.copyfile(source, content)
            with content.open("rb") as file:
                os.fsync(file.fileno())
            return self.take_in(draft.path, object_id, record)

    def take_in(self, folder: Path, object_id: str, record: Json) -> bool:
        """Complete a draft's folder and rename it to its id; return False if the id is there already."""
        new_file(folder / _RECORD, orjson.dumps(record)).rename(folder / _RECORD)
        sync_folder(folder)
        try:
            folder.rename(self._of(object_id))
        except OSError:
            if self.load(object_id) is None:
                raise
            return False
        sync_folder(self.path)
        return True

    def content(self, object_id: str) -> Path:
        return self._of(object_id) / _CONTENT

    def open(self, object_id: str) -> IO[bytes]:
        try:
            return self.content(object_id).open("rb")
        except FileNotFoundError:
            raise KeyError(object_id) from None

    def note(self, object_id: str, name: str, value: Json) -> bool:
        try:
            return create_file(self._of(object_id) / f"{name}.json", orjson.dumps(value))
        except FileNotFoundError:
            raise KeyError(object_id) from None

    def noted(self, object_id: str, name: str) -> Json | None:
        return self._read(object_id, f"{name}.json")

    def workspace(self, object_id: str) -> Path:
        path = self._of(object_id) / "work"
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise KeyError(object_id) from None
        return path

    def clear(self, object_id: str) -> None:
        self.content(object_id).unlink(missing_ok=True)
        shutil.rmtree(self._of(object_id) / "work", ignore_errors=True)

    @contextmanager
    def lock(self, object_id: str) -> Iterator[bool]:
        try:
            descriptor = os.open(self._of(object_id) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            raise KeyError(object_id) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def delete(self, object_id: str) -> bool:
        gone = self.path / f"{_DELETED}{secrets.token_hex(16)}"
        try:
            self._of(object_id).rename(gone)
        except (KeyError, FileNotFoundError):
            return False
        sync_folder(self.path)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def sweep(self, age_s: float) -> int:
        return _delete_old(self.path, age_s, lambda name: name.startswith((_DRAFT, _DELETED)))


class Folder:
    """Files and batches in a folder, which is made if it is missing.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._open, self._keys = self.root / ".batches", self.root / ".keys"
        for path in (self._open, self._keys):
            path.mkdir(parents=True, exist_ok=True)
        probe = new_file(self.root / ".probe", b"")
        probe.unlink()

    def tenants(self) -> Iterator[str | None]:
        for name in sorted(os.listdir(self.root)):
            if name == _NO_TENANT:
                yield None
            elif name.startswith(_TENANT):
                yield name.removeprefix(_TENANT)

    def _of(self, tenant: str | None) -> Path:
        return self.root / (_NO_TENANT if tenant is None else f"{_TENANT}{tenant}")

    def files(self, tenant: str | None) -> FolderBucket:
        return FolderBucket(self._of(tenant) / "files", FILE)

    def batches(self, tenant: str | None) -> FolderBucket:
        return FolderBucket(self._of(tenant) / "batches", BATCH)

    def open_batch(self, batch_id: str, tenant: str | None) -> None:
        create_file(self._open / batch_id, orjson.dumps({"tenant": tenant}))

    def close_batch(self, batch_id: str) -> None:
        (self._open / batch_id).unlink(missing_ok=True)
        sync_folder(self._open)

    def open_batches(self) -> Iterator[tuple[str, str | None, float]]:
        for name in sorted(os.listdir(self._open)):
            path = self._open / name
            if is_id(name, BATCH):
                with suppress(FileNotFoundError):  # it has ended meanwhile
                    yield name, orjson.loads(path.read_bytes())["tenant"], path.stat().st_mtime

    def remember(self, key: str, value: Json) -> Json:
        path = self._keys / key
        while not create_file(path, orjson.dumps(value)):
            with suppress(FileNotFoundError):  # deleted between the two calls
                return dict(orjson.loads(path.read_bytes()))
        return value

    def forget(self, age_s: float) -> int:
        keys = _delete_old(self._keys, age_s, lambda name: True)
        _delete_old(self.root, age_s, lambda name: name.startswith(".probe."))
        _delete_old(self._open, age_s, lambda name: not is_id(name, BATCH))
        return keys


def _delete_old(folder: Path, age_s: float, chosen: Callable[[str], bool]) -> int:
    """Delete the chosen names that were last changed more than `age_s` seconds ago; return how many."""
    deleted, before = 0, time.time() - age_s
    for name in os.listdir(folder) if folder.is_dir() else ():
        path = folder / name
        with suppress(FileNotFoundError):
            if chosen(name) and path.stat().st_mtime < before:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                deleted += 1
    return deleted
