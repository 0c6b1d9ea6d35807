"""`Idempotency-Key`: a repeated POST is the same job.

    key = idempotency_key(request, caller, body)     # None without the header
    use = await begin(gateway, key, key.id)          # ApiError 409: the key was used for another request
    await forget(gateway, key, key.id)               # the request was refused: the key is free again

The id of the job is a hash of tenant and key. Redis keeps a fingerprint of the request for a
day from the last use of the key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from starlette.requests import Request

from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller
from producer.generations import generation_ids, generation_keys, is_over
from tokenmill.openai.errors import ApiError, key_reused
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result

HEADER: Final = "Idempotency-Key"
TTL_S: Final = 24 * 3600
"""How long a key is remembered after its last use."""
LONGEST: Final = 255
"""Maximum length of a key in characters."""


class IdempotencyKey(NamedTuple):
    """The key of a request, as hashes."""

    id: str
    """Names the key in Redis, and the job."""
    fingerprint: str
    """Identifies method, path and body."""


class Use(NamedTuple):
    """A use of a key."""

    first: bool
    """Whether it is the first use, as it is without a key."""
    begun_at: int
    """Unix time in seconds of the first use."""
    has_job: bool
    """Whether the job exists already."""


def idempotency_key(request: Request, caller: Caller, body: Mapping[str, Any]) -> IdempotencyKey | None:
    """Return the idempotency key of a request as hashes; None if it has none.

    Raises:
        ApiError: 400 for a malformed key.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not key.strip() or len(key) > LONGEST:
        raise ApiError(400, f"{HEADER} must have 1 to {LONGEST} characters.")
    canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    what = f"{request.method} {request.url.path}\n".encode() + canonical
    return IdempotencyKey(_hash(orjson.dumps([caller.tenant, key])), _hash(what))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def begin(gateway: Gateway, key: IdempotencyKey | None, job_id: str) -> Use:
    """Note the use of a key for a job.

    Raises:
        ApiError: 409: the key was used for another request, or the job is of an unknown request; 503: Redis is away.
    """
    now = int(time.time())
    if key is None:
        return Use(True, now, False)
    keys, redis = gateway.client.keys, gateway.client.redis
    name = keys.idempotency(key.id)
    async with gateway.redis_limit():
        pipe = redis.pipeline(transaction=True)
        pipe.set(name, f"{key.fingerprint}:{now}", nx=True, ex=TTL_S)
        pipe.get(name)
        pipe.exists(*_traces(keys, job_id))
        first, known, exists = await pipe.execute()
        if first and exists:  # the fingerprint has expired, or the job was never one of this key
            await redis.delete(name)
            raise key_reused()
        fingerprint, _, begun_at = (known or b"").decode().partition(":")
        if fingerprint != key.fingerprint:
            raise key_reused()
        if not first:
            await redis.expire(name, TTL_S)
    return Use(bool(first), int(begun_at or now), bool(exists))


async def current_id(gateway: Gateway, key: IdempotencyKey, unanswered: Callable[[Result], bool]) -> str:
    """Return the id of the job to submit or join: the first generation that has or may get an answer.

    Args:
        unanswered: says of a result that its job ended because its client went away.
    """
    async with gateway.redis_limit():
        for job_id in generation_ids(key.id, first=key.id):
            values = await gateway.client.redis.mget(generation_keys(gateway.client.keys, job_id))
            if not is_over(values, unanswered):
                return job_id
    raise RuntimeError("unreachable")


async def forget(gateway: Gateway, key: IdempotencyKey, job_id: str) -> None:
    """Let the key be used for another request: this one was refused. If an equal one has made the job, the key stays.

    Raises:
        ApiError: 503: Redis is away; the key stays.
    """
    keys, redis = gateway.client.keys, gateway.client.redis
    async with gateway.redis_limit():
        if not await redis.exists(*_traces(keys, job_id)):
            await redis.delete(keys.idempotency(key.id))


def _traces(keys: Keys, job_id: str) -> list[str]:
    """Return the keys of which a job has one from its submit until its result expires."""
    return [keys.job(job_id), keys.result(job_id), keys.delayed_job(job_id)]
