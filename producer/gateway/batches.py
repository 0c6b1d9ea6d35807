"""The routes of batches: `/v1/batches`. The clerk runs them."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any, Final

import rq
import structlog
from redis.exceptions import RedisError
from rq.serializers import JSONSerializer
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from producer.files.batches import cancel_batch, create_batch, find_batch, list_batches
from producer.files.rqjobs import enqueue_batch
from producer.files.storage import Bucket
from producer.gateway.files import default_ttl
from producer.gateway.gateway import Gateway
from producer.gateway.idempotency import idempotency_key
from producer.gateway.redis_watch import PING_SECONDS
from producer.gateway.requests import caller_of, gateway_of, read_json
from producer.gateway.storing import page_of, storage_of, stored
from tokenmill.protocol.connection import command_client, ends_by

MAX_LIST: Final = 100
DEFAULT_LIST: Final = 20

log = structlog.get_logger()


async def post_batch(request: Request) -> Response:
    """Create a batch, and an RQ job that runs it."""
    gateway, storage, caller = gateway_of(request), storage_of(request), caller_of(request)
    gateway.require_redis()
    body, tenant = await read_json(request), caller.tenant
    key = idempotency_key(request, caller, body)
    more: dict[str, Any] = {"root": gateway.client.keys.root, "ttl_s": default_ttl(gateway.settings), "key": key}
    made = await stored(create_batch, storage, tenant, body, **more)
    await run_in_threadpool(_enqueue, gateway, tenant, made["id"])
    return JSONResponse(made)


def _enqueue(gateway: Gateway, tenant: str | None, batch_id: str) -> None:
    """Enqueue the RQ job of a batch. If Redis fails, a clerk finds the batch in the storage some seconds later."""
    queue = _queue(gateway.settings.redis, gateway.settings.batch_queue)
    try:
        with ends_by(time.monotonic() + PING_SECONDS):
            enqueue_batch(queue, tenant, batch_id)
    except (RedisError, OSError) as error:
        log.warning("batch_not_enqueued", id=batch_id, message=str(error))


@lru_cache(maxsize=8)
def _queue(url: str, name: str) -> rq.Queue:
    return rq.Queue(name, connection=command_client(url, retries=0), serializer=JSONSerializer)


async def get_batches(request: Request) -> Response:
    """List the caller's batches."""
    wanted = page_of(request, default=DEFAULT_LIST, most=MAX_LIST)
    return JSONResponse(await stored(list_batches, _bucket(request), **wanted._asdict()))


async def get_batch(request: Request) -> Response:
    """Describe a batch."""
    return JSONResponse(await stored(find_batch, _bucket(request), request.path_params["batch_id"]))


async def post_cancel(request: Request) -> Response:
    """Ask for the end of a batch."""
    return JSONResponse(await stored(cancel_batch, _bucket(request), request.path_params["batch_id"]))


def _bucket(request: Request) -> Bucket:
    return storage_of(request).batches(caller_of(request).tenant)


ROUTES = [
    Route("/v1/batches", post_batch, methods=["POST"]),
    Route("/v1/batches", get_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", get_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", post_cancel, methods=["POST"]),
]
