"""The routes of files: `/v1/files`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any, Final

from anyio import CancelScope
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from producer.files.catalog import delete_file, find_file, list_files, no_file
from producer.files.objects import file_object, file_record, parse_expiry
from producer.files.storage import FILE, Bucket, Draft, new_id
from producer.gateway.requests import caller_of, gateway_of, limit_body
from producer.gateway.settings import GatewaySettings
from producer.gateway.storing import page_of, storage_of, stored
from producer.gateway.upload import FORM_BYTES, Upload
from tokenmill.openai.errors import ApiError

MAX_LIST: Final = 10_000
_READ_BYTES: Final = 64 << 10


async def create_file(request: Request) -> Response:
    """Store an uploaded file; it is there when it is there whole."""
    settings, bucket = gateway_of(request).settings, _bucket(request)
    limit_body(request, settings.max_file_bytes + FORM_BYTES)
    async with _draft(bucket) as draft:
        upload = Upload(request.headers.get("content-type", ""), draft.file, settings.max_file_bytes)
        await upload.read(request.stream())
        ttl_s, created_at = _expiry(upload, settings), int(time.time())
        record = file_record(upload.filename or "", upload.size, "batch", created_at, ttl_s)
        file_id = new_id(FILE)
        await stored(draft.commit, file_id, record)
    return JSONResponse(file_object(file_id, record))


@asynccontextmanager
async def _draft(bucket: Bucket) -> AsyncIterator[Draft]:
    draft = await stored(bucket.draft)
    try:
        yield draft
    finally:
        with CancelScope(shield=True):
            await run_in_threadpool(draft.__exit__, None, None, None)


def _expiry(upload: Upload, settings: GatewaySettings) -> int | None:
    """Check the fields of an upload; return the seconds after which its file expires, None for never."""
    purpose = upload.fields.get("purpose")
    if purpose != "batch":
        raise ApiError(400, f"purpose: {'is missing' if purpose is None else 'must be batch'}", param="purpose")
    given = {key: upload.fields.get(f"expires_after[{key}]") for key in ("anchor", "seconds")}
    if any(value is not None for value in given.values()):
        return parse_expiry(given, "expires_after")
    return default_ttl(settings)


def default_ttl(settings: GatewaySettings) -> int | None:
    """Return the seconds after which files expire that say nothing about it; None: never."""
    return round(settings.file_ttl_days * 86_400) or None


async def get_files(request: Request) -> Response:
    """List the caller's files."""
    wanted = page_of(request, default=MAX_LIST, most=MAX_LIST)
    purpose = request.query_params.get("purpose")
    return JSONResponse(await stored(list_files, _bucket(request), purpose=purpose, **wanted._asdict()))


async def get_file(request: Request) -> Response:
    """Describe a file."""
    file_id = request.path_params["file_id"]
    return JSONResponse(file_object(file_id, await stored(find_file, _bucket(request), file_id)))


async def get_content(request: Request) -> Response:
    """Send the content of a file."""
    bucket, file_id = _bucket(request), request.path_params["file_id"]
    record = await stored(find_file, bucket, file_id)
    try:
        file = await stored(bucket.open, file_id)
    except KeyError:  # deleted meanwhile
        raise no_file() from None
    return _Content(file, record["bytes"])


class _Content(StreamingResponse):
    """The bytes of an open file, which is closed at the end in any case."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        headers = {
            "content-length": str(size),
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        super().__init__(self._pieces(), media_type="application/octet-stream", headers=headers)

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await run_in_threadpool(self._file.read, _READ_BYTES):
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def remove_file(request: Request) -> Response:
    """Delete a file."""
    answer: dict[str, Any] = await stored(delete_file, _bucket(request), request.path_params["file_id"])
    return JSONResponse(answer)


def _bucket(request: Request) -> Bucket:
    return storage_of(request).files(caller_of(request).tenant)


ROUTES = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", get_files, methods=["GET"]),
    Route("/v1/files/{file_id}", get_file, methods=["GET"]),
    Route("/v1/files/{file_id}", remove_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", get_content, methods=["GET"]),
]
