"""A tenant's batches: create, find, list and cancel them. `producer.files.run` runs them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from producer.files.catalog import find_file
from producer.files.objects import CANCEL, ENDED, batch_object, batch_record, page, parse_batch
from producer.files.storage import BATCH, Bucket, Json, Storage, new_id
from tokenmill.openai.errors import ApiError, key_reused
from tokenmill.openai.request import URLS

CANCELLABLE: Final = ("validating", "in_progress")
"""States in which a batch may be cancelled."""


def create_batch(
    storage: Storage,
    tenant: str | None,
    body: Json,
    *,
    root: str,
    ttl_s: int | None,
    key: tuple[str, str] | None = None,
) -> Json:
    """Create a batch and return its object; a clerk runs it, even if nothing else is done for it.

    Args:
        root: `Keys.root` of the queue whose workers are to do it.
        ttl_s: seconds that the batch and, unless it says otherwise, its files live after its end; None: for ever.
        key: hashes of the tenant's idempotency key and of the request: the same two return the same batch.

    Raises:
        ApiError: 400 a wrong body; 404 an unknown file; 409 the key was used for another request.
    """
    wanted = parse_batch(body, URLS)
    files, batches = storage.files(tenant), storage.batches(tenant)
    batch_id = new_id(BATCH)
    if key is not None:
        batch_id = _id_of_key(storage, *key, batch_id)
        if batches.load(batch_id) is not None:
            return find_batch(batches, batch_id)
    source = find_file(files, wanted["input_file_id"], param="input_file_id")
    if source["purpose"] != "batch":
        raise ApiError(400, "input_file_id: must be a file with the purpose batch", param="input_file_id")
    record = batch_record(wanted, tenant, root, int(time.time()), ttl_s)
    storage.open_batch(batch_id, tenant)  # first, so that a clerk finds the batch if this process is killed
    try:
        batches.add(batch_id, record, files.content(wanted["input_file_id"]))
    except FileNotFoundError:  # deleted meanwhile
        storage.close_batch(batch_id)
        find_file(files, wanted["input_file_id"], param="input_file_id")
        raise
    return find_batch(batches, batch_id)


def _id_of_key(storage: Storage, key: str, request: str, fresh: str) -> str:
    """Return the id of the batch that an idempotency key made, or `fresh` for a new key."""
    known = storage.remember(key, {"id": fresh, "request": request})
    if known["request"] != request:
        raise key_reused()
    return str(known["id"])


def find_batch(bucket: Bucket, batch_id: str) -> Json:
    """Return the object of a batch.

    Raises:
        ApiError: 404.
    """
    found = _view(bucket, batch_id)
    if found is None:
        raise ApiError(404, "There is no batch with this id.", param="id")
    return found


def _view(bucket: Bucket, batch_id: str) -> Json | None:
    record = bucket.load(batch_id)
    if record is None:
        return None
    return batch_object(batch_id, record, None if record["status"] in ENDED else bucket.noted(batch_id, CANCEL))


def list_batches(bucket: Bucket, *, limit: int, after: str | None, newest_first: bool = True) -> Json:
    """Return OpenAI's list of the batches; see `page`."""
    more: Json = {"limit": limit, "after": after, "newest_first": newest_first, "prefix": BATCH}
    return page(bucket, lambda one: _view(bucket, one), **more)


def cancel_batch(bucket: Bucket, batch_id: str) -> Json:
    """Ask for the end of a batch and return its object; of one that is cancelled already, only return the object.

    Raises:
        ApiError: 404; 409 the batch has ended otherwise, or is about to.
    """
    found = find_batch(bucket, batch_id)
    if found["status"] in CANCELLABLE:
        with suppress(KeyError):  # deleted meanwhile
            bucket.note(batch_id, CANCEL, {"at": int(time.time())})
        found = find_batch(bucket, batch_id)
    if found["status"] not in ("cancelling", "cancelled"):
        message = f"The batch is {found['status']}; it cannot be cancelled."
        raise ApiError(409, message, code="batch_ended")
    return found
