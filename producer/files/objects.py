"""OpenAI's objects for files and batches, made from records of the storage; checks of requests that create them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Final

from producer.files.storage import Bucket, Json, is_id
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.errors import clean

CANCEL: Final = "cancel"
"""Name of the note that asks for the end of a batch; it holds `at`, the time."""
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
"""States that a batch does not leave."""
MOMENTS: Final = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)
"""When a batch entered a state; null until then."""
MAX_FILENAME: Final = 512
LONGEST_WINDOW_S: Final = 30 * 86_400
EXPIRY_S: Final = (3600, 30 * 86_400)
"""Least and greatest seconds of `expires_after`."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW: Final = re.compile(r"([0-9]{1,9})([smhd])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def file_object(file_id: str, record: Json) -> Json:
    """Return OpenAI's object of a file."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": record["bytes"],
        "created_at": record["created_at"],
        "expires_at": record["expires_at"],
        "filename": record["filename"],
        "purpose": record["purpose"],
        "status": "processed",
        "status_details": None,
    }


def file_record(filename: str, size: int, purpose: str, created_at: int, ttl_s: int | None) -> Json:
    """Return the record of a file that expires `ttl_s` seconds after its creation; None: never."""
    return {
        "bytes": size,
        "created_at": created_at,
        "expires_at": None if ttl_s is None else created_at + ttl_s,
        "filename": _CONTROL.sub("", clean(filename, MAX_FILENAME)) or "file",
        "purpose": purpose,
    }


def batch_record(wanted: Mapping[str, Any], tenant: str | None, root: str, created_at: int, ttl_s: int | None) -> Json:
    """Return the record of a new batch.

    Args:
        wanted: what `parse_batch` returned.
        root: `Keys.root` of the queue whose workers are to do it.
        ttl_s: seconds that the batch and, unless it says otherwise, its files live after its end; None: for ever.
    """
    return {
        "tenant": tenant,
        "root": root,
        "status": "validating",
        "outcome": None,
        "created_at": created_at,
        "expires_at": created_at + parse_window(wanted["completion_window"]),
        "ttl_s": ttl_s,
        "output_ttl_s": wanted["output_expires_after"] or ttl_s,
        "endpoint": wanted["endpoint"],
        "input_file_id": wanted["input_file_id"],
        "completion_window": wanted["completion_window"],
        "metadata": wanted["metadata"],
        "model": None,
        "usage": None,
        "errors": [],
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "output_file_id": None,
        "error_file_id": None,
        **dict.fromkeys(MOMENTS),
    }


def batch_object(batch_id: str, record: Json, cancel: Json | None) -> Json:
    """Return OpenAI's object of a batch; `cancel` is its note of this name."""
    status, moments = record["status"], {name: record[name] for name in MOMENTS}
    if cancel is not None and status in ("validating", "in_progress") and record["outcome"] != "expired":
        status, moments["cancelling_at"] = "cancelling", cancel["at"]
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": record["endpoint"],
        "model": record["model"],
        "errors": {"object": "list", "data": record["errors"]} if record["errors"] else None,
        "input_file_id": record["input_file_id"],
        "completion_window": record["completion_window"],
        "status": status,
        "output_file_id": record["output_file_id"],
        "error_file_id": record["error_file_id"],
        "created_at": record["created_at"],
        "expires_at": record["expires_at"],
        **moments,
        "request_counts": record["request_counts"],
        "usage": record["usage"],
        "metadata": record["metadata"],
    }


def page(
    bucket: Bucket,
    view: Callable[[str], Json | None],
    *,
    limit: int,
    after: str | None,
    newest_first: bool,
    prefix: str,
) -> Json:
    """Return OpenAI's list of at most `limit` objects.

    Args:
        view: makes the object of an id; None: the object is not in the list.
        after: id behind which the list begins. Its object may have been deleted.

    Raises:
        ApiError: `after` is no id.
    """
    if after is not None and not is_id(after, prefix):
        raise ApiError(400, f"after: must be an id that begins with {prefix}", param="after")
    ids = bucket.ids()
    if newest_first:
        ids = (ids if after is None else ids[: bisect_left(ids, after)])[::-1]
    elif after is not None:
        ids = ids[bisect_right(ids, after) :]
    data: list[Json] = []
    for object_id in ids:
        if (found := view(object_id)) is not None:
            data.append(found)
        if len(data) > limit:
            break
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }


# ── what a request says ───────────────────────────────────────────────────────────────────────────────────────────────


def parse_batch(body: Mapping[str, Any], endpoints: tuple[str, ...]) -> Json:
    """Check the body of `POST /v1/batches`; return its values, with null for those that are absent.

    Raises:
        ApiError: 400, naming the key.
    """
    known = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
    wanted: Json = {key: body.get(key) for key in known}
    unknown = next((key for key, value in body.items() if key not in known and value is not None), None)
    if unknown is not None:
        raise _wrong(clean(unknown, 64), "unknown key")
    for key in known[:3]:
        if not isinstance(wanted[key], str):
            raise _wrong(key, "is missing" if wanted[key] is None else "must be a string")
    if wanted["endpoint"] not in endpoints:
        raise _wrong("endpoint", f"must be {' or '.join(endpoints)}")
    parse_window(wanted["completion_window"])
    _check_metadata(wanted["metadata"])
    wanted["output_expires_after"] = parse_expiry(wanted["output_expires_after"], "output_expires_after")
    return wanted


def parse_window(text: str) -> int:
    """Return the seconds of a completion window such as `24h`.

    Raises:
        ApiError: it is none.
    """
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 1 <= seconds <= LONGEST_WINDOW_S:
        raise _wrong("completion_window", "must be 24h, or another number of s, m, h or d up to 30d")
    return seconds


def parse_expiry(value: Any, key: str) -> int | None:
    """Return the seconds of an `expires_after` object; None if it is absent.

    Raises:
        ApiError: it is malformed.
    """
    if value is None:
        return None
    least, most = EXPIRY_S
    if not isinstance(value, dict) or value.get("anchor") != "created_at" or set(value) - {"anchor", "seconds"}:
        raise _wrong(key, 'must be {"anchor": "created_at", "seconds": …}')
    seconds = value.get("seconds")
    if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds):  # the field of a form
        seconds = int(seconds)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not least <= seconds <= most:
        raise _wrong(f"{key}.seconds", f"must be a whole number from {least} to {most}")
    return seconds


def _check_metadata(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > 16:
        raise _wrong("metadata", "must be an object of at most 16 keys")
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise _wrong("metadata", "keys must have at most 64 characters, values must be strings of at most 512")


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param)
