"""Put the job of a request into the queue, with its rates and its Idempotency-Key.

entry = entry_for(gateway, request, body, tenant=caller.tenant)         # JobError: a worker would refuse the job
use = await begin(gateway, key, entry.id)
charge = await submit(gateway, Order(caller, entry, body, caller.lane, key=key, first=use.first))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from producer.gateway.gateway import Gateway
from producer.gateway.idempotency import IdempotencyKey, Use, forget
from producer.gateway.keys import Caller
from producer.gateway.rates import Charge, estimate
from producer.gateway.redis_watch import REDIS_SECONDS
from tokenmill.client.core import entry_of
from tokenmill.openai.errors import ApiError, key_reused
from tokenmill.protocol.calls import EnqueueRefused, JobExists
from tokenmill.protocol.job import JobEntry, is_traceparent

CANCEL_S: Final = 3600.0
"""How long the cancel of a job without a time to live is tried, and kept by Redis."""
UNKNOWN: Final = "submit without an answer"
"""The reason of a cancel: Redis did not answer whether the queue has the job, and the client cannot ask for it."""


def entry_for(gateway: Gateway, request: Request, body: Mapping[str, Any], **options: Any) -> JobEntry:
    """Build the entry of a request's job and check it by the rules of the worker.

    Args:
        options: further arguments of `entry_of`.

    Raises:
        JobError: a worker would refuse the job.
    """
    trace = request.headers.get("traceparent", "")
    return entry_of(
        body,
        traceparent=trace if is_traceparent(trace) else None,
        max_bytes=gateway.settings.max_body_bytes,
        **options,
    )


@dataclass(frozen=True)
class Order:
    """A checked job that is to be put into the queue."""

    caller: Caller
    entry: JobEntry
    body: Mapping[str, Any]
    """The body of the entry."""
    priority: str
    delay: float | None = None
    key: IdempotencyKey | None = None
    first: bool = True
    """Whether this is the first use of `key`."""


async def submit(gateway: Gateway, order: Order) -> Charge | None:
    """Put a job into the queue; return what its caller's rates were charged.

    Returns:
        None if the job exists already and belongs to an earlier request with the same Idempotency-Key.

    Raises:
        ApiError: 409: the id is in use; 429: a rate of the caller is reached.
        QueueFull, QuotaExceeded: the queue refused the job.
        redis.RedisError, TimeoutError: Redis is away. The queue may have taken the job.
    """
    key, entry = order.key, order.entry
    try:
        async with gateway.redis.limit():
            return await _submit(gateway, order)
    except JobExists:
        if key is None:
            raise ApiError(409, f"Job {entry.id} exists already.", code="job_exists") from None
        async with gateway.redis.limit():
            found = await gateway.client.lookup(entry.id, timeout=REDIS_SECONDS, with_result=False)
        if found.tenant != entry.tenant:
            raise key_reused() from None
        return None
    except (EnqueueRefused, ApiError):
        if key is not None and order.first:
            await forget(gateway, key, entry.id)
        raise


async def require_worker(
    gateway: Gateway, model: str | None, key: IdempotencyKey | None, use: Use, job_id: str, *, wait: bool = True
) -> None:
    """Check that a live worker serves a model, unless the job exists: the answer of an earlier request needs no worker.

    A request that is refused does not use up its Idempotency-Key.

    Raises:
        ApiError, redis.RedisError, TimeoutError: as `LiveWorkers.require`.
    """
    if use.has_job:
        return
    try:
        await gateway.workers.require(model, wait=wait)
    except ApiError:
        if key is not None and use.first:
            await forget(gateway, key, job_id)
        raise


async def _submit(gateway: Gateway, order: Order) -> Charge:
    charge = await gateway.rates.admit(order.caller, estimate(order.body))
    try:
        await gateway.client.submit_entry(order.entry, order.priority, delay=order.delay, timeout=REDIS_SECONDS)
    except EnqueueRefused:
        gateway.spawn(gateway.rates.settle(charge, 0), "settle_rate")
        raise
    return charge
