"""Read requests: the JSON body within limits, the gateway and the caller of a request."""

from __future__ import annotations

from typing import Any, cast

import orjson
from starlette.requests import Request

from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller
from tokenmill.openai.errors import ApiError
from tokenmill.protocol import body

Json = dict[str, Any]

MAX_DEPTH = body.MAX_DEPTH + 3
"""Maximum nesting of a request's JSON; the rules of bodies are stricter. Deeper values would exhaust Python's stack."""


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    return cast(Gateway, request.app.state.gateway)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request; without API keys a caller without tenant."""
    return cast(Caller, getattr(request.state, "caller", None) or Caller(None))


async def read_json(request: Request) -> Json:
    """Read the JSON object in a request's body.

    Raises:
        ApiError: 400 for another content type, invalid JSON or another value than an object; 408 for a body that
            comes too slowly; 413 for a body over --max-body-bytes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, "The request needs the header `Content-Type: application/json`.")
    try:
        data = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400, f"The body is not valid JSON: {error.msg} (line {error.lineno}).", code="invalid_json"
        ) from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    if _too_deep(data):
        raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return data


def _too_deep(data: Json) -> bool:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def limit_body(request: Request, max_bytes: int) -> None:
    """Set the maximum size of a request's body, before its first byte is read; the default is --max-body-bytes."""
    request.state.max_body_bytes = max_bytes
