"""What the routes of files and batches share: the storage, whose calls run in threads, and pages of lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from producer.files.folder import Folder
from producer.files.storage import Storage
from producer.gateway.requests import gateway_of
from tokenmill.openai.errors import ApiError

T = TypeVar("T")
log = structlog.get_logger()

RETRY_SECONDS = 10.0
"""`Retry-After` while the storage fails."""


class Page(NamedTuple):
    """The part of a list that a request asks for."""

    limit: int
    after: str | None
    newest_first: bool


class FilesError(Exception):
    """The folder of files cannot be used."""


def open_folder(path: str) -> Storage:
    """Return the storage in the folder --files.

    Raises:
        FilesError: the folder cannot be made or written.
    """
    try:
        return Folder(path)
    except OSError as error:
        raise FilesError(f"--files: {path} cannot be used: {error.strerror or error}") from None


def storage_of(request: Request) -> Storage:
    """Return the gateway's storage.

    Raises:
        ApiError: 404, the gateway runs without --files.
    """
    storage = gateway_of(request).storage
    if storage is None:
        raise ApiError(404, "This gateway serves no files and batches: it was started without --files.")
    return storage


async def stored(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of the storage in a thread.

    Raises:
        ApiError: 503, the storage failed: the disk is full, for example. The log says why.
    """
    try:
        return await run_in_threadpool(call, *args, **kwargs)
    except OSError as error:
        log.error("storage_failed", message=str(error))
        message = "The storage of files does not work at the moment; try again later."
        raise ApiError(503, message, code="storage_unavailable", retry_after=RETRY_SECONDS) from error


def page_of(request: Request, *, default: int, most: int) -> Page:
    """Read `limit`, `after` and `order` of a request for a list.

    Args:
        default: number of objects without `limit`.
        most: maximum of `limit`.

    Raises:
        ApiError: 400, naming the parameter.
    """
    limit, order = request.query_params.get("limit", str(default)), request.query_params.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit: must be a whole number from 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: must be asc or desc", param="order")
    return Page(int(limit), request.query_params.get("after"), order == "desc")
