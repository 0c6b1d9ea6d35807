"""The OpenAPI document of the gateway, served at `/openapi.json`.

A test compares its paths and methods with the routes that are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from producer.gateway import batches, files
from producer.gateway.jobs import LONGEST_WAIT_S
from producer.gateway.openapi_schemas import REF, schemas
from tokenmill.protocol.version import version

Json = dict[str, Any]
Kinds = Mapping[str, str | None]

JSON: Final = "application/json"
SSE: Final = "text/event-stream"
BYTES: Final = "application/octet-stream"
COMMON: Final = (401, 403, 429, 500, 503)
"""Statuses of errors that any request with a key may get."""


@cache
def document() -> Json:
    """Return the OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenmill gateway",
            "version": version(),
            "summary": "OpenAI's API over a queue of inference jobs",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}],
        "paths": {**_operators(), **_generation(), **_jobs(), **_files(), **_batches()},
        "components": {
            "schemas": schemas(),
            "responses": {"Error": _content("An error in OpenAI's format.", {JSON: "Error"})},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key; none is needed by a gateway without --api-keys.",
                }
            },
        },
    }


async def openapi(request: Request) -> Response:
    """Answer the document."""
    return JSONResponse(document())


ROUTES = [Route("/openapi.json", openapi)]


def _operators() -> Json:
    found = {
        "/healthz": {"get": _open("The process serves.", {200: "text/plain"})},
        "/readyz": {"get": _open("Redis answers and a worker lives.", {200: "text/plain", 503: "text/plain"})},
        "/metrics": {"get": _open("Metrics in Prometheus' text format.", {200: "text/plain"})},
        "/openapi.json": {"get": _open("This document.", {200: JSON})},
    }
    for path, operations in found.items():
        operations["get"]["operationId"] = path.strip("/").partition(".")[0]
    return found


def _generation() -> Json:
    def create(name: str, summary: str, request: str, kinds: Kinds) -> Json:
        errors = (400, 404, 408, 409, 413, 504)
        return {"post": _operation(name, summary, kinds, _IDEMPOTENCY, errors=errors, body={JSON: request})}

    chat, completion = {JSON: "ChatCompletion", SSE: None}, {JSON: "Completion", SSE: None}
    names = "The names that the live workers of the queue serve."
    model = _operation("get_model", "One served name.", {JSON: "Model"}, _path("model"), errors=(404,))
    return {
        "/v1/models": {"get": _operation("list_models", names, {JSON: "Models"})},
        "/v1/models/{model}": {"get": model},
        "/v1/chat/completions": create("create_chat_completion", "Answer a chat.", "ChatRequest", chat),
        "/v1/completions": create("create_completion", "Continue a text.", "CompletionRequest", completion),
        "/v1/embeddings": create("create_embedding", "Embed a text.", "EmbeddingRequest", {JSON: "Embeddings"}),
    }


def _jobs() -> Json:
    one, faults, new = _path("job_id"), (400, 404), (400, 404, 408, 409, 413)
    wait = {"type": "number", "minimum": 0, "maximum": LONGEST_WAIT_S}
    waits = _query("wait", wait, "Seconds to wait for the job's end.")
    after = _query(
        "last_event_id", {"type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,20}$"}, "Begin after this entry ID."
    )
    resume = {**after, "name": "Last-Event-ID", "in": "header"}
    body = {JSON: "JobRequest"}
    create = _operation("create_job", "Enqueue a job.", {JSON: "JobAccepted"}, _IDEMPOTENCY, errors=new, body=body)
    accepted = create["responses"].pop("200")
    accepted["headers"] |= {"Location": _header("Path of the job.")}
    create["responses"]["202"] = {**accepted, "links": _links("job_id", "get_job", "get_job_events", "cancel_job")}
    read = _operation("get_job", "State and result of a job.", {JSON: "Job"}, one, waits, errors=faults)
    follow = _operation("get_job_events", "Events of a job.", {SSE: None}, one, after, resume, errors=faults)
    cancel = _operation("cancel_job", "Cancel a job.", {JSON: "JobCancelled"}, one, errors=faults)
    return {
        "/v1/jobs": {"post": create},
        "/v1/jobs/{job_id}": {"get": read},
        "/v1/jobs/{job_id}/events": {"get": follow},
        "/v1/jobs/{job_id}/cancel": {"post": cancel},
    }


def _files() -> Json:
    one, summary, body = _path("file_id"), "Upload the requests of a batch.", {"multipart/form-data": "FileUpload"}
    purpose = _query("purpose", {"enum": ["batch", "batch_output"]}, "Only files of this purpose.")
    create = _operation("create_file", summary, {JSON: "File"}, errors=(400, 404, 408, 413), body=body)
    create["responses"]["200"]["links"] = _links("file_id", "get_file", "get_file_content", "delete_file")
    pages = _operation("list_files", "List files.", {JSON: "Files"}, *_page(files.MAX_LIST), purpose, errors=(400, 404))
    read = _operation("get_file", "Describe a file.", {JSON: "File"}, one, errors=(404,))
    delete = _operation("delete_file", "Delete a file.", {JSON: "FileDeleted"}, one, errors=(404,))
    content = _operation("get_file_content", "Read a file.", {BYTES: None}, one, errors=(404,))
    return {
        "/v1/files": {"post": create, "get": pages},
        "/v1/files/{file_id}": {"get": read, "delete": delete},
        "/v1/files/{file_id}/content": {"get": content},
    }


def _batches() -> Json:
    one, batch, faults = _path("batch_id"), {JSON: "Batch"}, (400, 404, 408, 409, 413)
    body = {JSON: "BatchRequest"}
    create = _operation("create_batch", "Run an uploaded file.", batch, _IDEMPOTENCY, errors=faults, body=body)
    create["responses"]["200"]["links"] = _links("batch_id", "get_batch", "cancel_batch")
    pages = _operation("list_batches", "List batches.", {JSON: "Batches"}, *_page(batches.MAX_LIST), errors=(400, 404))
    return {
        "/v1/batches": {"post": create, "get": pages},
        "/v1/batches/{batch_id}": {"get": _operation("get_batch", "Describe a batch.", batch, one, errors=(404,))},
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("cancel_batch", "Cancel a batch.", batch, one, errors=(404, 409))
        },
    }


def _operation(
    name: str,
    summary: str,
    answer: Kinds,
    *parameters: Json,
    errors: tuple[int, ...] = (),
    body: Kinds | None = None,
) -> Json:
    """Return the description of one operation.

    Args:
        answer: media type → name of a schema, or None for text and bytes; with status 200.
        errors: statuses beside `COMMON`, all with OpenAI's error body.
        body: the same for the request.
    """
    responses: Json = {"200": {**_content(summary, answer), "headers": _request_id()}}
    responses |= {str(status): {"$ref": "#/components/responses/Error"} for status in sorted({*errors, *COMMON})}
    found: Json = {"operationId": name, "summary": summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {"required": True, **_content(None, body)}
    return {**found, "parameters": [*parameters]} if parameters else found


def _open(summary: str, answers: dict[int, str]) -> Json:
    """Return the description of an operation that needs no key."""
    kinds = {str(status): _content(HTTPStatus(status).phrase, {kind: None}) for status, kind in answers.items()}
    return {"summary": summary, "security": [], "responses": kinds}


def _content(description: str | None, kinds: Kinds) -> Json:
    content: Json = {kind: {"schema": _schema(kind, name)} for kind, name in kinds.items()}
    return {"content": content} if description is None else {"description": description, "content": content}


def _schema(kind: str, name: str | None) -> Json:
    if name is not None:
        return {"$ref": REF.format(model=name)}
    return {} if kind == JSON else {"type": "string"}


def _path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, schema: Json, description: str = "") -> Json:
    return {"name": name, "in": "query", "schema": schema, **({"description": description} if description else {})}


def _page(most: int) -> list[Json]:
    return [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": most}, "Maximum number of entries."),
        _query("after", {"type": "string"}, "Begin after the entry with this id."),
        _query("order", {"enum": ["asc", "desc"]}, "By time of creation."),
    ]


def _links(parameter: str, *operations: str) -> Json:
    """Return links from the `id` of an answer to the operations that take it."""
    return {name: {"operationId": name, "parameters": {parameter: "$response.body#/id"}} for name in operations}


_IDEMPOTENCY: Final[Json] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A repeated request with the same key is the same job; with another body it gets status 409.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}


def _header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}


def _request_id() -> Json:
    return {"X-Request-Id": _header("The id of the request's job; random where there is none.")}
