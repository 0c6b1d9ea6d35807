"""The atomic steps of a queue, each one EVALSHA over a Lua file in `lua/`.

A worker's side, on a synchronous client (thread-safe as that client is):

    scripts = Scripts(client, keys, consumer, result_ttl_s=86400, stream_ttl_s=900)
    scripts.ensure_groups()                                             # at start and after NOGROUP
    scripts.ensure_consumer()                                           # once the worker is ready, and at each renewal
    scripts.read(count) -> list[Delivery] | None                        # None: the queue is paused
    scripts.unread(most) -> tuple[int, int, int]                        # entries of each lane that no worker holds
    scripts.start(ref, job, prompt_tokens=, ttl_ms=, max_attempts=, nonce=) -> Started
    scripts.publish(batch: TokenBatch) -> list[Refused]
    scripts.end_all([(ref, job, result, options)]) -> list[Ending]      # FINALISE of several jobs in one round trip
    scripts.reject(ref, body, reason) -> bool                           # entry without usable id: dead letter `no_id`
    scripts.renew(refs) -> list[Ref]                                    # the entries that were lost
    scripts.yield_(ref, idle_ms=, graceful=True, count_start=True, due_in_ms=None) -> bool      # False: lost
    scripts.excuse(refs)                                                # at shutdown: these starts do not count
    scripts.clear(ref, fence) -> bool                                   # a suspect's deaths no longer count
    scripts.promote(chunk=64, seconds=0.5) -> int                       # delayed jobs that are due
    scripts.reconcile(limit=32) -> int                                  # jobs whose entry was deleted
    scripts.remove_consumer(name) -> bool                               # only if no entry is pending for it

Arguments and replies are in `replies.py`, the calls without I/O in `worker_calls.py`, those of clients in `calls.py`;
their types can be imported from here too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import redis
from redis.exceptions import NoPermissionError, ResponseError

from tokenmill.protocol.calls import Call, EnqueueRefused, JobExists, QueueFull, QuotaExceeded
from tokenmill.protocol.faults import no_group
from tokenmill.protocol.job import Identity
from tokenmill.protocol.keys import GROUP, LANES, RESULT_TTL_S, STREAM_TTL_S, Keys
from tokenmill.protocol.lua import Runner
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
from tokenmill.protocol.result import Result
from tokenmill.protocol.worker_calls import DELETED, EndOptions, StartOptions, WorkerCalls, remove_consumer_call

__all__ = [
    "DELETED",
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
    "StartOptions",
    "StartStatus",
    "Started",
    "TokenBatch",
    "TokenWrite",
    "Why",
]

RENEW_CHUNK = 256
"""Entries of one RENEW call; docs/protocol.md, "Script notes"."""
LOOK_MS = 10_000
"""Ms between two checks of a job without a result, and from the check that misses its entry to the end of the job."""


@dataclass
class Scripts:
    """Runs the scripts of one queue for one worker. All methods raise `redis.RedisError` as any command does.

    Args:
        consumer: the worker's name (host:pid:random); empty for a caller that reads no entries.
        result_ttl_s, stream_ttl_s: seconds that results and ended streams live; a stream lives no longer than a result.
    """

    client: redis.Redis
    keys: Keys
    consumer: str = ""
    result_ttl_s: int = RESULT_TTL_S
    stream_ttl_s: int = STREAM_TTL_S
    _runner: Runner = field(init=False)
    _calls: WorkerCalls = field(init=False)

    def __post_init__(self) -> None:
        self.stream_ttl_s = min(self.stream_ttl_s, self.result_ttl_s)
        self._runner = Runner(self.client)
        self._calls = WorkerCalls(self.keys, self.consumer, self.result_ttl_s, self.stream_ttl_s)

    def ensure_groups(self) -> None:
        """Create the consumer group of every lane at `0`, so that entries from before are delivered too."""
        for lane in self.keys.lanes:
            try:
                self.client.xgroup_create(lane, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def ensure_consumer(self) -> None:
        """Create this worker's consumer in the groups: clients find the live workers there.

        Redis before 7.2 would create it only with the first entry that the worker reads. Access rules that lack the
        right to this command are tolerated, and so are missing groups: the next `read` reports these.
        """
        for lane in self.keys.lanes:
            try:
                self.client.xgroup_createconsumer(lane, GROUP, self.consumer)
            except ResponseError as error:
                if not (isinstance(error, NoPermissionError) or no_group(error)):
                    raise

    def read(self, count: int) -> list[Delivery] | None:
        """Take at most `count` entries, higher lanes first, without waiting; None if the queue is paused.

        Entries that were handed back and are due come first in the list.
        """
        reply = self._run(self._calls.read(count))
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
        high, normal, low = self._run(self._calls.unread(most))
        return high, normal, low

    def start(self, ref: Ref, job: Identity, **options: Unpack[StartOptions]) -> Started:
        """START one job: check owner, duplicates, cancel and deadline, then hand out a fence and write `start`."""
        return self.start_all([(ref, job, options)])[0]

    def start_all(self, starts: Sequence[tuple[Ref, Identity, StartOptions]]) -> list[Started]:
        """START several jobs in one round trip, each independent of the others."""
        replies = self._runner.run_all([self._calls.start(*start) for start in starts])
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

    def publish(self, batch: TokenBatch) -> list[Refused]:
        """Append all events of `batch` in one command; return the events that Redis refused, in order."""
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
        calls = [self._calls.end(*end) for end in ends]
        return [Ending(reply.decode()) for reply in self._runner.run_all(calls)] if calls else []

    def reject(self, ref: Ref, body: bytes, reason: str = "no usable id", job_id: bytes = b"") -> bool:
        """Move an entry without a usable id to the dead letters, with code `no_id`; False: another worker holds it."""
        return bool(self._run(self._calls.reject(ref, body, reason, job_id)) == b"OK")

    def renew(self, refs: Iterable[Ref]) -> list[Ref]:
        """Renew the leases of these entries; return the entries that this worker no longer holds."""
        by_lane: dict[str, list[Ref]] = {}
        for ref in refs:
            by_lane.setdefault(ref.lane, []).append(ref)
        lost = []
        for lane, held in by_lane.items():
            for at in range(0, len(held), RENEW_CHUNK):
                chunk = held[at : at + RENEW_CHUNK]
                lost += [chunk[number] for number in self._run(self._calls.renew(lane, chunk))]
        return lost

    def yield_(
        self,
        ref: Ref,
        *,
        idle_ms: int,
        graceful: bool = True,
        count_start: bool = True,
        due_in_ms: int | None = None,
    ) -> bool:
        """Hand an entry back; return False if another worker holds it.

        Args:
            idle_ms: how long the entry looks idle from now on, in ms: a sweep takes it over once this reaches a lease.
            graceful: True: a running job is queued again. False: it stays running, so that its next start by another
                worker counts a death.
            count_start: whether the start counts against `max_attempts`; False where the job was not at fault.
            due_in_ms: ms after which the next `read` of any worker takes the entry, which has no owner until then.
                None: only sweeps find it.
        """
        call = self._calls.yield_(ref, idle_ms, graceful, count_start, due_in_ms)
        return bool(self._run(call) == b"OK")

    def excuse(self, refs: Sequence[Ref]) -> None:
        """Mark running jobs of this worker, which shuts down: if it is killed, neither start nor death counts."""
        self._runner.run_all([self._calls.excuse(ref) for ref in refs])

    def clear(self, ref: Ref, fence: int) -> bool:
        """Clear a suspect that ran alone past the progress of its last fence: its deaths so far no longer count.

        Return False if another worker holds the entry.
        """
        return bool(self._run(self._calls.clear(ref, fence)) == b"OK")

    def promote(self, chunk: int = 64, seconds: float = 0.5) -> int:
        """Move the delayed jobs that are due into their lanes, `chunk` in a round trip; return how many were moved.

        Ends when no further job is due, when the queue is full, or after `seconds`; the next call continues.
        """
        moved, until = 0, time.monotonic() + seconds
        while True:
            due: Any = self.client.zrangebyscore(self.keys.delayed, "-inf", self._now_ms(), start=0, num=chunk)
            replies = self._runner.run_all([self._calls.due(raw) for raw in due]) if due else []
            moved += replies.count(b"MOVED")
            if len(due) < chunk or b"FULL" in replies or b"EARLY" in replies or time.monotonic() >= until:
                return moved

    def reconcile(self, limit: int = 32, look_ms: int = LOOK_MS) -> int:
        """End jobs whose entry was deleted; return how many.

        Looks at `limit` jobs without a result; all callers together look at a job once in `look_ms`.
        """
        index: Any = self.keys.open
        now = self._now_ms()
        pipe = self.client.pipeline(transaction=False)
        pipe.zrevrangebyscore(index, "(0", "-inf", start=0, num=limit)
        pipe.zrangebyscore(index, 0, now - look_ms, start=0, num=limit)
        missing, others = pipe.execute()
        calls = [self._calls.reconcile(raw, look_ms) for raw in (*others, *missing)]
        return self._runner.run_all(calls).count(b"DONE") if calls else 0

    def remove_consumer(self, name: str) -> bool:
        """Delete a consumer from the groups of all lanes in which no entry is pending for the consumer.

        Return True if no group has this consumer now.
        """
        gone = [self._run(remove_consumer_call(lane, GROUP, name)) for lane in self.keys.lanes]
        return all(gone)

    def _run(self, call: Call) -> Any:
        return self._runner.run(call.script, call.keys, call.args)

    def _now_ms(self) -> int:
        """Read Redis' clock."""
        seconds, micros = self.client.time()
        return seconds * 1000 + micros // 1000


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
