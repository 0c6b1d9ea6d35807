"""Event streams: frames are pulled, silence is filled, a client that does not read ends its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from producer.gateway import sse
from producer.gateway.inflight import End, InFlight
from producer.gateway.sse import DONE, PING, EventStream, data_frame, event_frame, named_error_frame
from tokenmill.client.patience import WaitTimeout
from tokenmill.openai.errors import ApiError


class Client:
    """An ASGI client that reads everything, until `reads` is cleared."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False
        self.headers: dict[bytes, bytes] = {}
        self.reads, self.gone = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.ended: list[End | None] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        else:
            self.body += message["body"]
            self.complete = not message["more_body"]

    async def get(self, frames: Any, deadline: asyncio.Event | None = None, **options: Any) -> Client:
        response = EventStream(frames, InFlight(deadline or asyncio.Event()), on_end=self.ended.append, **options)
        await response({"type": "http"}, self.receive, self.send)
        return self


async def frames(*parts: bytes | Exception) -> AsyncIterator[bytes]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


async def endless(pulled: list[int]) -> AsyncIterator[bytes]:
    try:
        while True:
            pulled.append(1)
            yield data_frame({"n": len(pulled)})
    finally:
        pulled.append(-1)


async def silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_a_stream_sends_its_frames_and_ends() -> None:
    async def test() -> None:
        client = await Client().get(frames(data_frame({"a": 1}), DONE), first=event_frame("start", "1-0", {}))
        assert client.body == b'event: start\nid: 1-0\ndata: {}\n\ndata: {"a":1}\n\ndata: [DONE]\n\n'
        assert client.complete
        assert client.ended == [None]
        assert client.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert client.headers[b"cache-control"] == b"no-cache"
        assert client.headers[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in client.headers

    run(test())


def test_an_error_is_the_last_event_of_a_stream() -> None:
    async def test() -> None:
        client = await Client().get(frames(b"data: 1\n\n", ApiError(500, "It broke.", code="engine_error")))
        _, last, rest = client.body.split(b"\n\n")
        assert last.startswith(b'data: {"error":{"message":"It broke."')
        assert rest == b""
        assert client.complete
        named = await Client().get(frames(ApiError(404, "Gone.")), failure=named_error_frame)
        assert named.body.startswith(b'event: error\ndata: {"error":')

    run(test())


@pytest.mark.parametrize("error", [WaitTimeout("job a: not finished"), ValueError("secret"), OSError("secret")])
def test_an_unexpected_error_becomes_an_event_without_details(error: Exception) -> None:
    async def test() -> None:
        client = await Client().get(frames(error))
        assert b'data: {"error":' in client.body
        assert b"secret" not in client.body
        assert client.complete
        assert client.ended == [None]

    run(test())


def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    monkeypatch.setattr(sse, "TICK_S", 0.01)

    async def test() -> None:
        client = Client()
        task = asyncio.create_task(client.get(silent()))
        while client.body.count(PING) < 3:
            await asyncio.sleep(0.01)
        client.gone.set()
        with pytest.raises(ClientDisconnect):
            await task
        assert client.body.replace(PING, b"") == b""

    run(test())


def test_frames_are_pulled_only_as_the_client_reads_them() -> None:
    async def test() -> None:
        client, pulled = Client(), list[int]()
        task = asyncio.create_task(client.get(endless(pulled)))
        while not pulled:
            await asyncio.sleep(0)
        client.reads.clear()
        await asyncio.sleep(0.05)
        before = len(pulled)
        await asyncio.sleep(0.1)
        assert len(pulled) == before
        client.gone.set()
        client.reads.set()
        with pytest.raises(ClientDisconnect):
            await task
        assert pulled[-1] == -1
        assert client.ended == [End.GONE]

    run(test())


def test_a_client_that_does_not_read_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.05)
    monkeypatch.setattr(sse, "TICK_S", 0.01)

    async def test() -> None:
        client, pulled = Client(), list[int]()
        task = asyncio.create_task(client.get(endless(pulled)))
        while not pulled:
            await asyncio.sleep(0)
        client.reads.clear()
        with pytest.raises(ClientDisconnect):
            await task
        assert client.ended == [End.STALLED]
        assert pulled[-1] == -1

    run(test())


def test_the_deadline_of_a_shutdown_ends_a_stream_with_an_error_event() -> None:
    async def test() -> None:
        client, deadline = Client(), asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, deadline.set)
        await client.get(silent(), deadline)
        assert b'"code":"shutting_down"' in client.body
        assert client.complete
        assert client.ended == [End.CLOSING]

    run(test())


def test_a_stream_whose_server_says_that_the_client_is_gone_ends() -> None:
    async def test() -> None:
        client, pulled = Client(), list[int]()

        async def send(message: Message) -> None:
            if message["type"] != "http.response.start":
                raise OSError("closed")

        client.send = send  # type: ignore[method-assign]
        with pytest.raises(ClientDisconnect):
            await client.get(endless(pulled))
        assert client.ended == [End.GONE]
        assert pulled[-1] == -1

    run(test())
