"""Middleware that finds the caller of a request by the API key in `Authorization: Bearer`."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller, KeyRing
from producer.gateway.middleware import OPEN
from tokenmill.openai.errors import ApiError

ANYONE: Final = Caller(None)
"""The caller of a gateway without keys."""


class Auth:
    """Sets `request.state.caller`, and refuses requests without a known key; the paths `OPEN` need none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app, self.gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            keys = self.gateway.keys
            caller = ANYONE if keys is None or scope["path"] in OPEN else _caller(keys, scope)
            scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)


def _caller(keys: KeyRing, scope: Scope) -> Caller:
    """Return the caller of a request.

    Raises:
        ApiError: 401.
    """
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if not given:
        raise _refused("You must send an API key, as the header `Authorization: Bearer KEY`.")
    if len(given) > 1:
        raise _refused("The request has more than one Authorization header.")
    scheme, _, key = given[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise _refused("The Authorization header must be `Bearer KEY`.")
    caller = keys.find(key.strip())
    if caller is None:
        raise _refused("Incorrect API key.")
    return caller


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
