"""The calls of a worker's scripts without I/O: which keys and which request each takes. `Scripts` runs them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from tokenmill.protocol.calls import Call
from tokenmill.protocol.errors import ErrorCode, clean
from tokenmill.protocol.job import Identity
from tokenmill.protocol.keys import DEAD_BODY_BYTES, DEAD_MAXLEN, GROUP, Keys, is_name, open_stream_ttl
from tokenmill.protocol.lua import encode
from tokenmill.protocol.meta import ON
from tokenmill.protocol.replies import DeadLetter, Ref, TokenWrite
from tokenmill.protocol.result import Result, Status

DELETED = "its entry was deleted from the queue"
"""The `cancel_reason` of a job that RECONCILE ends."""


class StartOptions(TypedDict):
    """Arguments of START beside the entry and the job's identity."""

    prompt_tokens: int
    ttl_ms: NotRequired[int | None]
    max_attempts: NotRequired[int | None]
    """A job with this many starts is not started again (SPENT)."""
    alone: NotRequired[bool]
    """Whether this worker starts no other job meanwhile: if it dies now, this job was the cause."""
    strict: NotRequired[bool]
    """Whether `max_attempts` also limits a suspect that has never run alone, which otherwise gets another start."""
    nonce: NotRequired[str | None]
    """Names the call: the same nonce, after a lost reply, gets the fence of the first call. Default: a new nonce."""


class EndOptions(TypedDict):
    """Arguments of FINALISE beside the entry, the job's identity and its result."""

    fence: int | None
    """The fence that START returned; None for a job without START."""
    published: NotRequired[int]
    """The last n that is known to be in the stream; default 0."""
    events: NotRequired[Sequence[TokenWrite]]
    """The token events that are not published yet."""
    prompt_tokens: NotRequired[int]
    """Number of prompt tokens, for a job without START."""
    callback: NotRequired[str | None]
    """The URL to which the clerk POSTs the result."""
    dead: NotRequired[DeadLetter | None]


@dataclass(frozen=True)
class WorkerCalls:
    """Makes the calls of one worker on one queue; each method makes the call of the script of its name.

    Args:
        consumer: the worker's name (host:pid:random).
        result_ttl_s, stream_ttl_s: seconds that results and ended streams live.
    """

    keys: Keys
    consumer: str
    result_ttl_s: int
    stream_ttl_s: int

    def read(self, count: int) -> Call:
        keys = self.keys
        request = encode(consumer_group=GROUP, consumer=self.consumer, count=count, on=ON)
        return Call("read", [keys.meta, *keys.lanes, keys.returned], [request])

    def unread(self, most: int) -> Call:
        request = encode(consumer_group=GROUP, most=most)
        return Call("unread", [*self.keys.lanes, self.keys.returned], [request])

    def start(self, ref: Ref, job: Identity, options: StartOptions) -> Call:
        keys = self.keys
        names = [keys.lane(ref.lane), *self._of(ref.id), *keys.lanes, keys.meta, keys.running(job.tenant or "")]
        names += [keys.returned, keys.open]
        request = encode(
            **self._entry(ref),
            id=ref.id,
            tenant=job.tenant,
            group=job.group,
            open_ttl_s=open_stream_ttl(self.result_ttl_s),
            nonce=options.get("nonce") or secrets.token_hex(8),
            ttl_ms=options.get("ttl_ms"),
            max_attempts=options.get("max_attempts"),
            prompt_tokens=options["prompt_tokens"],
            alone=options.get("alone", False),
            strict=options.get("strict", False),
        )
        return Call("start", names, [request])

    def end(self, ref: Ref, job: Identity, result: Result, options: EndOptions) -> Call:
        fence, dead = options["fence"], options.get("dead")
        if fence is None and result.choices:
            raise ValueError("the result of a job without START has no choices")
        keys, group, tenant = self.keys, job.group or "", job.tenant or ""
        names = [keys.lane(ref.lane), *self._of(job.id), *keys.lanes, keys.dead, keys.callbacks]
        names += [keys.quota(tenant), keys.group(group), keys.group_out(group)]
        names += [keys.running(tenant), keys.reading, keys.returned, keys.booked(tenant), keys.open]
        letter, body = None, b""
        if dead is not None:
            body, truncated = _cut(dead.body)
            letter = {"code": dead.code.value, "reason": clean(dead.reason), "attempts": dead.attempts}
            letter |= {"truncated": truncated, "maxlen": DEAD_MAXLEN}
        request = encode(
            **self._entry(ref),
            id=job.id,
            tenant=job.tenant,
            group=job.group,
            fence=None if fence is None else str(fence),
            published=options.get("published", 0),
            status=result.status.value,
            stream="1" if job.stream else "0",
            result_ttl_s=self.result_ttl_s,
            stream_ttl_s=self.stream_ttl_s,
            callback=options.get("callback"),
            prompt_tokens=options.get("prompt_tokens", 0),
            events=[tuple(event) for event in options.get("events", ())],
            dead=letter,
        )
        return Call("finalise", names, [request, result.to_json(), body])

    def reject(self, ref: Ref, body: bytes, reason: str, job_id: bytes) -> Call:
        body, truncated = _cut(body)
        request = encode(
            **self._entry(ref),
            code=ErrorCode.NO_ID.value,
            reason=clean(reason),
            truncated=truncated,
            maxlen=DEAD_MAXLEN,
        )
        names = [self.keys.lane(ref.lane), self.keys.dead, self.keys.returned]
        return Call("reject", names, [request, job_id[:128], body])

    def renew(self, lane: str, refs: Sequence[Ref]) -> Call:
        names = [self.keys.lane(lane), self.keys.returned]
        for ref in refs:
            names += (self.keys.out(ref.id), self.keys.result(ref.id))
        request = encode(
            consumer_group=GROUP,
            consumer=self.consumer,
            lane=lane,
            entries=[ref.entry for ref in refs],
            open_ttl_s=open_stream_ttl(self.result_ttl_s),
        )
        return Call("renew", names, [request])

    def yield_(self, ref: Ref, idle_ms: int, graceful: bool, count_start: bool, due_in_ms: int | None) -> Call:
        request = encode(
            **self._entry(ref),
            idle_ms=max(0, idle_ms),
            graceful=graceful,
            count_start=count_start,
            due_in_ms=due_in_ms,
        )
        return Call("yield", self._held(ref), [request])

    def excuse(self, ref: Ref) -> Call:
        return Call("excuse", self._held(ref), [encode(**self._entry(ref))])

    def clear(self, ref: Ref, fence: int) -> Call:
        return Call("clear", self._held(ref), [encode(**self._entry(ref), fence=str(fence))])

    def due(self, raw_id: bytes) -> Call:
        """DUE of a member of `delayed`, which any producer may have written: it need not be a usable id."""
        keys = self.keys
        usable = is_name(raw_id.decode("utf-8", "replace"))
        own = [prefix.encode() + raw_id for prefix in (keys.delayed_job(""), keys.job(""), keys.result(""))]
        names: list[Any] = [keys.delayed, *own, *keys.lanes, keys.dead, keys.meta, keys.open]
        request = encode(dead_maxlen=DEAD_MAXLEN, fault=None if usable else ErrorCode.NO_ID.value)
        return Call("due", names, [request, raw_id])

    def reconcile(self, raw_id: bytes, grace_ms: int) -> Call:
        keys, job_id = self.keys, raw_id.decode("utf-8", "replace")
        result = Result(id=job_id, status=Status.CANCELLED, cancel_reason=DELETED)
        names = [keys.open, *self._of(job_id), keys.delayed_job(job_id), keys.callbacks, keys.meta]
        request = encode(grace_ms=grace_ms, result_ttl_s=self.result_ttl_s, stream_ttl_s=self.stream_ttl_s)
        return Call("reconcile", [*names, *keys.lanes], [request, raw_id, result.to_json()])

    def _entry(self, ref: Ref) -> dict[str, Any]:
        return {"consumer_group": GROUP, "consumer": self.consumer, "lane": ref.lane, "entry": ref.entry}

    def _held(self, ref: Ref) -> list[str]:
        return [self.keys.lane(ref.lane), self.keys.job(ref.id), self.keys.returned]

    def _of(self, job_id: str) -> list[str]:
        keys = self.keys
        return [keys.job(job_id), keys.result(job_id), keys.cancel(job_id), keys.out(job_id)]


def remove_consumer_call(stream: str, group: str, consumer: str | bytes) -> Call:
    """REMOVE_CONSUMER of any stream; its reply is 1 if the group has no such consumer now."""
    return Call("remove_consumer", [stream], [encode(consumer_group=group), consumer])


def _cut(body: bytes) -> tuple[bytes, str]:
    """Return the body of a dead letter, cut to its limit, and the value of the letter's field `truncated`."""
    return body[:DEAD_BODY_BYTES], "1" if len(body) > DEAD_BODY_BYTES else "0"
