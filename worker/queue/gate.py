"""The gate between waiting and running: START in Redis, before a job's first token is computed.

The engine's thread asks and continues; the starter's thread makes the round trip. The request is on hold meanwhile: it
keeps its place and its blocks in the engine, and takes part in the first step after START has returned.

    engine   plan ─► gate: may it start? ─► hold ─ ─ step, step ─ ─ ► take: release, or drop
                                   │                                   ▲
    starter                        └─► START of all jobs that wait ────┘
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import structlog

from engine.request import Request
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Status
from tokenmill.protocol.scripts import Scripts, Started, StartStatus
from worker.inbox import Do, Inbox
from worker.jobs.held import Held
from worker.jobs.job import Job, Start, new_nonce
from worker.jobs.results import Answer, gave_up
from worker.loop import EngineLoop
from worker.ops import logs
from worker.ops.links import Contact
from worker.ops.telemetry import Telemetry
from worker.queue.outbox import Outbox
from worker.queue.quarantine import Quarantine
from worker.queue.starter import RETRY_SECONDS, Batch, Starter

log = structlog.get_logger()

TURN_SECONDS = 0.1
"""Pause before a job that must wait because of a suspect asks again to start."""
GRACE_SECONDS = 0.005
"""How long the engine waits for START: if a near Redis answers in time, the job joins the step it was planned for."""
CLOSE_SECONDS = 1.0
"""How long `close` waits for the STARTs under way."""


class Gate:
    """Decides which planned requests may run. The engine calls it on its thread."""

    def __init__(
        self,
        scripts: Scripts,
        held: Held,
        loop: EngineLoop,
        inbox: Inbox,
        outbox: Outbox,
        telemetry: Telemetry,
        contact: Contact,
        quarantine: Quarantine,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Connect the parts. `scripts`: over a client of its own, which does not retry for long."""
        self._held = held
        self._loop = loop
        self._outbox = outbox
        self._telemetry = telemetry
        self._quarantine = quarantine
        self._grace = grace_seconds
        self.starter = Starter(scripts, contact, lambda batch: inbox.post(Do(lambda: self.take(batch))))
        self.closed = False
        """Whether nothing new is started, since the worker ends."""

    def __call__(self, requests: list[Request]) -> None:
        """Ask for START of all requests, and drop from the engine those that may not run now."""
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
            batch = Batch(starting)
            alone = self.starter.submit(batch)
            if alone and self.starter.last_seconds < self._grace and batch.done.wait(self._grace):
                self.take(batch)

    def take(self, batch: Batch) -> None:
        """Act on the replies to a batch; a second call does nothing."""
        if batch.taken:
            return
        batch.taken = True
        replies: Sequence[Started | None] = batch.replies or [None] * len(batch.jobs)
        for (job, request), started in zip(batch.jobs, replies, strict=True):
            job.starting = False
            if started is not None:
                job.nonce = new_nonce()
                job.start = dataclasses.replace(job.start, attempt=started.attempt, tries=started.tries)
            if not self._loop.engine.release(job.handle) or not self._held.owns(job):
                continue  # cancelled, expired, lost or handed back meanwhile
            if self.closed or started is None:
                self._put_back(job)
                if not self.closed:
                    self._loop.defer(request, RETRY_SECONDS)
            else:
                self._apply(job, started)

    def close(self) -> None:
        """Start no more jobs; return when all STARTs under way have replies, or Redis has been silent for too long."""
        self.closed = True
        self.starter.wait(CLOSE_SECONDS)

    def _put_back(self, job: Job) -> None:
        self._held.put_back(job)
        self._loop.engine.drop(job.handle)

    def _apply(self, job: Job, started: Started) -> None:
        match started.status:
            case StartStatus.OK:
                self._begin(job, started)
            case StartStatus.CANCELLED:
                job.note_cancel(started.reason)
                self._answer(job, Answer(job.handle, Status.CANCELLED))
            case StartStatus.EXPIRED:
                message = f"ttl_ms: the {job.options.ttl_ms} ms ran out before the job started"
                self._answer(job, Answer.of(job.handle, JobError(ErrorCode.DEADLINE_EXCEEDED, message)))
            case StartStatus.SPENT:
                self._answer(job, Answer.of(job.handle, gave_up(job, None)))
            case StartStatus.DUP | StartStatus.LOST | StartStatus.CAPPED:
                _log_refusal(job, started.status)
                self._held.forget(job.handle)
                self._loop.engine.drop(job.handle)

    def _begin(self, job: Job, started: Started) -> None:
        queued_ms = max(0, started.now_ms - job.ref.added_ms)
        job.start = Start(started.attempt, started.tries, started.fence, time.monotonic(), queued_ms)
        if job.suspect:
            self._telemetry.suspects.inc()
        self._telemetry.queue_time.add(queued_ms / 1000)
        self._telemetry.prompt_tokens += job.options.prompt_tokens or 0

    def _answer(self, job: Job, answer: Answer) -> None:
        self._loop.engine.drop(job.handle)
        self._outbox.give(answer)


def _log_refusal(job: Job, status: StartStatus) -> None:
    if status is StartStatus.LOST:
        logs.job_lost(job)
    elif status is StartStatus.DUP:
        logs.job_duplicate(job)
    else:
        tenant = job.entry.identity.tenant
        message = f"tenant {tenant} runs as many jobs as its limit allows; the job is handed back and tried again later"
        log.debug("job_capped", **job.log_fields, message=message)
