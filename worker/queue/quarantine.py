"""Which job kills its workers: the suspects run one at a time, with no other job started.

(What kills a worker before it starts, when it is parsed and tokenised, is found by a mark, see `Quarantine.may_read`.)

A job that was running at two deaths of its workers is a suspect; so are the innocents that ran beside it. Alone, the
guilty one takes nobody with it and is given up after its last attempt; an innocent gets past the place where its last
run ended, and is cleared.

Only what was being computed can be to blame. A worker that was told to end marks what it runs (`excuse.lua`): the kill
that follows is its supervisor's. A worker whose engine died or hangs counts a death of the step under way alone.

    ordinary jobs run ──► a suspect waits, nothing new starts ──► it is alone ──► ended or cleared
            ▲                 at most one lease: then what runs is handed back          │
            └───────────── at least as long, if there are ordinary jobs ◄───────────────┘
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
from worker.jobs.held import Held, Job, Phase

log = structlog.get_logger()

READING_TTL_S = 7 * 86400
"""How long a death while reading is remembered, should nobody come to clear it."""
DEATHS = 2
"""Deaths, not cleared since, that make a suspect: one crash makes nobody run alone."""
_KNOWN = ("state", "worker", "deaths", "cleared", "lane", "entry", "fence", "excused")
"""Fields of a job's hash by which a suspect is known."""
MARGIN = 64
"""Tokens by which a suspect must pass the progress of its last run; some of that was perhaps never published."""


@dataclass(slots=True)
class _Place:
    """The one suspect that a worker holds."""

    lane: str
    entry: str
    mark: float
    """Tokens after which it is cleared."""
    since: float
    """`time.monotonic()` from which on ordinary jobs make way."""
    job: Job | None = None


class Quarantine:
    """The intake puts a suspect in, the gate asks who may start, the keeper moves things on."""

    def __init__(self, scripts: Scripts, held: Held, lease_seconds: float) -> None:
        self._scripts = scripts
        self._held = held
        self._lease = lease_seconds
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._ordinary_until = 0.0
        self._clearing = False
        self._doubted: dict[tuple[str, str], int] = {}
        """Entries just taken over that never started, with the deaths of those who were reading them."""
        self._excused: list[Job] = []
        """Running jobs that are not to blame if this process dies of what it is reading."""
        self.turned_away = False
        """Whether suspects were handed back because the place was taken."""

    # ── the intake's thread ───────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """A sweep begins."""
        self.turned_away = False
        self._doubted.clear()
        self.forget_lost()

    def forget_lost(self) -> None:
        """What was found before this and took the place without becoming a job was lost on the way."""
        with self._lock:
            if self._place is not None and self._place.job is None:
                self._place = None

    def sift(self, deliveries: list[Delivery], doubt: bool = False) -> list[Delivery]:
        """Of entries just taken over, the ordinary ones and one suspect if the place is free; others are handed back.

        `doubt`: their holders died, perhaps of reading them.

        Raises:
            redis.RedisError: nothing is lost, the entries are found again.
        """
        pipe = self._scripts.client.pipeline(transaction=False)
        for delivery in deliveries:
            job_id = delivery.fields.get(b"id", b"").decode("utf-8", "replace")
            pipe.hmget(self._scripts.keys.job(job_id), _KNOWN)
        replies = pipe.execute(raise_on_error=False)  # a job hash of another type is START's to complain of
        if doubt:
            self._doubt(deliveries, replies)
        return [
            one
            for one, known in zip(deliveries, replies, strict=True)
            if not isinstance(known, list) or self._keep(one, known)
        ]

    def _doubt(self, deliveries: list[Delivery], replies: list[Any]) -> None:
        """Remember which of them never started: those may have killed their holders already when they were read."""
        unread = [
            one
            for one, known in zip(deliveries, replies, strict=True)
            if not (isinstance(known, list) and known[0] == b"running" and known[5] == one.entry.encode())
        ]
        if unread:
            members = [_member(one.lane, one.entry) for one in unread]
            deaths: Any = self._scripts.client.hmget(self._scripts.keys.reading, members)
            self._doubted |= {(one.lane, one.entry): int(n or 0) for one, n in zip(unread, deaths, strict=True)}

    def may_read(self, job: Job) -> bool:
        """Whether to parse and tokenise this job; false where that has killed as many workers as the job has attempts.

        An entry whose holder died before it started is marked while it is read, and only it: so that whoever takes it
        over after a death knows what that worker was doing. What runs meanwhile is excused.

        Raises:
            redis.RedisError: it is not marked.
        """
        deaths = self._doubted.pop((job.lane, job.entry), None)
        if deaths is None:
            return True
        if deaths >= max(1, job.max_attempts - 1):  # one death, the first, is not in that count
            return False
        pipe = self._scripts.client.pipeline(transaction=True)
        pipe.hincrby(self._scripts.keys.reading, _member(job.lane, job.entry), 1)
        pipe.expire(self._scripts.keys.reading, READING_TTL_S)
        pipe.execute()
        job.marked = True
        self._excused = [other for other in self._held.all() if other.phase is Phase.STARTED and not other.excused]
        self._scripts.excuse([other.ref for other in self._excused])
        return True

    def was_read(self, job: Job) -> None:
        """This process lives: whatever its holders died of, it was not the reading of this job."""
        if job.marked:
            job.marked = False
            pipe = self._scripts.client.pipeline(transaction=False)
            pipe.hdel(self._scripts.keys.reading, _member(job.lane, job.entry))
            for other in self._excused:
                if not other.excused:  # a drain may have begun
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
            # Not gracefully: that would clear the death that made it a suspect.
            ref = Ref(delivery.lane, delivery.entry, job_id)
            self._scripts.yield_(ref, idle_ms=round(self._lease * 1000), graceful=False)
            return False
        mark = float("inf") if delivery.fields.get(b"stream") == b"0" else self._progress(job_id, fence) + MARGIN
        with self._lock:
            since = max(time.monotonic(), self._ordinary_until)
            self._place = _Place(delivery.lane, delivery.entry, mark, since)
        return True

    def _progress(self, job_id: str, fence: bytes | None) -> int:
        """Tokens that the job's last run published."""
        if fence is None:
            return 0
        events: Any = self._scripts.client.xrange(
            self._scripts.keys.out(job_id), f"{int(fence)}-1", f"{int(fence)}-{(1 << 64) - 1}"
        )
        return sum(int(fields.get(b"tokens", 0)) for _, fields in events)

    def enter(self, job: Job) -> None:
        """A job was made of an entry: if that is the suspect, it has its place."""
        with self._lock:
            place = self._place
            if place is not None and place.job is None and (place.lane, place.entry) == (job.lane, job.entry):
                place.job, job.suspect = job, True
                log.warning(
                    "suspect_held",
                    id=job.id,
                    lane=job.lane,
                    entry=job.entry,
                    message="it was running at two deaths of its workers, so it runs with no other job beside it",
                )

    @property
    def taken(self) -> bool:
        """Whether a suspect is held that is neither ended nor cleared."""
        with self._lock:
            return self._now() is not None

    # ── the engine's thread ───────────────────────────────────────────────────────────────────────────────────────

    def admits(self, job: Job) -> bool:
        """Whether this job may be started now."""
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
        """Clear the suspect that has passed its mark; make way for one that has waited a lease.

        `hand_back` gives held jobs back to the queue, gracefully.
        """
        with self._lock:
            place = self._now()
        if place is None or place.job is None:
            return
        job = place.job
        if job.phase is Phase.STARTED:
            if job.tokens >= place.mark:
                self._clear(job)
        elif time.monotonic() - place.since >= self._lease:
            self._clearing = True
            try:
                hand_back(lambda other: other is not job and other.phase is Phase.STARTED and not other.starting)
            finally:
                self._clearing = False

    def _clear(self, job: Job) -> None:
        self._scripts.clear(job.ref, job.fence)
        job.suspect = False
        log.info("suspect_cleared", id=job.id, tokens=job.tokens)
        with self._lock:
            self._leave()

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
