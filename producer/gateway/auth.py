"""Middleware that finds the caller of a request by the API key in `Authorization: Bearer`.

It also keeps one tenant from taking all of --max-requests: where there are keys of several, each may have half of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller, KeyRing
from producer.gateway.middleware import BUSY_SECONDS, OPEN
from tokenmill.openai.errors import ApiError

ANYONE: Final = Caller(None)
"""The caller of a gateway without keys."""


class Auth:
    """Sets `request.state.caller`, and refuses requests without a known key; the paths `OPEN` need none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app, self.gateway = app, gateway
        self._in_flight: Counter[str] = Counter()
        """Requests that are being served, by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = self.gateway.keys
        if scope["type"] != "http" or keys is None or scope["path"] in OPEN:
            scope.setdefault("state", {})["caller"] = ANYONE
            await self.app(scope, receive, send)
            return
        scope["state"]["caller"] = caller = _caller(keys, scope)
        tenant, most = str(caller.tenant), max(1, self.gateway.settings.max_requests // 2)
        if self._in_flight[tenant] >= most and keys.shared:
            message = f"Tenant {tenant} has {most} requests in flight, half of what the gateway serves at once."
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=BUSY_SECONDS)
        self._in_flight[tenant] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._in_flight[tenant] -= 1


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
