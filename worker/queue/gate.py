"""The gate between waiting and running: START in Redis, before a job's first token is computed.

The engine's thread asks and goes on; the starter's thread makes the round trip. A request is on hold meanwhile: it has
its place and its blocks in the engine, and takes part in the first step after its START came back.

    engine   plan ─► gate: may it start? ─► hold ─ ─ step, step ─ ─ ► take: release, or drop
                                   │                                   ▲
    starter                        └─► START of all that were asked ───┘
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence

import redis
import structlog

from engine.request import Request
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Status
from tokenmill.protocol.scripts import Scripts, Started, StartOptions, StartStatus
from worker.jobs.held import Held, Job, new_nonce
from worker.jobs.results import Answer, gave_up
from worker.loop import Do, EngineLoop
from worker.ops import logs
from worker.ops.links import Contact, passing
from worker.queue.quarantine import Quarantine

log = structlog.get_logger()

TURN_SECONDS = 0.1
"""Until a job that had to let another go first is looked at again."""
RETRY_SECONDS = 0.5
"""Until a job whose START did not get through is tried again."""
GRACE_SECONDS = 0.005
"""How long the engine waits for a START: what a near Redis answers meanwhile joins the step that it was planned for."""
CLOSE_SECONDS = 1.0
"""How long `close` waits for the STARTs under way."""


@dataclasses.dataclass(eq=False, slots=True)
class Asked:
    """Jobs that were planned in one step, on their way to Redis and back."""

    jobs: list[tuple[Job, Request]]
    replies: list[Started] | None = None
    """None: Redis could not be reached."""
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    taken: bool = False


class Gate:
    """Called by the engine, on its thread. `run` is the starter's thread; its client does not retry for long."""

    def __init__(
        self,
        scripts: Scripts,
        held: Held,
        loop: EngineLoop,
        contact: Contact,
        quarantine: Quarantine,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._scripts = scripts
        self._held = held
        self._loop = loop
        self._contact = contact
        self._quarantine = quarantine
        self._grace = grace_seconds
        self._near = True
        """Whether the last START came back within the grace."""
        self._queue: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._open: set[Asked] = set()
        """Those whose reply has not come yet."""
        self.closed = False
        """While draining nothing new is started."""
        self._retry_at = 0.0
        """`time.monotonic()` until which no START is tried, since one did not get through."""

    # ── the engine's thread ───────────────────────────────────────────────────────────────────────────────────────

    def __call__(self, requests: list[Request]) -> None:
        """Ask for the START of all of them; who may not run is dropped from the engine."""
        engine = self._loop.engine
        starting: list[tuple[Job, Request]] = []
        for request in requests:
            job = self._held.get(request.id)
            if job is not None and not self.closed and not self._quarantine.admits(job):
                engine.drop(request.id)
                self._loop.defer(request, TURN_SECONDS)
                continue
            job = self._held.begin(request.id)
            if job is None:
                engine.drop(request.id)
            elif self.closed:
                self._put_back(job)
            else:
                job.starting = True
                engine.hold(request.id)
                starting.append((job, request))
        if starting:
            asked = Asked(starting)
            alone = not self._open
            self._open.add(asked)
            self._queue.put(asked)
            if alone and self._near and asked.done.wait(self._grace):
                self.take(asked)

    def take(self, asked: Asked) -> None:
        """Act on the replies, once."""
        if asked.taken:
            return
        asked.taken = True
        replies: Sequence[Started | None] = asked.replies or [None] * len(asked.jobs)
        for (job, request), started in zip(asked.jobs, replies, strict=True):
            job.starting = False
            if started is not None:
                job.nonce = new_nonce()
                job.attempt, job.tries = started.attempt, started.tries
            if not self._loop.engine.release(job.handle) or not self._held.owns(job):
                continue  # cancelled, expired, lost or handed back meanwhile
            if self.closed or started is None:
                self._put_back(job)
                if not self.closed:
                    self._loop.defer(request, RETRY_SECONDS)
            else:
                self._apply(job, started)

    def _put_back(self, job: Job) -> None:
        self._held.rest(job)
        self._loop.engine.drop(job.handle)

    def _apply(self, job: Job, started: Started) -> None:
        match started.status:
            case StartStatus.OK:
                job.started_at = time.monotonic()
                job.queued_ms = max(0, started.now_ms - job.ref.added_ms)
                job.fence = started.fence
                telemetry = self._loop.telemetry
                if job.suspect:
                    telemetry.suspects.inc()
                telemetry.queue_time.add(job.queued_ms / 1000)
                telemetry.prompt_tokens += job.prompt_tokens or 0
            case StartStatus.CANCELLED:
                job.cancel_reason = started.reason
                self._answer(job, Answer(job.handle, Status.CANCELLED))
            case StartStatus.EXPIRED:
                error = JobError(ErrorCode.DEADLINE_EXCEEDED, f"ttl_ms: {job.ttl_ms} ms were over before the start")
                self._answer(job, Answer.of(job.handle, error))
            case StartStatus.SPENT:
                self._answer(job, Answer.of(job.handle, gave_up(job, None)))
            case StartStatus.DUP | StartStatus.LOST | StartStatus.CAPPED:
                _log_refusal(job, started.status)
                self._held.forget(job.handle)
                self._loop.engine.drop(job.handle)

    def _answer(self, job: Job, answer: Answer) -> None:
        self._loop.engine.drop(job.handle)
        self._loop.give(answer)

    # ── the starter's thread ──────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Make the round trips until `stop`."""
        while (asked := self._queue.get()) is not None:
            self._start([asked, *self._waiting()])

    def turn(self) -> bool:
        """One round trip for all that were asked so far; False where there is nothing."""
        waiting = self._waiting()
        if waiting:
            self._start(waiting)
        return bool(waiting)

    def _waiting(self) -> list[Asked]:
        found = []
        while not self._queue.empty():
            one = self._queue.get()
            if one is None:
                self._queue.put(None)
                break
            found.append(one)
        return found

    def _start(self, some: list[Asked]) -> None:
        """Start all, unless a START did not get through a moment ago: then these keep their turn behind it."""
        if time.monotonic() >= self._retry_at:
            self._ask_redis(some)
        for asked in some:
            self._open.discard(asked)
            asked.done.set()
            self._loop.post(Do(lambda asked=asked: self.take(asked)))  # type: ignore[misc]

    def _ask_redis(self, some: list[Asked]) -> None:
        began = time.monotonic()
        jobs = [job for asked in some for job, _ in asked.jobs]
        try:
            replies = iter(self._scripts.start_all([(job.ref, job.who, _options(job)) for job in jobs]))
            for asked in some:
                asked.replies = [next(replies) for _ in asked.jobs]
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("start", error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        self._near = time.monotonic() - began < self._grace

    # ── the main thread ───────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Start nothing from now on; what is under way has come back on return, unless Redis is silent."""
        self.closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        for asked in list(self._open):
            asked.done.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End the starter's thread after the round trip under way."""
        self._queue.put(None)


def _log_refusal(job: Job, status: StartStatus) -> None:
    if status is StartStatus.LOST:
        logs.job_lost(job)
    elif status is StartStatus.DUP:
        message = "the id has its result, or another entry of it is live; this entry is deleted"
        log.info("job_duplicate", id=job.id, lane=job.lane, entry=job.entry, message=message)
    else:
        message = f"tenant {job.who.tenant} has as many running jobs as it may; the job is handed back for a while"
        log.debug("job_capped", id=job.id, lane=job.lane, entry=job.entry, message=message)


def _options(job: Job) -> StartOptions:
    return {
        "prompt_tokens": job.prompt_tokens or 0,
        "ttl_ms": job.ttl_ms,
        "max_attempts": job.max_attempts,
        "alone": job.suspect,
        "strict": job.strict,
        "nonce": job.nonce,
    }
