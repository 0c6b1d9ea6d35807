"""A TCP proxy between workers and Redis that can be far away, cut connections, swallow replies and go silent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class Proxy:
    """A proxy on a thread of its own; any thread may call its methods."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.delay = 0.0
        """Seconds that each reply takes longer."""
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._deaf = False
        """Replies are swallowed."""
        self._open = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def cut(self) -> None:
        """Close every connection, even if data is in transit."""
        self._call(self._cut())

    def point(self, target: int) -> None:
        """Connect new clients to another server, as a host name does after a failover; open connections stay."""
        self._target = target

    def swallow(self, seconds: float) -> None:
        """Pass requests on but no replies, then cut: clients cannot know which commands were executed."""
        self._call(self._swallow(seconds))

    def silence(self, seconds: float) -> None:
        """Pass no data on for a while, with all sockets open."""
        self._call(self._silence(seconds))

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._open.set()
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer, False), self._pump(far_reader, writer, True))
        self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if replies and self._deaf:
                    continue
                if replies and self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _swallow(self, seconds: float) -> None:
        self._deaf = True
        await asyncio.sleep(seconds)
        await self._cut()
        self._deaf = False

    async def _silence(self, seconds: float) -> None:
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()
