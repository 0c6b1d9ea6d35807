"""The gate between waiting and running: START in Redis, just before a job's first token is computed."""

from __future__ import annotations

import dataclasses
import time

import redis
import structlog

from engine.request import Request
from producer.protocol.errors import ErrorCode, JobError
from producer.protocol.result import Status
from producer.protocol.scripts import Scripts, Started, StartOptions, StartStatus
from worker.blame import Quarantine
from worker.held import Held, Job, new_nonce
from worker.link import Contact, passing
from worker.loop import EngineLoop
from worker.results import Answer, gave_up

log = structlog.get_logger()

TURN_SECONDS = 0.1
"""Until a job that had to let another go first is looked at again."""
RETRY_SECONDS = 0.5
"""Until a job whose START did not get through is tried again."""


class Gate:
    """Called by the engine, on its thread, with a client of its own that does not retry for long."""

    def __init__(
        self, scripts: Scripts, held: Held, loop: EngineLoop, contact: Contact, quarantine: Quarantine
    ) -> None:
        self._scripts = scripts
        self._held = held
        self._loop = loop
        self._contact = contact
        self._quarantine = quarantine
        self.closed = False
        """While draining nothing new is started."""
        self._retry_at = 0.0
        """`time.monotonic()` until which no START is tried, since one did not get through."""

    def __call__(self, requests: list[Request]) -> None:
        """START all of them; who may not run is dropped from the engine before anything is computed for it."""
        starting: list[tuple[Job, Request]] = []
        for request in requests:
            job = self._held.get(request.id)
            if job is not None and not self.closed and not self._quarantine.admits(job):
                self._loop.engine.drop(request.id)
                self._loop.defer(dataclasses.replace(request), TURN_SECONDS)
                continue
            job = self._held.begin(request.id)
            if job is None:
                self._loop.engine.drop(request.id)
            elif self.closed:
                self._put_back(job)
            else:
                starting.append((job, request))
        if starting and not self._start([job for job, _ in starting]):
            for job, request in starting:
                self._put_back(job)
                self._loop.defer(dataclasses.replace(request), RETRY_SECONDS)

    def _put_back(self, job: Job) -> None:
        self._held.rest(job)
        self._loop.engine.drop(job.handle)

    def _start(self, jobs: list[Job]) -> bool:
        """One round trip for all. False: Redis cannot be reached now, or could not be a moment ago.

        In the second case nothing is asked of Redis: requests before these wait for the same, and keep their turn.
        """
        if time.monotonic() < self._retry_at:
            return False
        try:
            replies = self._scripts.start_all([(job.ref, job.who, _options(job)) for job in jobs])
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("start", error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        for job, started in zip(jobs, replies, strict=True):
            job.nonce = new_nonce()
            self._apply(job, started)
        return True

    def _apply(self, job: Job, started: Started) -> None:
        job.attempt, job.tries = started.attempt, started.tries
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
                log.info("job_not_started", id=job.id, why=started.status.value)
                self._held.forget(job.handle)
                self._loop.engine.drop(job.handle)

    def _answer(self, job: Job, answer: Answer) -> None:
        self._loop.engine.drop(job.handle)
        self._loop.give(answer)


def _options(job: Job) -> StartOptions:
    return {
        "prompt_tokens": job.prompt_tokens or 0,
        "ttl_ms": job.ttl_ms,
        "max_attempts": job.max_attempts,
        "alone": job.suspect,
        "strict": job.strict,
        "nonce": job.nonce,
    }
