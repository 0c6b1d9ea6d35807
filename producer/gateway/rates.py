"""Limits the requests and tokens a minute of each API key, for all gateways of a queue together.

charge = await rates.admit(caller, estimate(body))       # raises ApiError 429, with Retry-After
…
await rates.settle(charge, used(result))                 # corrects the estimate
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import structlog
from redis.exceptions import RedisError

from producer.gateway.keys import Caller
from producer.gateway.redis_watch import REDIS_SECONDS
from tokenmill.client.aio import AsyncClient
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.lua import AsyncRunner
from tokenmill.protocol.rates import Wait, charge_call, charge_reply, give_back_call
from tokenmill.protocol.result import Result

log = structlog.get_logger()

BYTES_PER_TOKEN: Final = 4
"""The length of a token in bytes of UTF-8, roughly; a prompt is not tokenized before a worker has it."""
LIMITS: Final[tuple[Literal["rpm", "tpm"], ...]] = ("rpm", "tpm")
TOKENS_SECONDS: Final = 0.25
"""How long requests are refused without asking Redis, after a refusal for their tokens."""
MAX_WAIT_SECONDS: Final = 60.0
"""Maximum `Retry-After`: OpenAI's packages ignore a longer one."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What `admit` charged."""

    caller: Caller
    tokens: int
    slot: int | None
    """When, as Redis counts; None: the caller has no limit of tokens."""


class _Refused(NamedTuple):
    """A request that was refused."""

    at: float
    """Moment of `time.monotonic()`."""
    seconds: float
    tokens: int


class Rates:
    """The rates of all callers. For one event loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._keys: Keys = client.keys
        self._runner = AsyncRunner(client.redis)
        self._refused: dict[tuple[str, str, int | None], _Refused] = {}
        """The last refusals by key, limit and its number: a client that repeats at once does not reach Redis."""

    async def admit(self, caller: Caller, tokens: int) -> Charge:
        """Charge one request and `tokens` to the caller.

        Raises:
            ApiError: 429 `rate_limit_exceeded`: a limit of the caller is reached; nothing was charged.
            redis.RedisError, TimeoutError: Redis is away. The request may have been charged.
        """
        if caller.rpm is None and caller.tpm is None:
            return Charge(caller, tokens, None)
        if (wait := self._known(caller, tokens)) is not None:
            raise _exceeded(caller, wait)
        call = charge_call(self._keys, caller.key, 1, tokens, caller.rpm, caller.tpm)
        async with asyncio.timeout(REDIS_SECONDS):
            reply = charge_reply(await self._runner.run(*call))
        if not isinstance(reply, Wait):
            return Charge(caller, tokens, reply.slot if caller.tpm is not None else None)
        refused = _Refused(time.monotonic(), reply.seconds, tokens)
        self._refused[caller.key, reply.limit, getattr(caller, reply.limit)] = refused
        raise _exceeded(caller, reply)

    def _known(self, caller: Caller, tokens: int) -> Wait | None:
        """Return how long a request must wait that follows a refused request; None if Redis must be asked."""
        now = time.monotonic()
        for limit in LIMITS:
            name = caller.key, limit, getattr(caller, limit)
            last = self._refused.get(name)
            if last is None:
                continue
            left = last.at + last.seconds - now
            # Tokens may be given back before that time, requests never.
            if left <= 0 or (limit == "tpm" and last.at + TOKENS_SECONDS < now):
                del self._refused[name]
            elif limit == "rpm" or tokens >= last.tokens:
                return Wait(left, limit)
        return None

    async def settle(self, charge: Charge, tokens: int) -> None:
        """Replace the estimate of an admitted request by the number of tokens that it used.

        Tokens above the estimate count from now on for a minute. An error of Redis is logged: the estimate then stays.
        """
        more, caller = tokens - charge.tokens, charge.caller
        if charge.slot is None or more == 0:
            return
        if more > 0:
            call = charge_call(self._keys, caller.key, 0, more, None, None)
        else:
            call = give_back_call(self._keys, caller.key, charge.slot, -more)
        try:
            async with asyncio.timeout(REDIS_SECONDS):
                await self._runner.run(*call)
        except (RedisError, TimeoutError) as error:
            log.warning("rate_not_settled", key=caller.key, tokens=more, message=str(error) or "Redis does not answer")


def estimate(body: Mapping[str, Any]) -> int:
    """Return about how many tokens a request can use: those of its prompt, and `max_tokens` for each choice.

    Without `max_tokens` only the prompt counts: `Rates.settle` adds what was generated.

    Args:
        body: a job's body, or a request of OpenAI's API; malformed values count nothing.
    """
    size = sum(_bytes(body.get(name)) for name in ("prompt", "messages", "input", "tools"))
    limit = body.get("max_completion_tokens")
    limit, n = body.get("max_tokens") if limit is None else limit, body.get("n")
    return -(-size // BYTES_PER_TOKEN) + _count(limit, 0) * max(1, _count(n, 1))


def used(result: Result) -> int:
    """Return how many tokens a job has used; 0 where its result has no usage."""
    usage = result.usage
    return 0 if usage is None else (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)


def _bytes(value: Any) -> int:
    """Return the bytes of all texts in a value; a token id counts as much as an average token."""
    match value:
        case str():
            return len(value.encode("utf-8", "replace"))
        case dict():
            return sum(_bytes(key) + _bytes(child) for key, child in value.items())
        case list():
            return sum(map(_bytes, value))
        case int():
            return BYTES_PER_TOKEN
    return 0


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _exceeded(caller: Caller, wait: Wait) -> ApiError:
    limit, unit = (caller.rpm, "requests") if wait.limit == "rpm" else (caller.tpm, "tokens")
    seconds = min(MAX_WAIT_SECONDS, wait.seconds)
    message = f"Rate limit reached: this key may use {limit} {unit} a minute. Try again in {seconds:.1f} s."
    return ApiError(429, message, code="rate_limit_exceeded", retry_after=seconds)
