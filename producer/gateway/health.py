"""Routes for operators: `/healthz`, `/readyz` and `/metrics`. They need no key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from producer.gateway.gateway import Gateway
from producer.gateway.metrics import CONTENT_TYPE_LATEST
from producer.gateway.requests import gateway_of


async def healthz(request: Request) -> Response:
    """Answer 200: the process serves."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """Answer 200 if Redis answers and a worker lives, else 503 with the reason."""
    reason = await _not_ready(gateway_of(request))
    return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", 503)


async def _not_ready(gateway: Gateway) -> str | None:
    """Return why the gateway cannot serve requests now; None if it can."""
    if gateway.drain.is_set():
        return "shutting down"
    if not gateway.redis.up:
        return "Redis does not answer"
    if not await gateway.workers.live():
        return f"queue {gateway.settings.queue} has no live worker"
    return None


async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    return Response(gateway_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


ROUTES = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
