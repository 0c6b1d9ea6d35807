"""`Idempotency-Key`: a repeated POST is the same job.

    key = idempotency_key(request, caller, body)     # None without the header
    first = await begin(gateway, key)                # ApiError 409: the key was used for another request
    await forget(gateway, key)                       # nothing came of the request

The id of the job is a hash of tenant and key. A fingerprint of the request lies in Redis for a day from its last use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson
from starlette.requests import Request

from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller
from tokenmill.openai.errors import ApiError

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


def idempotency_key(request: Request, caller: Caller, body: Mapping[str, Any]) -> IdempotencyKey | None:
    """Return the idempotency key of a request; None if it has none.

    Raises:
        ApiError: 400 for a malformed key.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not key.strip() or len(key) > LONGEST:
        raise ApiError(400, f"{HEADER} must have 1 to {LONGEST} characters.", code="invalid_request")
    canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    what = f"{request.method} {request.url.path}\n".encode() + canonical
    return IdempotencyKey(_hash(orjson.dumps([caller.tenant, key])), _hash(what))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def begin(gateway: Gateway, key: IdempotencyKey) -> bool:
    """Note the use of a key; return whether it is the first.

    Raises:
        ApiError: 409: the key was used for another request; 503: Redis is away.
    """
    name = gateway.client.keys.idempotency(key.id)
    async with gateway.redis_limit():
        pipe = gateway.client.redis.pipeline(transaction=True)
        pipe.set(name, key.fingerprint, nx=True, ex=TTL_S)
        pipe.get(name)
        first, known = await pipe.execute()
        if known is not None and known.decode() != key.fingerprint:
            raise reused()
        if not first:
            await gateway.client.redis.expire(name, TTL_S)
    return bool(first)


async def forget(gateway: Gateway, key: IdempotencyKey) -> None:
    """Let the key be used for another request: this one was refused, and has no job.

    Raises:
        ApiError: 503: Redis is away; the key stays.
    """
    async with gateway.redis_limit():
        await gateway.client.redis.delete(gateway.client.keys.idempotency(key.id))


def reused() -> ApiError:
    """Return the error of a key that was used for another request."""
    return ApiError(
        409, f"The {HEADER} was used for another request; send a new key.", code="idempotency_key_reused", retry=False
    )
