"""A gateway process with routes of its own, which need no Redis: `python -m tests.producer.gateway.served`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from producer.gateway import connection
from producer.gateway.app import build
from producer.gateway.requests import gateway_of, limit_body, read_json
from producer.gateway.server import serve
from producer.gateway.settings import GatewaySettings
from tokenmill.cli.logs import configure

LARGE = 4 * 1024 * 1024


async def echo(request: Request) -> Response:
    """Answer with the JSON of the body."""
    request.state.job_id = request.query_params.get("id", "job-7")
    return JSONResponse(await read_json(request))


async def size(request: Request) -> Response:
    """Answer with the length of the body, which may be larger than bodies of JSON."""
    limit_body(request, LARGE)
    return JSONResponse(len(await request.body()))


async def ticks(request: Request) -> Response:
    """Stream a line each 50 ms: as many as the query says, or until the deadline of the shutdown."""
    gateway = gateway_of(request)
    count = int(request.query_params.get("count", sys.maxsize))

    async def lines() -> AsyncIterator[bytes]:
        for number in range(count):
            if gateway.deadline.is_set():
                yield b"shutdown\n"
                return
            yield f"{number}\n".encode()
            await asyncio.sleep(0.05)
        yield b"end\n"

    return StreamingResponse(lines(), media_type="text/plain")


async def flood(request: Request) -> Response:
    """Stream without end, as fast as the client reads."""

    async def blocks() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    return StreamingResponse(blocks())


async def stuck(request: Request) -> Response:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def patient(request: Request) -> Response:
    """Answer when the client has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
    return Response()


async def boom(request: Request) -> Response:
    """Fail with a secret in the exception."""
    raise RuntimeError("secret-of-the-exception")


if __name__ == "__main__":
    connection.STALL_SECONDS = int(os.environ.get("SERVED_STALL_SECONDS", connection.STALL_SECONDS))
    settings = GatewaySettings()
    configure(settings.log_format, settings.log_level)
    app = build(settings)
    app.router.routes += [
        Route("/echo", echo, methods=["POST"]),
        Route("/size", size, methods=["POST"]),
        *(Route(f"/{handler.__name__}", handler) for handler in (ticks, flood, stuck, patient, boom)),
    ]
    sys.exit(serve(app))
