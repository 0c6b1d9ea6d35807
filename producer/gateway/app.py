"""Build the gateway's ASGI application.

app = build(GatewaySettings(queue="default"))
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from producer.gateway import batches, files, generate, health, jobs, models, openapi
from producer.gateway.auth import Auth
from producer.gateway.errors import http_exception
from producer.gateway.gateway import Gateway
from producer.gateway.keys import KeyRing
from producer.gateway.middleware import Bodies, Frame, Origins
from producer.gateway.settings import GatewaySettings
from producer.gateway.storing import open_folder
from tokenmill.client.aio import AsyncClient

__all__ = ["Gateway", "build"]

ROUTES: list[BaseRoute] = [
    route for module in (health, models, generate, jobs, files, batches, openapi) for route in module.ROUTES
]


def build(settings: GatewaySettings, *, client: AsyncClient | None = None) -> Starlette:
    """Build the application of a gateway; `app.state.gateway` holds its parts.

    Args:
        client: reaches the queue; by default made from the settings. It is closed at the end of the lifespan.

    Raises:
        KeysError: the file --api-keys is wrong.
        FilesError: the folder --files cannot be used.
    """
    keys = None if settings.api_keys is None else KeyRing(settings.api_keys)
    client = client or AsyncClient(settings.redis, settings.queue, prefix=settings.prefix)
    storage = None if settings.files is None else open_folder(settings.files)
    gateway = Gateway(settings, client, keys=keys, storage=storage)
    app = Starlette(
        routes=ROUTES,
        lifespan=_lifespan,
        exception_handlers={HTTPException: http_exception},
        middleware=[
            Middleware(Frame, gateway=gateway),
            Middleware(Origins, gateway=gateway),
            Middleware(Auth, gateway=gateway),
            Middleware(Bodies, gateway=gateway),
        ],
    )
    app.router.redirect_slashes = False  # the target would have the scheme and host that a proxy sees
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    """Watch Redis while the application runs; close its connections afterwards."""
    gateway: Gateway = app.state.gateway
    gateway.spawn(gateway.redis.run(), "redis_watch")
    if gateway.keys is not None:
        gateway.spawn(gateway.keys.watch(), "watch_api_keys")
    try:
        yield
    finally:
        await gateway.close()
