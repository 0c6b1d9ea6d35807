"""HTTP/1.1 connections of the gateway: uvicorn's, with limits that uvicorn lacks.

A connection is closed if the headers of a request take longer than --header-timeout, if the client takes nothing of an
answer for `STALL_SECONDS`, or if there are too many connections. Faulty requests get OpenAI's errors. A client that
goes away is noticed at once, even if it has sent bytes that are not read yet. A body in tiny
chunks is refused: reading 256 KiB of them takes the time of a thousand requests, in which no other client is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
from typing import Any, ClassVar, Final, cast

import h11
import orjson
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from producer.gateway.middleware import MAX_HEADER_BYTES
from tokenmill.openai.errors import ApiError

log = structlog.get_logger()

STALL_SECONDS: Final = 300
"""How long a client may take nothing of an answer."""
KEEP_ALIVE_SECONDS: Final = 65
"""How long a connection may be idle after a request; longer than proxies keep theirs."""
END_SECONDS: Final = 0.25
"""How often a connection that is not read is checked for its end: a further request waits behind the present one, or
the body comes faster than it is taken."""
MAX_CHUNKS: Final = 8192
"""Number of chunks that a body may have, beside one for each `CHUNK_BYTES` of it."""
CHUNK_BYTES: Final = 64
WARN_SECONDS: Final = 60
"""Minimum time between two warnings of too many connections."""
_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": STALL_SECONDS * 1000}
"""Options of a connection's socket: a client that vanished is noticed while the gateway has nothing to send, too."""


class Connection(H11Protocol):
    """A connection of a client.

    Args:
        header_timeout: seconds for the headers of a request.
        max_connections: maximum number of connections; a further connection is closed at once.
    """

    _warn_from: ClassVar[float] = 0.0
    """When, by the clock of the loop, the next warning may be logged."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        header_timeout: float,
        max_connections: int,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(h11.SERVER, MAX_HEADER_BYTES)
        self._header_timeout, self._max_connections = header_timeout, max_connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._warn()
            transport.abort()
            return
        _watch_peer(transport.get_extra_info("socket"))
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._await_headers()
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # data behind a faulty request
            self.transport.abort()
        if not self._idle:
            self._stop("_header_timer")

    def handle_events(self) -> None:
        super().handle_events()
        if self.flow.read_paused and self._end_timer is None:
            self._end_timer = self.loop.call_later(END_SECONDS, self._look_for_end)

    def eof_received(self) -> None:
        if not self._idle:  # asyncio closes the connection only when the client has taken what was sent
            self._end_cycle()
            self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in ("_header_timer", "_stall_timer", "_end_timer"):
            self._stop(timer)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stop("_stall_timer")
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop("_stall_timer")
        super().resume_writing()

    def shutdown(self) -> None:
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()
        if self._idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, in OpenAI's form, and close the connection."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            error = ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", code="too_large")
        else:
            error = ApiError(400, "The request is not valid HTTP.")
        if not self._idle:  # a faulty body, or a faulty request behind another
            self._end_cycle()
        with contextlib.suppress(h11.LocalProtocolError):
            for event in _answer(error):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _warn(self) -> None:
        """Log that there are too many connections, each `WARN_SECONDS` at most."""
        now = self.loop.time()
        if now >= Connection._warn_from:
            Connection._warn_from = now + WARN_SECONDS
            log.warning("too_many_connections", limit=self._max_connections)

    @property
    def _idle(self) -> bool:
        """Whether no request is being served."""
        return cast(object, self.cycle) is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        """Start the timer of a request's headers, unless it runs."""
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        log.debug("headers_too_slow")
        self.transport.abort()

    def _end_cycle(self) -> None:
        """Let the present request know that its client is gone."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _look_for_end(self) -> None:
        """End the connection if its client has closed it, as long as it is not read."""
        self._end_timer = None
        if not self.flow.read_paused:
            return
        if _closed_by_peer(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._end_timer = self.loop.call_later(END_SECONDS, self._look_for_end)

    def _stop(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


class _Parser(h11.Connection):
    """h11's parser of requests, which refuses bodies in tiny chunks and bodies with two lengths.

    A proxy could take another of the two lengths, and with it another end of the request (request smuggling).
    """

    _chunks = 0.0
    """Chunks of the present body, less those that its size allows."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end - len(event.data) / CHUNK_BYTES
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError("chunks are too small")
        return event


def _answer(error: ApiError) -> list[h11.Event]:
    body = orjson.dumps(error.body())
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    return [h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]


def _closed_by_peer(sock: socket.socket) -> bool:
    """Return whether the other end has closed a connection, whose last bytes may not have been read."""
    poll = select.poll()
    poll.register(sock.fileno(), getattr(select, "POLLRDHUP", 0))  # POLLHUP and POLLERR are always reported
    return bool(poll.poll(0))


def _watch_peer(sock: socket.socket) -> None:
    """Let the kernel probe the other end of a connection, and end the connection if it does not answer."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # they differ between systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
