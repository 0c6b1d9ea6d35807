"""Server-sent events: an ASGI response that sends frames as fast as its client reads them.

    return EventStream(frames, inflight, on_end=claim_ended)

Frames are pulled: the next frame is requested when the client's socket has taken the frame before, so that a slow
reader costs no memory. A comment after each silence of `PING_S` keeps proxies from closing the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from producer.gateway.errors import api_error, internal_error
from producer.gateway.inflight import End, InFlight, Interrupted, Watch
from producer.gateway.responses import shutting_down
from tokenmill.openai.errors import ApiError

log = structlog.get_logger()

Frames = AsyncGenerator[bytes, None]

PING_S: Final = 15.0
"""Silence after which a comment is sent."""
STALL_S: Final = 300.0
"""How long a client may take to read what was sent before its stream ends."""
TICK_S: Final = 1.0
"""How often silence and stalls are looked for."""
LAST_S: Final = 1.0
"""How long the end of a response may take."""

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second header keeps nginx from buffering."""


def data_frame(data: Mapping[str, Any]) -> bytes:
    """Return an event without a name, as OpenAI's streams have them."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def event_frame(name: str, event_id: str | None, data: Mapping[str, Any]) -> bytes:
    """Return an event with a name and, unless it is None, an id."""
    head = f"event: {name}\n" if event_id is None else f"event: {name}\nid: {event_id}\n"
    return head.encode() + data_frame(data)


def error_frame(error: ApiError) -> bytes:
    """Return the last event of one of OpenAI's streams that failed."""
    return data_frame(error.body())


def named_error_frame(error: ApiError) -> bytes:
    """Return the last event of a stream of named events that failed."""
    return event_frame("error", None, error.body())


class EventStream(Response):
    """Sends frames until they end, the client goes away or stalls, or the gateway shuts down.

    Args:
        frames: what is sent. An exception of it becomes the last frame.
        inflight: the waits of the gateway.
        first: a frame that was taken from `frames` before.
        on_end: called once: with None if the frames ended or failed, otherwise with what ended the stream before.
        failure: makes the last frame of a stream that failed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Frames,
        inflight: InFlight,
        *,
        first: bytes = b"",
        on_end: Callable[[End | None], None],
        failure: Callable[[ApiError], bytes] = error_frame,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames, self._inflight, self._first = frames, inflight, first
        self._on_end, self._failure = on_end, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end: End | None = None
        line = _Line(send)
        try:
            async with self._inflight.watch(receive) as watch, aclosing(self._frames):
                with line.kept_alive(watch):
                    await line.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._pump(line)
        except Interrupted as interrupted:
            end = interrupted.end
        finally:
            self._on_end(end)
        if end in (End.GONE, End.STALLED):
            raise ClientDisconnect
        await _finish(line, self._failure(shutting_down()) if end else b"")

    async def _pump(self, line: _Line) -> None:
        try:
            if self._first:
                await self._send(line, self._first)
            async for frame in self._frames:
                await self._send(line, frame)
        except Interrupted:
            raise
        except Exception as error:  # the status code is sent: the client gets an event
            known = api_error(error)
            if known is None:
                log.error("stream_failed", exc_info=error)
            await line.send_frame(self._failure(known or internal_error()))

    async def _send(self, line: _Line, frame: bytes) -> None:
        with self._inflight.answers.sent(len(frame)):
            await line.send_frame(frame)


async def _finish(line: _Line, frame: bytes) -> None:
    """End the response. If the client does not read in time, the server closes the connection."""
    with suppress(TimeoutError, Interrupted):
        async with asyncio.timeout(LAST_S):
            await line.send_frame(frame, more=False)


class _Line:
    """The sending side of a response: one message at a time, and comments in between.

    Its methods raise `Interrupted` if the ASGI server says that the client went away.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        """When the last message was begun, or taken."""

    async def send(self, message: Message) -> None:
        async with self._lock:
            self._at = self._loop.time()
            try:
                await self._send(message)
            except OSError:
                raise Interrupted(End.GONE) from None
            self._at = self._loop.time()

    async def send_frame(self, frame: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": frame, "more_body": more})

    @contextmanager
    def kept_alive(self, watch: Watch) -> Iterator[None]:
        """While the block runs, send comments in silences, and end the watch of a client that does not read."""
        ping: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle

        async def comment() -> None:
            with suppress(Interrupted):  # the watch sees it, too
                await self.send_frame(PING)

        def tick() -> None:
            nonlocal ping, timer
            idle = self._loop.time() - self._at
            if self._lock.locked():
                if idle >= STALL_S:
                    watch.end(End.STALLED)
            elif idle >= PING_S:
                ping = self._loop.create_task(comment())
            timer = self._loop.call_later(TICK_S, tick)

        timer = self._loop.call_later(TICK_S, tick)
        try:
            yield
        finally:
            timer.cancel()
            if ping is not None:
                ping.cancel()
