"""ASGI middleware of the gateway, from outside to inside: `Frame`, `Origins`, `auth.Auth`, `Bodies`.

They are plain ASGI: Starlette's BaseHTTPMiddleware would hide a client that goes away.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.gateway.errors import api_error, internal_error, response_of
from producer.gateway.gateway import Gateway
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.keys import is_name

log = structlog.get_logger()

OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
"""Paths that need no key, and that are served while the gateway is full or shuts down."""
MIN_BYTES_PER_SECOND: Final = 500
"""Slower bodies are given up after --body-timeout, even if no pause in them is that long."""
MAX_HEADER_BYTES: Final = 64 * 1024
"""Maximum size of the headers of a request."""
LINGER_SECONDS: Final = 5.0
LINGER_BYTES: Final = 256 << 20
"""Limits of what is read and dropped of the body of a request that was answered before its end: many clients read the
answer only when they have sent all, and a connection that is closed before loses it."""
_CLOSED: Final = (408, 431)
"""Status codes after which the connection is closed at once."""
BUSY_SECONDS: Final = 1.0
"""`Retry-After` of a gateway with --max-requests in flight, or one that shuts down."""


class Frame:
    """Answers every request: with a request id, in the log, in the metrics, and with OpenAI's errors.

    Refuses requests while the gateway shuts down or has --max-requests in flight.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app, self.gateway = app, gateway
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        counted = scope["path"] not in OPEN
        self.in_flight += counted
        self.gateway.metrics.in_flight.set(self.in_flight)
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                raise ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", code="too_large")
            if counted:
                self._admit()
            await self.app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass  # recorded as incomplete
        except asyncio.CancelledError:  # the server ends tasks that outlast the drain
            if not self.gateway.drain.is_set():
                raise
            await exchange.fail(_shutting_down())
        except Exception as error:  # noqa: BLE001 - every request gets an answer; the log has the traceback
            await exchange.fail(error)
        finally:
            self.in_flight -= counted
            self.gateway.metrics.in_flight.set(self.in_flight)
            exchange.record(self.gateway)
        await exchange.finish()

    def _admit(self) -> None:
        if self.gateway.drain.is_set():
            raise _shutting_down()
        limit = self.gateway.settings.max_requests
        if self.in_flight > limit:
            message = f"The gateway serves {limit} requests, its maximum; try again later."
            raise ApiError(503, message, code="overloaded", retry_after=BUSY_SECONDS)


def _shutting_down() -> ApiError:
    return ApiError(503, "The gateway shuts down.", code="shutting_down", retry_after=BUSY_SECONDS)


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self._reading = False
        """Whether some of the request's body was read."""
        self._read = False
        """Whether all of it was read."""
        self._lingers = False
        """Whether the answer is sent, except for its end."""
        self.state = scope.setdefault("state", {})
        self._own_id = f"req-{secrets.token_hex(12)}"
        self.status = 0
        self.complete = False
        self.started_at = time.monotonic()

    async def receive(self) -> Message:
        """Pass a message on, and note the end of the request's body."""
        self._reading = True
        message = await self._receive()
        self._read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on, with `X-Request-Id` in the headers. While a body comes, keep back the end."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self.id
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            if self.complete and self._sends_body():
                self._lingers = True
                message = {**message, "more_body": True}
        await self._send(message)
        if not self.complete:  # uvicorn does not wait where the client has gone away: let the task that notices it run
            await asyncio.sleep(0)

    def _sends_body(self) -> bool:
        """Return whether the client may be sending a body that was not read."""
        headers = Headers(scope=self.scope)
        if self._read or self.status in _CLOSED:
            return False
        if "expect" in headers and not self._reading:  # the client waits until it may send
            return False
        return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

    async def finish(self) -> None:
        """End an answer whose end was kept back: after the rest of the request's body, which is dropped."""
        if not self._lingers:
            return
        left = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._read and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        await self._send({"type": "http.response.body"})

    async def fail(self, error: Exception) -> None:
        """Answer with an error; if an answer has begun, log the error and let the server close the connection."""
        known = api_error(error)
        if known is None or self.status:
            log.error("request_failed", **self.fields(), exc_info=error)
        if not self.status:
            response = response_of(known or internal_error())
            if response.status_code in _CLOSED:
                response.headers["connection"] = "close"
            await response(self.scope, self.receive, self.send)

    @property
    def id(self) -> str:
        """The id of the job, where the request has one; else an id of the request's own."""
        job_id = self.state.get("job_id")
        return job_id if isinstance(job_id, str) and is_name(job_id) else self._own_id

    @property
    def route(self) -> str:
        """The path of the route, with the names of its parameters; `unknown` for a path without route."""
        return getattr(self.scope.get("route"), "path", "unknown")

    def fields(self) -> dict[str, object]:
        """Return the fields of a log line about the request."""
        caller = self.state.get("caller")
        return {
            "id": self.id,
            "method": self.scope["method"][:16],
            "route": self.route,
            "key": getattr(caller, "key", None) or None,
        }

    def record(self, gateway: Gateway) -> None:
        """Log and count the request."""
        if not self.complete:  # the client went away
            self.status = self.status or 499
        gateway.metrics.requests.labels(self.route, str(self.status)).inc()
        level = log.debug if self.scope["path"] in OPEN else log.info
        took = round((time.monotonic() - self.started_at) * 1000, 1)
        level("request", **self.fields(), status=self.status, ms=took, complete=None if self.complete else False)


class Origins:
    """Refuses requests of foreign web pages to a gateway without API keys.

    A page in a browser could send them otherwise: across origins (CSRF), or with a host name of its own that leads to
    this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app = app
        settings = gateway.settings
        self.active = settings.api_keys is None
        self.loopback = settings.loopback and not settings.no_auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.active:
            self._check(Headers(scope=scope))
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host, origin = headers.get("host", "localhost"), headers.get("origin")  # pages always send it, HTTP/1.0 may not
        if self.loopback and not _is_loopback(host):
            raise ApiError(
                403,
                "The Host header names another machine; without --api-keys the gateway serves this machine only.",
                code="forbidden",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise ApiError(
                403, "Requests of web pages of another origin are refused without --api-keys.", code="forbidden"
            )


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine by a loopback address or `localhost`."""
    name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Bodies:
    """Limits the size and the slowness of request bodies, in all routes."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app, self.settings = app, gateway.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _Body(scope, receive, self.settings.max_body_bytes, self.settings.body_timeout)
        await self.app(scope, receive, send)


class _Body:
    """The `receive` of one request.

    Raises:
        ApiError: 413 or 408.
    """

    def __init__(self, scope: Scope, receive: Callable[[], Awaitable[Message]], limit: int, timeout: float) -> None:
        self._receive, self._limit, self._timeout = receive, limit, timeout
        self._scope = scope
        self._received = 0
        self._started_at: float | None = None
        self._more = True

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now
            self._limit = self._scope["state"].get("max_body_bytes", self._limit)
            headers = Headers(scope=self._scope)
            if headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise ApiError(400, "The body must not be compressed: Content-Encoding is not supported.")
            self._check(int(headers.get("content-length", 0)))
        least = self._started_at + self._timeout + self._received / MIN_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(min(self._timeout, max(0.0, least - now))):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "The body came too slowly.", code="timeout") from None
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._more = message.get("more_body", False)
            self._check(self._received)
        else:
            self._more = False
        return message

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise ApiError(413, f"The body is larger than {self._limit} bytes.", code="too_large")
