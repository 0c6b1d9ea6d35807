"""A gateway in the process of the test: the application without server and background tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from producer.gateway.app import build
from producer.gateway.gateway import Gateway
from producer.gateway.settings import GatewaySettings
from tests.tokenmill.mini import Queue


@asynccontextmanager
async def served(queue: Queue, **settings: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, Gateway]]:
    """A client of a gateway of the queue, and the gateway's parts."""
    app = build(GatewaySettings(redis=queue.url, queue=queue.keys.queue, **settings))
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            yield client, app.state.gateway
        finally:
            await app.state.gateway.close()
