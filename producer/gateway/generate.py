"""`/v1/chat/completions`, `/v1/completions` and `/v1/embeddings`: one job for each request.

The job depends on the client's connection: it is cancelled when the client goes away or the request times out.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from producer.gateway.idempotency import begin, current_id, idempotency_key
from producer.gateway.inflight import Claim, End, Interrupted
from producer.gateway.rates import Charge, used
from producer.gateway.requests import caller_of, gateway_of, read_json
from producer.gateway.responses import JsonResponse, shutting_down
from producer.gateway.sse import DONE, EventStream, Frames, data_frame
from producer.gateway.submit import CANCEL_S, UNKNOWN, Order, entry_for, require_worker, submit
from tokenmill.client.core import JobLost
from tokenmill.client.follow import TextRestarted
from tokenmill.client.handles import AsyncJob
from tokenmill.openai.errors import ApiError, error_of
from tokenmill.openai.request import CHAT, COMPLETIONS, EMBEDDINGS, Streaming, streaming, translate
from tokenmill.openai.response import ANSWERS
from tokenmill.openai.stream import Chunks
from tokenmill.protocol.calls import EnqueueRefused
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import Event, FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.result import Result, Status

TTL_MARGIN_S: Final = 30.0
"""How much longer than its request a job may live, so that the gateway's time-out comes first."""
RESTARTED: Final = "text changed after a restart"
_UNANSWERED: Final = frozenset({End.GONE.value, End.STALLED.value, End.TIMED_OUT.value, RESTARTED, UNKNOWN})
"""Reasons of the gateway's cancels: a repeated request with the same Idempotency-Key gets a new job."""


async def chat_completions(request: Request) -> Response:
    """Answer `POST /v1/chat/completions`."""
    return await _generate(request, CHAT)


async def completions(request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    return await _generate(request, COMPLETIONS)


async def embeddings(request: Request) -> Response:
    """Answer `POST /v1/embeddings`."""
    return await _generate(request, EMBEDDINGS)


ROUTES = [
    Route(CHAT, chat_completions, methods=["POST"]),
    Route(COMPLETIONS, completions, methods=["POST"]),
    Route(EMBEDDINGS, embeddings, methods=["POST"]),
]


async def _generate(request: Request, url: str) -> Response:
    gateway, timeout = gateway_of(request), gateway_of(request).settings.request_timeout
    work = _Work(request, url, await read_json(request))
    try:
        async with gateway.inflight.watch(request.receive, timeout):
            await work.place()
            return await work.stream() if work.streaming.on else await work.whole()
    except Interrupted as interrupted:
        work.end(interrupted.end)
        match interrupted.end:
            case End.CLOSING:
                raise shutting_down() from None
            case End.TIMED_OUT:
                message = f"No answer within {timeout:g} s; the job is cancelled."
                raise ApiError(504, message, code="timeout") from None
        raise ClientDisconnect from None
    except asyncio.CancelledError:  # a shutdown that does not wait: the job goes on
        work.end(None)
        raise
    except BaseException:
        work.fail()
        raise


class _Work:
    """One request, and its job.

    Raises:
        ApiError, JobError: the request is malformed.
    """

    def __init__(self, request: Request, url: str, body: Mapping[str, Any]) -> None:
        self.gateway, self.caller = gateway_of(request), caller_of(request)
        self._request, self._url = request, url
        self.streaming = Streaming(False, False) if url == EMBEDDINGS else streaming(body)
        self._body, self._key = translate(url, body, stream=True), idempotency_key(request, self.caller, body)
        self.entry = self._entry()
        self._claim: Claim | None = None
        self._job: AsyncJob | None = None
        self._charge: Charge | None = None
        self._tokens = 0
        """Tokens that were received."""
        self._begun = time.monotonic()
        self._created = 0
        """Unix time in seconds of the answer: that of the first request with the same Idempotency-Key."""

    # ── the job ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _entry(self) -> JobEntry:
        """Return the entry of the job, with a seed, so that a second run generates the same text.

        A body that has no room for the seed is sent without one.
        """
        ttl = None if self.streaming.on else self.gateway.settings.request_timeout + TTL_MARGIN_S
        make = partial(entry_for, self.gateway, self._request, ttl=ttl, tenant=self.caller.tenant)
        if self._url == EMBEDDINGS or "seed" in self._body:
            return make(self._body)
        seed = secrets.randbits(63) if self._key is None else int(self._key.id[:15], 16)
        try:
            return make({**self._body, "seed": seed})
        except JobError as error:
            if error.code is not ErrorCode.TOO_LARGE:
                raise
            return make(self._body)

    async def place(self) -> None:
        """Submit the job, or join the job of an earlier request with the same Idempotency-Key."""
        gateway, key = self.gateway, self._key
        gateway.require_redis()
        self._claim = await gateway.inflight.claim(self.entry.id if key is None else key.id)
        use = await begin(gateway, key, self.entry.id if key is None else key.id)
        await require_worker(gateway, self._body.get("model"), key, use, self.entry.id)
        if key is not None:
            self.entry = replace(self.entry, id=await current_id(gateway, key, _unanswered))
        self._created = use.begun_at
        order = Order(self.caller, self.entry, self._body, self.caller.lane, key=key, first=use.first)
        self._job, self._request.state.job_id = AsyncJob(gateway.client, self.entry.id, known=True), self.entry.id
        try:
            self._charge = await submit(gateway, order)
        except (EnqueueRefused, ApiError):
            self._job = self._request.state.job_id = None
            raise

    @property
    def job(self) -> AsyncJob:
        assert self._job is not None
        return self._job

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────

    async def whole(self) -> Response:
        """Wait for the result; return the answer."""
        while True:
            try:
                result = await self.job.result()
            except JobLost:
                raise _lost(self.job.id) from None
            self._ended(result)
            if not self._is_superseded(result):
                break
            await self.place()
        if not result.ok:
            raise error_of(result, chat=self._url == CHAT)
        return JsonResponse(ANSWERS[self._url](self.job.id, result, self._created))

    async def stream(self) -> Response:
        """Wait for the first text, or the end; return the answer.

        Raises:
            ApiError: the job ended without success, and without text.
        """
        frames = self._frames()
        first = await anext(frames)
        self.gateway.metrics.first_token.observe(time.monotonic() - self._begun)
        self.gateway.metrics.streams.inc()
        return EventStream(frames, self.gateway.inflight, first=first, on_end=self._stream_ended)

    def _stream_ended(self, end: End | None) -> None:
        self.gateway.metrics.streams.dec()
        self.end(end)

    async def _frames(self) -> Frames:
        chunks = Chunks(
            self._url,
            self.job.id,
            model=self._body.get("model", ""),
            include_usage=self.streaming.include_usage,
            created=self._created,
        )
        try:
            while not chunks.done:
                async with aclosing(self.job.stream()) as events:
                    async for event in events:
                        self._note(event)
                        if isinstance(event, FinalEvent) and self._is_superseded(event.result):
                            await self.place()  # the next job repeats the text that was sent
                            break
                        if isinstance(event, StartEvent) and "model" not in self._body:
                            chunks.model = await self.gateway.workers.model_of(event.worker)
                        if parts := chunks.feed(event):
                            yield b"".join(map(data_frame, parts))
        except TextRestarted:
            self.abandon(RESTARTED)
            message = "A worker was lost and another restarted the job, with another text. The job is cancelled."
            raise ApiError(500, message, code="text_restarted") from None
        except JobLost:
            raise _lost(self.job.id) from None
        except Exception:
            self.fail()
            raise
        if chunks.error is not None:
            raise chunks.error
        yield DONE

    def _is_superseded(self, result: Result | None) -> bool:
        """Return whether another gateway cancelled the job of a repeated request since its own client went away."""
        return self._key is not None and result is not None and _unanswered(result)

    def _note(self, event: Event) -> None:
        """Count the tokens of an event."""
        match event:
            case StartEvent():
                self._tokens = event.prompt_tokens or 0
            case TokenEvent():
                self._tokens += event.tokens
            case FinalEvent():
                self._ended(event.result)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _ended(self, result: Result | None) -> None:
        """Note that the job has ended."""
        self.end(None)
        self._settle(self._tokens if result is None else used(result))

    def _settle(self, tokens: int) -> None:
        """Correct what the request was charged for its tokens, once."""
        charge, self._charge = self._charge, None
        if charge is not None and charge.slot is not None:
            self.gateway.spawn(self.gateway.rates.settle(charge, tokens), "settle_rate")

    def end(self, why: End | None) -> None:
        """End the client's interest in the job: cancel it if the client went away or does not wait longer."""
        if why in (None, End.CLOSING):
            if self._claim is not None:
                self._claim.release()
        elif self.abandon(why.value) and why is not End.TIMED_OUT:
            self.gateway.metrics.disconnects.inc()

    def fail(self) -> None:
        """End a request that failed. A job that may have been submitted is cancelled, unless a retry may join it."""
        if self._key is None:
            self.abandon(UNKNOWN)
        elif self._claim is not None:
            self._claim.release()

    def abandon(self, reason: str) -> bool:
        """Cancel the job in the background, unless another client waits for it; return whether it is cancelled."""
        if self._claim is None:
            return False
        if self._job is None:
            self._claim.release()
            return False
        if self._charge is not None:
            self._settle(max(self._charge.tokens, self._tokens))
        ttl = CANCEL_S if self.entry.ttl_ms is None else self.entry.ttl_ms / 1000
        return self._claim.abandon(self._job, reason, ttl)


def _unanswered(result: Result) -> bool:
    """Return whether a job ended because its client went away or did not wait long enough."""
    if result.status is Status.EXPIRED:
        return True
    return result.status is Status.CANCELLED and result.cancel_reason in _UNANSWERED


def _lost(job_id: str) -> ApiError:
    return ApiError(503, f"Redis has lost job {job_id}; send the request again.", code="job_lost", retry_after=1.0)
