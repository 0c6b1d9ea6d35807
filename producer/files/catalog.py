"""A tenant's files: find, list and delete them; delete those that have expired."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from producer.files.objects import ENDED, file_object, page
from producer.files.storage import FILE, Bucket, Json, Storage
from tokenmill.openai.errors import ApiError

log = structlog.get_logger(__name__)

LEFTOVER_S: Final = 86_400.0
"""Age from which on an unfinished upload, or an idempotency key, is deleted."""


def find_file(bucket: Bucket, file_id: str, *, param: str = "id") -> Json:
    """Return the record of a file that has not expired.

    Args:
        param: the key of the request that holds the id.

    Raises:
        ApiError: 404.
    """
    record = _alive(bucket, file_id)
    if record is None:
        raise no_file(param)
    return record


def no_file(param: str = "id") -> ApiError:
    """Return the error for an id without a file, which may be any text."""
    return ApiError(404, "There is no file with this id.", param=param)


def list_files(bucket: Bucket, *, limit: int, after: str | None, newest_first: bool, purpose: str | None) -> Json:
    """Return OpenAI's list of the files, of all purposes or of one; see `page`."""

    def view(file_id: str) -> Json | None:
        record = _alive(bucket, file_id)
        if record is None or purpose not in (None, record["purpose"]):
            return None
        return file_object(file_id, record)

    return page(bucket, view, limit=limit, after=after, newest_first=newest_first, prefix=FILE)


def delete_file(bucket: Bucket, file_id: str) -> Json:
    """Delete a file and return OpenAI's answer. Batches that were made from it keep its content.

    Raises:
        ApiError: 404.
    """
    find_file(bucket, file_id)
    if not bucket.delete(file_id):
        raise no_file()
    return {"id": file_id, "object": "file", "deleted": True}


def _alive(bucket: Bucket, file_id: str) -> Json | None:
    record = bucket.load(file_id)
    if record is None or (record["expires_at"] is not None and record["expires_at"] <= time.time()):
        return None
    return record


def delete_expired(storage: Storage) -> dict[str, int]:
    """Delete expired files, batches whose time has passed after their end, and what killed processes left.

    Returns:
        How many files, batches and leftovers were deleted.
    """
    deleted = {"files": 0, "batches": 0, "leftovers": storage.forget(LEFTOVER_S)}
    for tenant in storage.tenants():
        files, batches = storage.files(tenant), storage.batches(tenant)
        deleted["leftovers"] += files.sweep(LEFTOVER_S) + batches.sweep(LEFTOVER_S)
        for file_id in files.ids():
            with _reported(file_id):
                if files.load(file_id) is not None and _alive(files, file_id) is None:
                    deleted["files"] += files.delete(file_id)
        for batch_id in batches.ids():
            with _reported(batch_id):
                record = batches.load(batch_id)
                if record is not None and _is_over(record):
                    deleted["batches"] += batches.delete(batch_id)
    return deleted


@contextmanager
def _reported(object_id: str) -> Iterator[None]:
    """Log a failure of the storage within the block, so that other objects are deleted nevertheless."""
    try:
        yield
    except OSError as error:
        log.error("storage_failed", id=object_id, message=str(error))


def _is_over(record: Json) -> bool:
    if record["status"] not in ENDED or record["ttl_s"] is None:
        return False
    return bool(record[f"{record['status']}_at"] + record["ttl_s"] < time.time())
