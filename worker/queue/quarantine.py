"""Finds the job that kills its workers: suspects run one at a time, with no other job started.

A job that was running at two deaths of its workers is a suspect; so are the innocent jobs that ran beside it. A guilty
job that runs alone stops no other job when it kills its worker, and is given up after its last attempt; an innocent job
gets past the point at which its last run ended, and is cleared. (A job that kills its worker while it is parsed and
tokenised, before it starts, is found by a mark, see `Quarantine.may_read`.)

Only a job that was being computed can be to blame. A worker that was asked to end marks its running jobs as excused
(`excuse.lua`), since a kill that follows comes from its supervisor. A worker whose engine died or hangs counts a death
for the jobs of the step under way alone.

    ordinary jobs run ──► a suspect waits, no job starts ──► it runs alone ──► it ends or is cleared
            ▲            at most one lease: then running jobs are handed back         │
            └─────────── for at least as long, if there are ordinary jobs ◄───────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
import structlog

from tokenmill.protocol.scripts import Delivery, Ref, Scripts
from worker.jobs.held import Held
from worker.jobs.job import Job, Phase

log = structlog.get_logger()

READING_TTL_S = 7 * 86400
"""How long a death while reading is remembered, if no worker clears it."""
DEATHS = 2
"""Deaths since the last clearing that make a suspect: after a single crash no job runs alone."""
_KNOWN = ("state", "worker", "deaths", "cleared", "lane", "entry", "fence", "excused")
"""Fields of `job:<id>` that tell whether a job is a suspect."""
MARGIN = 64
"""Number of tokens by which a suspect must pass the point at which its last run ended: its last tokens may not have
been published."""


@dataclass(slots=True)
class _Place:
    """The place of the one suspect that a worker may hold."""

    lane: str
    entry: str
    mark: float
    """Tokens after which the suspect is cleared."""
    since: float
    """`time.monotonic()` from which on no ordinary job is started."""
    job: Job | None = None


class Quarantine:
    """Holds at most one suspect: the intake adds it, the gate asks whether a job may start, the keeper clears it."""

    def __init__(self, scripts: Scripts, held: Held, lease_seconds: float) -> None:
        self._scripts = scripts
        self._held = held
        self._lease = lease_seconds
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._ordinary_until = 0.0
        self._clearing = False
        self._doubted: dict[tuple[str, str], int] = {}
        """(lane, entry ID) of entries just taken over that never started → workers that died while reading them."""
        self._excused: list[Job] = []
        """Running jobs that are excused while this worker reads a marked job."""
        self.turned_away = False
        """Whether the last sweep handed suspects back because the place was taken."""

    # ── the intake's thread ───────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Prepare for a sweep."""
        self.turned_away = False
        self._doubted.clear()
        self.forget_lost()

    def forget_lost(self) -> None:
        """Free the suspect's place if its entry was lost before it became a job."""
        with self._lock:
            if self._place is not None and self._place.job is None:
                self._place = None

    def sift(self, deliveries: list[Delivery], doubt: bool = False) -> list[Delivery]:
        """Return the ordinary entries, and one suspect if the place is free; hand all other suspects back.

        Args:
            deliveries: entries just taken over.
            doubt: whether the entries' workers died, perhaps while they read these entries.

        Raises:
            redis.RedisError: Redis is away, or refuses a command. Nothing is lost: the next sweep finds the entries.
        """
        pipe = self._scripts.client.pipeline(transaction=False)
        for delivery in deliveries:
            job_id = delivery.fields.get(b"id", b"").decode("utf-8", "replace")
            pipe.hmget(self._scripts.keys.job(job_id), _KNOWN)
        replies = pipe.execute(raise_on_error=False)  # a job hash of a wrong type is reported by START
        if doubt:
            self._doubt(deliveries, replies)
        return [
            delivery
            for delivery, known in zip(deliveries, replies, strict=True)
            if not isinstance(known, list) or self._keep(delivery, known)
        ]

    def _doubt(self, deliveries: list[Delivery], replies: list[Any]) -> None:
        """Remember the entries that never started: each may have killed its worker while the worker read it."""
        unread = [
            delivery
            for delivery, known in zip(deliveries, replies, strict=True)
            if not (isinstance(known, list) and known[0] == b"running" and known[5] == delivery.entry.encode())
        ]
        if unread:
            members = [_member(delivery.lane, delivery.entry) for delivery in unread]
            deaths: Any = self._scripts.client.hmget(self._scripts.keys.reading, members)
            for delivery, count in zip(unread, deaths, strict=True):
                self._doubted[delivery.lane, delivery.entry] = int(count or 0)

    def may_read(self, job: Job) -> bool:
        """Return whether to parse and tokenise a job: not if that has killed as many workers as the job has attempts.

        An entry whose last worker died before the job started is marked in Redis while it is read, so that after
        another death the next worker knows which entry this worker was reading. Jobs that run meanwhile are excused.

        Raises:
            redis.RedisError: the job is not marked.
        """
        deaths = self._doubted.pop((job.entry.lane, job.entry.id), None)
        if deaths is None:
            return True
        if deaths >= max(1, job.options.max_attempts - 1):  # the first death is not counted: there was no mark yet
            return False
        pipe = self._scripts.client.pipeline(transaction=True)
        pipe.hincrby(self._scripts.keys.reading, _member(job.entry.lane, job.entry.id), 1)
        pipe.expire(self._scripts.keys.reading, READING_TTL_S)
        pipe.execute()
        job.marked = True
        self._excused = [other for other in self._held.all() if other.phase is Phase.STARTED and not other.excused]
        self._scripts.excuse([other.ref for other in self._excused])
        return True

    def was_read(self, job: Job) -> None:
        """Remove a job's mark: this worker has read the job and lives, so reading it killed no earlier worker."""
        if job.marked:
            job.marked = False
            pipe = self._scripts.client.pipeline(transaction=False)
            pipe.hdel(self._scripts.keys.reading, _member(job.entry.lane, job.entry.id))
            for other in self._excused:
                if not other.excused:  # excused by a drain that has begun meanwhile
                    pipe.hdel(self._scripts.keys.job(other.id), "excused")
            self._excused = []
            try:
                pipe.execute()
            except redis.RedisError as error:
                log.warning("mark_not_cleared", id=job.id, message=str(error))

    def _keep(self, delivery: Delivery, known: Any) -> bool:
        state, worker, deaths, cleared, lane, entry, fence, excused = known
        if lane != delivery.lane.encode() or entry != delivery.entry.encode():
            return True
        died = state == b"running" and worker not in (self._scripts.consumer.encode(), excused)
        if int(deaths or 0) + died - int(cleared or 0) < DEATHS:
            return True
        job_id = delivery.fields[b"id"].decode()
        if self.taken:
            self.turned_away = True
            # Not graceful: that would erase the death that made the job a suspect.
            ref = Ref(delivery.lane, delivery.entry, job_id)
            self._scripts.yield_(ref, idle_ms=round(self._lease * 1000), graceful=False)
            return False
        mark = float("inf") if delivery.fields.get(b"stream") == b"0" else self._progress(job_id, fence) + MARGIN
        with self._lock:
            since = max(time.monotonic(), self._ordinary_until)
            self._place = _Place(delivery.lane, delivery.entry, mark, since)
        return True

    def _progress(self, job_id: str, fence: bytes | None) -> int:
        """Return the number of tokens that the job's last run published."""
        if fence is None:
            return 0
        events: Any = self._scripts.client.xrange(
            self._scripts.keys.out(job_id), f"{int(fence)}-1", f"{int(fence)}-{(1 << 64) - 1}"
        )
        return sum(int(fields.get(b"tokens", 0)) for _, fields in events)

    def enter(self, job: Job) -> None:
        """Record `job` as the suspect, if it was made of the entry for which the place is reserved."""
        with self._lock:
            place = self._place
            if place is not None and place.job is None and (place.lane, place.entry) == (job.entry.lane, job.entry.id):
                place.job, job.suspect = job, True
                message = "the job was running at two deaths of its workers, so it runs with no other job beside it"
                log.warning("suspect_held", **job.log_fields, message=message)

    @property
    def taken(self) -> bool:
        """Whether this worker holds a suspect that is neither ended nor cleared."""
        with self._lock:
            return self._now() is not None

    # ── the engine's thread ───────────────────────────────────────────────────────────────────────────────────────

    def admits(self, job: Job) -> bool:
        """Return whether a job may be started now."""
        with self._lock:
            place, now = self._now(), time.monotonic()
            if place is None or place.job is None:
                return True
            if place.job is not job:
                return place.job.phase is Phase.WAITING and now < place.since
            others = [other for other in self._held.all() if other is not job]
            if self._clearing or any(other.phase is Phase.STARTED for other in others):
                return False
            return now >= place.since or not others

    # ── the keeper's thread ───────────────────────────────────────────────────────────────────────────────────────

    def tick(self, hand_back: Callable[[Callable[[Job], bool]], None]) -> None:
        """Clear the suspect if it has passed its mark; hand running jobs back if the suspect has waited for a lease.

        `hand_back`: hands the held jobs that it accepts back to the queue; no start and no death counts.
        """
        with self._lock:
            place = self._now()
        if place is None or place.job is None:
            return
        job = place.job
        if job.phase is Phase.STARTED:
            if job.outgoing.tokens >= place.mark:
                self._clear(job)
        elif time.monotonic() - place.since >= self._lease:
            self._clearing = True
            try:
                hand_back(lambda other: other is not job and other.phase is Phase.STARTED and not other.starting)
            finally:
                self._clearing = False

    def _clear(self, job: Job) -> None:
        self._scripts.clear(job.ref, job.start.fence)
        with self._lock:
            job.suspect = False
            if self._place is not None and self._place.job is job:
                self._leave()
        log.info("suspect_cleared", id=job.id, tokens=job.outgoing.tokens)

    # ── under the lock ────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> _Place | None:
        if self._place is not None and self._place.job is not None and not self._held.owns(self._place.job):
            self._leave()
        return self._place

    def _leave(self) -> None:
        if self._place is not None:
            now = time.monotonic()
            self._ordinary_until = now + max(self._lease, now - self._place.since)
            self._place = None


def _member(lane: str, entry: str) -> str:
    return f"{lane} {entry}"
