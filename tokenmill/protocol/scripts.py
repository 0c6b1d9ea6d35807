"""The atomic steps of a queue, each one EVALSHA over a Lua file beside this module.

A worker's side, on a synchronous client (thread-safe as that client is):

    scripts = Scripts(client, keys, consumer, result_ttl_s=86400, stream_ttl_s=900)
    scripts.ensure_groups()                                             # at start and after NOGROUP
    scripts.read(count) -> list[Delivery] | None                        # None: paused; handed-back ones first
    scripts.unread(most) -> tuple[int, int, int]                        # entries of each lane that no worker holds
    scripts.start(ref, job, prompt_tokens=, ttl_ms=, max_attempts=, nonce=) -> Started
    scripts.publish(batch: TokenBatch) -> list[Refused]
    scripts.end_all([(ref, job, result, options)]) -> list[Ending]      # several of both kinds in one round trip
    scripts.reject(ref, body, reason) -> bool                           # entry without usable id: dead letter `no_id`
    scripts.renew(refs) -> list[Ref]                                    # the lost ones
    scripts.yield_(ref, idle_ms=, polite=True, spare=False, due_in_ms=None) -> bool     # False: lost
    scripts.excuse(refs)                                                # running jobs of a worker that was told to end
    scripts.clear(ref, fence) -> bool                                   # a suspect is one no more; False: lost
    scripts.promote(chunk=64, seconds=0.5) -> int                       # delayed jobs that are due
    scripts.reconcile(limit=32) -> int                                  # jobs whose entry somebody deleted
    scripts.remove_consumer(name) -> bool                               # only where nothing is pending for it

Argument and reply types live in `replies.py`, the producer's calls without I/O in `calls.py`; all can be had from here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, Unpack

import redis
from redis.exceptions import ResponseError

from tokenmill.protocol.calls import (
    Call,
    EnqueueRefused,
    JobExists,
    QueueFull,
    QuotaExceeded,
)
from tokenmill.protocol.errors import ErrorCode, clean
from tokenmill.protocol.job import Identity
from tokenmill.protocol.keys import (
    DEAD_BODY_BYTES,
    DEAD_MAXLEN,
    GROUP,
    LANES,
    RESULT_TTL_S,
    STREAM_TTL_S,
    Keys,
    is_name,
    open_stream_ttl,
)
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.meta import ON
from tokenmill.protocol.replies import (
    CancelReply,
    DeadLetter,
    Delivery,
    Ending,
    Ref,
    Refused,
    Started,
    StartStatus,
    TokenBatch,
    TokenWrite,
    Why,
    classify,
)
from tokenmill.protocol.result import Result, Status

__all__ = [
    "CancelReply",
    "DeadLetter",
    "Delivery",
    "EndOptions",
    "Ending",
    "EnqueueRefused",
    "JobExists",
    "QueueFull",
    "QuotaExceeded",
    "Ref",
    "Refused",
    "Scripts",
    "StartStatus",
    "Started",
    "TokenBatch",
    "TokenWrite",
    "Why",
]

RENEW_CHUNK = 256
LOOK_MS = 10_000
"""Between two looks at the entry of a job without a result, and from the look that misses it to the job's end."""
DELETED = "its entry was deleted from the queue"
"""Why a job is cancelled whose entry somebody deleted."""


class StartOptions(TypedDict):
    """What START is told beside who."""

    prompt_tokens: int
    ttl_ms: NotRequired[int | None]
    max_attempts: NotRequired[int | None]
    """A job that was started so often already is not started again (SPENT)."""
    alone: NotRequired[bool]
    """No other job of this worker is started: if the worker dies now, this one did it."""
    strict: NotRequired[bool]
    """Not even a suspect that never ran alone is started more often than `max_attempts`."""
    nonce: NotRequired[str | None]
    """A caller that repeats a call whose reply was lost gives the same one again, and gets the first call's fence."""


class EndOptions(TypedDict):
    """What an ending is told beside who and what."""

    fence: int | None
    """Of START; None for an ending without one."""
    published: NotRequired[int]
    events: NotRequired[Sequence[TokenWrite]]
    prompt_tokens: NotRequired[int]
    """For an ending without START."""
    callback: NotRequired[str | None]
    dead: NotRequired[DeadLetter | None]


@dataclass
class Scripts:
    """The scripts of one queue as one worker calls them. All raise `redis.RedisError` as any command does.

    `consumer` is the worker's name (host:pid:random).
    """

    client: redis.Redis
    keys: Keys
    consumer: str = ""
    result_ttl_s: int = RESULT_TTL_S
    stream_ttl_s: int = STREAM_TTL_S
    _runner: Runner = field(init=False)

    def __post_init__(self) -> None:
        self.stream_ttl_s = min(self.stream_ttl_s, self.result_ttl_s)
        self._runner = Runner(self.client)

    def ensure_groups(self) -> None:
        """Create the group of every lane at `0`, so that nothing sent before is missed."""
        for lane in self.keys.lanes:
            try:
                self.client.xgroup_create(lane, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def read(self, count: int) -> list[Delivery] | None:
        """Take at most `count` new entries, higher lanes first, without waiting. None: the queue is paused."""
        keys = self.keys
        reply = self._runner.run("read", [keys.meta, *keys.lanes, keys.returned], [GROUP, self.consumer, count, *ON])
        if reply == b"PAUSED":
            return None
        returned, *new = reply
        again = [Delivery(lane.decode(), entry.decode(), _fields(flat), True) for lane, entry, flat in returned]
        return again + [
            Delivery(lane, entry.decode(), _fields(flat))
            for lane, entries in zip(LANES, new, strict=True)
            for entry, flat in entries
        ]

    def unread(self, most: int) -> tuple[int, int, int]:
        """Count the entries of each lane, high first, that no worker has read, or that a worker has handed back.

        Counts up to `most` entries of a lane. Entries whose delay after the hand-back is not over are left out.
        """
        high, normal, low = self._runner.run("unread", [*self.keys.lanes, self.keys.returned], [GROUP, most])
        return high, normal, low

    def start(self, ref: Ref, job: Identity, **options: Unpack[StartOptions]) -> Started:
        """START: the owner check, the duplicate rule, cancel and deadline, then a new fence and its `start` event."""
        return self.start_all([(ref, job, options)])[0]

    def start_all(self, starts: Sequence[tuple[Ref, Identity, StartOptions]]) -> list[Started]:
        """START of several jobs in one round trip; each stands for itself."""
        replies = self._runner.run_all([self._start_call(*one) for one in starts])
        return [
            Started(
                StartStatus(status.decode()),
                int(fence),
                attempt,
                deaths,
                int(now),
                reason.decode("utf-8", "replace"),
                tries,
            )
            for status, fence, attempt, deaths, now, reason, tries in replies
        ]

    def _start_call(self, ref: Ref, job: Identity, options: StartOptions) -> Call:
        names = [self.keys.lane(ref.lane), *self._of(ref.id), *self.keys.lanes, self.keys.meta]
        names += [self.keys.running(job.tenant or ""), self.keys.returned, self.keys.quota(job.tenant or "")]
        names += [self.keys.booked(job.tenant or ""), self.keys.open]
        args: list[Any] = [GROUP, ref.entry, self.consumer, ref.lane, open_stream_ttl(self.result_ttl_s)]
        args += [options.get("nonce") or secrets.token_hex(8), _or_empty(options.get("ttl_ms"))]
        args += [_or_empty(options.get("max_attempts")), options["prompt_tokens"], job.group or "", job.tenant or ""]
        args += ["1" if options.get("alone") else "0", "1" if options.get("strict") else "0", ref.id]
        return Call("start", names, args)

    def _of(self, job_id: str) -> list[str]:
        keys = self.keys
        return [keys.job(job_id), keys.result(job_id), keys.cancel(job_id), keys.out(job_id)]

    def publish(self, batch: TokenBatch) -> list[Refused]:
        """Append all events of `batch` in one command; returns those that Redis refused, in order."""
        if not batch:
            return []
        reply = self._runner.run("publish", batch.streams, batch.args)
        refused = []
        for number, why, last in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
            refused.append(classify(*batch.owner(number), why.decode("utf-8", "replace"), last.decode()))
        return refused

    def end_all(self, ends: Sequence[tuple[Ref, Identity, Result, EndOptions]]) -> list[Ending]:
        """End several jobs in one round trip: FINALISE of each, independent of the others.

        A job with a `fence` was started: `events` (not published yet) go to its stream behind `published`, the last n
        that is known to be there (0 for none; with `stream 0` always 0 and no events). A job with fence None was not
        started by this worker, or its text is lost: it is refused, expired, cancelled or given up, and its result has
        no choices. A call may be repeated where its reply was lost; DUP then means that it was done.

        Raises:
            ValueError: a result with choices and no fence.
        """
        calls = [self._end_call(*one) for one in ends]
        return [Ending(reply.decode()) for reply in self._runner.run_all(calls)] if calls else []

    def _end_call(self, ref: Ref, job: Identity, result: Result, how: EndOptions) -> Call:
        fence, dead = how["fence"], how.get("dead")
        if fence is None and result.choices:
            raise ValueError("an answer without START has no choices")
        keys, group, tenant = self.keys, job.group or "", job.tenant or ""
        names = [keys.lane(ref.lane), *self._of(job.id), *keys.lanes, keys.dead, keys.callbacks]
        names += [keys.quota(tenant), keys.group(group), keys.group_out(group)]
        names += [keys.running(tenant), keys.reading, keys.returned, keys.booked(tenant), keys.open]
        args: list[Any] = [GROUP, ref.entry, self.consumer, ref.lane, job.id, _or_empty(fence)]
        args += [how.get("published", 0), result.status.value, result.to_json(), "1" if job.stream else "0"]
        args += [self.result_ttl_s, self.stream_ttl_s, group, how.get("callback") or "", how.get("prompt_tokens", 0)]
        if dead is None:
            args += ["", "", 0, "", "0"]
        else:
            args += [dead.code.value, clean(dead.reason), dead.attempts, *_cut(dead.body)]
        args += [DEAD_MAXLEN, tenant]
        for event in how.get("events", ()):
            args += event
        return Call("finalise", names, args)

    def reject(self, ref: Ref, body: bytes, reason: str = "no usable id", job_id: bytes = b"") -> bool:
        """Dead-letter an entry without a usable id, as `no_id`, and delete it. False: another worker holds it."""
        args: list[Any] = [GROUP, ref.entry, self.consumer, ref.lane, job_id[:128], ErrorCode.NO_ID.value]
        args += [clean(reason), *_cut(body), DEAD_MAXLEN]
        names = [self.keys.lane(ref.lane), self.keys.dead, self.keys.returned]
        return bool(self._runner.run("reject", names, args) == b"OK")

    def renew(self, refs: Iterable[Ref]) -> list[Ref]:
        """Renew the leases; returns the entries that are held no more."""
        by_lane: dict[str, list[Ref]] = {}
        for ref in refs:
            by_lane.setdefault(ref.lane, []).append(ref)
        lost = []
        for lane, held in by_lane.items():
            for at in range(0, len(held), RENEW_CHUNK):
                chunk = held[at : at + RENEW_CHUNK]
                names = [self.keys.lane(lane), self.keys.returned]
                for ref in chunk:
                    names += (self.keys.out(ref.id), self.keys.result(ref.id))
                args = [GROUP, self.consumer, open_stream_ttl(self.result_ttl_s), lane, *(ref.entry for ref in chunk)]
                lost += [chunk[number] for number in self._runner.run("renew", names, args)]
        return lost

    def yield_(
        self, ref: Ref, *, idle_ms: int, polite: bool = True, spare: bool = False, due_in_ms: int | None = None
    ) -> bool:
        """Hand an entry back: others see it idle for `idle_ms` (a lease: at once; a lease less d: in d). False: lost.

        An entry with `due_in_ms` is nobody's until it is read again.
        Not polite: the job still counts as running, so that its next start by another worker is a takeover. Spare: the
        start does not count against `max_attempts`, as it was no fault of the job. `due_in_ms`: from then on the next
        `read` gives it to whoever calls; without it, sweeps alone find it.
        """
        args: list[Any] = [GROUP, ref.entry, self.consumer, ref.lane, max(0, idle_ms)]
        args += ["1" if polite else "0", "1" if spare else "0", _or_empty(due_in_ms)]
        names = [self.keys.lane(ref.lane), self.keys.job(ref.id), self.keys.returned]
        return bool(self._runner.run("yield", names, args) == b"OK")

    def excuse(self, refs: Sequence[Ref]) -> None:
        """This worker was told to end: if it does before these running jobs do, neither a start nor a death counts."""
        names = [[self.keys.lane(ref.lane), self.keys.job(ref.id), self.keys.returned] for ref in refs]
        args = [[GROUP, ref.entry, self.consumer, ref.lane] for ref in refs]
        self._runner.run_all([Call("excuse", *one) for one in zip(names, args, strict=True)])

    def clear(self, ref: Ref, fence: int) -> bool:
        """A suspect ran alone past the place where its last run ended: its deaths so far count no more. False: lost."""
        args = [GROUP, ref.entry, self.consumer, ref.lane, str(fence)]
        names = [self.keys.lane(ref.lane), self.keys.job(ref.id), self.keys.returned]
        return bool(self._runner.run("clear", names, args) == b"OK")

    def promote(self, chunk: int = 64, seconds: float = 0.5) -> int:
        """Move the delayed jobs that are due into their lanes, `chunk` in a round trip; returns how many were moved.

        Ends when none is due, when the queue is full, or after `seconds`; then the next call goes on.
        """
        moved, until = 0, time.monotonic() + seconds
        while True:
            now_s, micros = self.client.time()
            now = now_s * 1000 + micros // 1000
            due: Any = self.client.zrangebyscore(self.keys.delayed, "-inf", now, start=0, num=chunk)
            replies = self._runner.run_all([self._due_call(raw) for raw in due]) if due else []
            moved += replies.count(b"MOVED")
            if len(due) < chunk or b"FULL" in replies or b"EARLY" in replies or time.monotonic() >= until:
                return moved

    def _due_call(self, raw: bytes) -> Call:
        keys = self.keys
        usable = is_name(raw.decode("utf-8", "replace"))
        own = [prefix.encode() + raw for prefix in (keys.delayed_job(""), keys.job(""), keys.result(""))]
        names: list[Any] = [keys.delayed, *own, *keys.lanes, keys.dead, keys.meta, keys.open]
        return Call("due", names, [raw, DEAD_MAXLEN, "" if usable else ErrorCode.NO_ID.value])

    def reconcile(self, limit: int = 32, look_ms: int = LOOK_MS) -> int:
        """End jobs whose entry somebody deleted; returns how many.

        Looks at `limit` jobs without a result, at each no more often than every `look_ms`, whoever calls.
        """
        now_s, micros = self.client.time()
        now = now_s * 1000 + micros // 1000
        index: Any = self.keys.open
        pipe = self.client.pipeline(transaction=False)
        pipe.zrevrangebyscore(index, "(0", "-inf", start=0, num=limit)
        pipe.zrangebyscore(index, 0, now - look_ms, start=0, num=limit)
        missing, others = pipe.execute()
        calls = [self._reconcile_call(raw, look_ms) for raw in (*others, *missing)]
        return self._runner.run_all(calls).count(b"DONE") if calls else 0

    def _reconcile_call(self, raw: bytes, grace_ms: int) -> Call:
        keys, job_id = self.keys, raw.decode("utf-8", "replace")
        result = Result(id=job_id, status=Status.CANCELLED, cancel_reason=DELETED)
        names = [keys.open, *self._of(job_id), keys.delayed_job(job_id), keys.delayed, keys.callbacks, keys.meta]
        args = [raw, result.to_json(), self.result_ttl_s, self.stream_ttl_s, grace_ms]
        return Call("reconcile", [*names, *keys.lanes], args)

    def remove_consumer(self, name: str) -> bool:
        """Delete a consumer from all lanes' groups where nothing is pending for it; True where it is gone from all."""
        gone = [self._runner.run("remove_consumer", [lane], [GROUP, name]) for lane in self.keys.lanes]
        return all(gone)


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _cut(body: bytes) -> tuple[bytes, str]:
    return body[:DEAD_BODY_BYTES], "1" if len(body) > DEAD_BODY_BYTES else "0"
