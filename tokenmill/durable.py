"""Replaces small files so that a crash or a power cut leaves the old content or the new content, never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, or create it; the data is on the disk when this returns.

    Raises:
        OSError: the file cannot be written; the old file stays.
    """
    fresh = new_file(path, data)
    try:
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Create a file with all its data at once; return False, and change nothing, if there is a file of this name.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = new_file(path, data)
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def new_file(path: Path, data: bytes) -> Path:
    """Write `data` to a new file beside `path` and return its path; the name is random, since `path`'s may be taken."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return fresh


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
