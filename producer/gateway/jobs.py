"""`/v1/jobs`: put a job into the queue, look at it, follow its events, cancel it.

A job belongs to the queue, not to the connection: a client that goes away changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import orjson
from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from producer.gateway.gateway import Gateway
from producer.gateway.idempotency import IdempotencyKey, begin, idempotency_key
from producer.gateway.inflight import End, Interrupted
from producer.gateway.keys import Caller
from producer.gateway.redis_watch import REDIS_SECONDS
from producer.gateway.requests import caller_of, gateway_of, read_json
from producer.gateway.responses import JsonResponse, job_not_found
from producer.gateway.sse import EventStream, Frames, event_frame, named_error_frame
from producer.gateway.submit import CANCEL_S, UNKNOWN, Order, entry_for, require_worker, submit
from tokenmill.client.core import JobLost
from tokenmill.client.follow import check_event_id
from tokenmill.client.handles import AsyncJob
from tokenmill.client.state import Lookup
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.errors import clean
from tokenmill.protocol.events import SEAL_ID, Event, FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.job import MAX_SECONDS
from tokenmill.protocol.keys import LANES, is_name
from tokenmill.protocol.state import JobStatus

LONGEST_WAIT_S: Final = 300.0
LAST_EVENT: Final = "Last-Event-ID"
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "body": (dict,),
    "id": (str,),
    "priority": (str,),
    "ttl": (int, float),
    "delay": (int, float),
    "group": (str,),
    "tenant": (str,),
    "callback": (str,),
    "max_attempts": (int,),
}
"""The keys of a job, with the types of their values."""
_KINDS: Final = {dict: "an object", str: "a string", int: "a whole number", float: "a number of seconds"}


# ── POST /v1/jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def submit_job(request: Request) -> Response:
    """Answer `POST /v1/jobs`: 202 once the queue has the job.

    A submit that Redis did not answer may have been carried out: a job that its client cannot find again is cancelled.
    """
    gateway, caller = gateway_of(request), caller_of(request)
    data = await read_json(request)
    key, given = idempotency_key(request, caller, data), _typed(data)
    own_id = "id" in given
    order = _order(gateway, caller, request, given, key)
    job_id = order.entry.id
    gateway.require_redis()
    try:
        use = await begin(gateway, key, job_id)
        await require_worker(gateway, order.body.get("model"), key, use, job_id, wait=False)
        await submit(gateway, replace(order, first=use.first))
    except (RedisError, TimeoutError):
        if key is None and not own_id:
            gateway.inflight.cancel(job_id, gateway.client.job(job_id), UNKNOWN, CANCEL_S)
        raise
    request.state.job_id = job_id
    return JsonResponse({"id": job_id, "status": JobStatus.QUEUED.value}, 202, {"Location": f"/v1/jobs/{job_id}"})


def _order(
    gateway: Gateway, caller: Caller, request: Request, given: dict[str, Any], key: IdempotencyKey | None
) -> Order:
    """Check the keys of a job, whose types are right.

    Raises:
        ApiError: 400, naming the key.
        JobError: a worker would refuse the job.
    """
    body, own, priority = given.pop("body"), given.pop("id", None), given.pop("priority", None)
    delay, tenant = given.pop("delay", None), given.pop("tenant", None)
    if own is not None and not is_name(own):
        raise _wrong("id", "must match [A-Za-z0-9_.-]{1,128}")
    if caller.tenant is not None and tenant not in (None, caller.tenant):
        raise _wrong("tenant", "must be the tenant of the API key, or absent")
    if given.get("ttl", 1) <= 0:
        raise _wrong("ttl", "must be more than 0 seconds")
    if delay is not None and not 0 <= delay <= MAX_SECONDS:
        raise _wrong("delay", f"must be a number of seconds from 0 to {MAX_SECONDS:.0f}")
    entry = entry_for(
        gateway,
        request,
        body,
        id=own if own is not None or key is None else key.id,
        tenant=tenant if caller.tenant is None else caller.tenant,
        **given,
    )
    return Order(caller, entry, body, _lane(caller, priority), delay, key)


def _typed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a job that are not null, after a check of their types."""
    given = {name: value for name, value in data.items() if value is not None}
    for name, value in given.items():
        types = _TYPES.get(name)
        if types is None:
            raise _wrong(name, "is not a key of a job; the keys of the request itself belong into body")
        if isinstance(value, bool) or not isinstance(value, types):
            raise _wrong(name, f"must be {_KINDS[types[-1]]}")
    if "body" not in given:
        raise _wrong("body", "is missing: the prompt or the messages, and the parameters")
    return given


def _lane(caller: Caller, priority: str | None) -> str:
    """Return the lane of a job: at most the caller's."""
    if priority is None:
        return caller.lane
    if priority not in LANES:
        raise _wrong("priority", f"must be one of {', '.join(LANES)}")
    if caller.priority is not None and LANES.index(priority) < LANES.index(caller.priority):
        raise _wrong("priority", f"the API key allows {caller.priority} at most")
    return priority


def _wrong(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name}: {what}", param=name)


# ── the job afterwards ────────────────────────────────────────────────────────────────────────────────────────────────


async def show(request: Request) -> Response:
    """Answer `GET /v1/jobs/<id>`; with `?wait=30` wait so many seconds for the end."""
    seconds = _wait_of(request)
    job, found = await _find(request, with_result=True)
    if found.result is None and seconds > 0:
        await _wait(request, job, seconds)
        job, found = await _find(request, with_result=True)
    result = None if found.result is None else orjson.Fragment(found.result.to_json())
    return JsonResponse({"id": job.id, "status": found.status.value, "result": result})


async def _wait(request: Request, job: AsyncJob, seconds: float) -> None:
    """Wait for the end of a job: until the time is over, the client goes away or the gateway shuts down."""
    try:
        async with gateway_of(request).inflight.watch(request.receive):
            await job.result(timeout=seconds)
    except Interrupted as interrupted:
        if interrupted.end is End.GONE:
            raise ClientDisconnect from None
    except TimeoutError:
        pass
    except JobLost:
        raise job_not_found(job.id) from None


def _wait_of(request: Request) -> float:
    """Return the seconds that a client wants to wait."""
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise _wrong("wait", f"must be a number of seconds from 0 to {LONGEST_WAIT_S:.0f}")
    return seconds


async def cancel(request: Request) -> Response:
    """Answer `POST /v1/jobs/<id>/cancel` with the reply of the client library's cancel."""
    job, _ = await _find(request)
    async with gateway_of(request).redis.limit():
        reply = await job.cancel(timeout=REDIS_SECONDS)
    return JsonResponse({"id": job.id, "status": reply.value})


async def events(request: Request) -> Response:
    """Answer `GET /v1/jobs/<id>/events`: the job's events as they come, after `Last-Event-ID` if it is given."""
    last = request.headers.get(LAST_EVENT) or request.query_params.get("last_event_id") or "0"
    try:
        check_event_id(last, LAST_EVENT)
    except ValueError as error:
        raise ApiError(400, str(error), param="last_event_id") from None
    job, found = await _find(request)
    if found.status.ended and _after_final(last):
        return Response(status_code=204)  # the one answer after which an EventSource does not connect again
    if request.method == "HEAD":
        return Response(media_type=EventStream.media_type)
    gateway = gateway_of(request)
    gateway.metrics.streams.inc()

    def ended(_: End | None) -> None:
        gateway.metrics.streams.dec()

    return EventStream(_frames(job, last), gateway.inflight, on_end=ended, failure=named_error_frame)


def _after_final(event_id: str) -> bool:
    """Return whether an ID is that of a final event: these begin with the time, all others with a fence."""
    return int(event_id.partition("-")[0]) >= int(SEAL_ID.partition("-")[0])


async def _frames(job: AsyncJob, from_id: str) -> Frames:
    try:
        async with aclosing(job.stream(from_id)) as stream:
            async for event in stream:
                name, data = _data(event)
                yield event_frame(name, event.id, data)
    except JobLost:
        raise job_not_found(job.id) from None


def _data(event: Event) -> tuple[str, dict[str, Any]]:
    """Return the type of an event, and its fields as docs/protocol.md names them."""
    match event:
        case StartEvent():
            return "start", {
                "type": "start",
                "worker": event.worker,
                "attempt": event.attempt,
                "prompt_tokens": event.prompt_tokens,
            }
        case TokenEvent():
            data = {"type": "token", "index": event.index, "text": event.text, "tokens": event.tokens}
            if event.logprobs is not None:
                data["logprobs"] = event.logprobs
            if event.token_ids is not None:
                data["token_ids"] = event.token_ids
            return "token", data
        case FinalEvent():
            result = None if event.result is None else orjson.Fragment(event.result.to_json())
            return "final", {"type": "final", "status": event.status.value, "result": result}


async def _find(request: Request, with_result: bool = False) -> tuple[AsyncJob, Lookup]:
    """Return the job that the path names.

    Raises:
        ApiError: 404: the job is unknown, or belongs to another tenant.
    """
    gateway, caller, job_id = gateway_of(request), caller_of(request), request.path_params["id"]
    if not is_name(job_id):
        raise job_not_found(clean(job_id, 128))
    request.state.job_id = job_id
    async with gateway.redis.limit():
        found = await gateway.client.lookup(job_id, timeout=REDIS_SECONDS, with_result=with_result)
    if found.status is JobStatus.UNKNOWN or caller.tenant not in (None, found.tenant):
        raise job_not_found(job_id)
    return AsyncJob(gateway.client, job_id, known=True), found


ROUTES = [
    Route("/v1/jobs", submit_job, methods=["POST"]),
    Route("/v1/jobs/{id}", show, methods=["GET"]),
    Route("/v1/jobs/{id}/events", events, methods=["GET"]),
    Route("/v1/jobs/{id}/cancel", cancel, methods=["POST"]),
]
