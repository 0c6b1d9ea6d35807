"""The publisher's thread: writes the engine's outputs to Redis, all token events of a step in one command.

Writes are idempotent: events carry explicit IDs, and FINALISE takes effect once. So after a connection error the same
write is tried again; a refusal by Redis shows whether the job was lost, or only its stream. The text kept meanwhile is
bounded by the running jobs, since no job starts while Redis is away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import orjson
import redis
import structlog

from engine.outputs import Delta, Finished, StepOutput
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.scripts import (
    DeadLetter,
    Ending,
    EndOptions,
    Refused,
    Scripts,
    Started,
    StartStatus,
    TokenBatch,
    TokenWrite,
    Why,
)
from worker.inbox import Cancel, Drop, Inbox
from worker.jobs.held import Held
from worker.jobs.job import Chunk, Job, new_nonce
from worker.jobs.results import Answer, Results, fault, gave_up
from worker.ops import logs
from worker.ops.links import Contact, passing
from worker.ops.telemetry import Telemetry
from worker.queue.outbox import Outbox, Output

log = structlog.get_logger()

ENDINGS = 64
"""Maximum number of results written in one round trip."""
RETRY_SECONDS = 0.5
"""Pause between two tries while Redis accepts no writes."""


@dataclass(frozen=True, slots=True)
class Final:
    """A result to be written, and its dead letter, if any."""

    result: Result
    dead: DeadLetter | None = None


class Publisher:
    """Consumes the outbox. A job leaves the registry here, once its result is in Redis."""

    def __init__(
        self,
        scripts: Scripts,
        results: Results,
        held: Held,
        inbox: Inbox,
        outbox: Outbox,
        telemetry: Telemetry,
        contact: Contact,
        stop: threading.Event,
        retry: Callable[[Job, JobError], None],
    ) -> None:
        """Connect the parts. `retry`: hands a job back whose error is retryable."""
        self._scripts = scripts
        self._results = results
        self._held = held
        self._inbox = inbox
        self._outbox = outbox
        self._telemetry = telemetry
        self._contact = contact
        self._stop = stop
        self._retry = retry
        self._pending: dict[str, Job] = {}
        """Handle → job with chunks or a result that Redis has not confirmed."""
        self._finals: dict[str, Final] = {}

    @property
    def backlog(self) -> int:
        """Number of outputs not taken in yet, plus jobs with unwritten text or results."""
        return self._outbox.qsize() + len(self._pending)

    def run(self) -> None:
        """Write outputs until `stop` is set, then once more. Writes that Redis refuses for now are tried again."""
        while not self._stop.is_set():
            self.collect(block=not self._pending)
            if not self._try_flush():
                self._stop.wait(RETRY_SECONDS)
        self.collect(block=False)
        self._try_flush()

    def _try_flush(self) -> bool:
        try:
            return self.flush()
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("publish", error)
            return False

    # ── from the outbox ───────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, block: bool) -> None:
        """Take all outputs from the outbox; several deltas of one choice become one chunk."""
        try:
            at, output = self._outbox.get(block=block, timeout=0.2)
            while True:
                self._take(at, output)
                at, output = self._outbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, at: float, output: Output) -> None:
        if isinstance(output, StepOutput):
            self._take_deltas(at, output.deltas)
            for finished in output.finished:
                self._take_finished(finished)
        elif (job := self._held.get(output.handle)) is not None:
            self._end(job, self._results.of_answer(job, output), output.error)

    def _take_deltas(self, at: float, deltas: Sequence[Delta]) -> None:
        """Keep the new text of a step for the next write. Runs for every token, so microseconds count."""
        get, pending, telemetry = self._held.get, self._pending, self._telemetry
        gaps = []
        for delta in deltas:
            job = get(delta.request_id)
            if job is None or not job.start.fence:
                continue
            out, ids = job.outgoing, delta.token_ids
            out.tokens += len(ids)
            before, out.last_text_at = out.last_text_at, at
            if before is None:
                out.first_token_at = at
                telemetry.first_token.add((job.start.since_queued(at) or 0) / 1000)
            else:
                gaps.append(at - before)
            if job.entry.identity.stream:
                out.add_text(delta.index, delta.text, ids, delta.logprobs)
                pending[job.handle] = job
        telemetry.inter_token.add_all(gaps)

    def _take_finished(self, finished: Finished) -> None:
        job = self._held.get(finished.request_id)
        if job is None:
            return
        error = fault(finished)
        if error is not None and error.retryable:
            if job.start.tries < job.options.max_attempts:
                self._telemetry.retries.inc()
                self._retry(job, error)
                return
            error = gave_up(job, error)
        self._end(job, self._results.of_finished(job, finished, error), error)

    def _end(self, job: Job, result: Result, error: JobError | None) -> None:
        dead = None
        if error is not None and error.code is ErrorCode.GAVE_UP:
            dead = DeadLetter(error.code, error.message, job.start.attempt, job.entry.body)
        job.outgoing.over = True
        self._finals[job.handle] = Final(result, dead)
        self._pending[job.handle] = job

    # ── to Redis ──────────────────────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> bool:
        """Write the pending text and results, except of jobs whose lease has run out: these wait for a renewal.

        Returns:
            Whether nothing is pending any more.

        Raises:
            redis.RedisError: Redis is away, or refuses a command. Nothing is lost: call again.
        """
        now = time.monotonic()
        speaking: list[Job] = []
        ending: list[Job] = []
        get = self._held.get
        for job in list(self._pending.values()):
            if get(job.handle) is not job:
                self._settle(job)
            elif job.lease_until > now:
                (ending if job.outgoing.over else speaking).append(job)
        self._finalise(ending)  # first, since readers wait for the end most
        self._publish(speaking)
        return not self._pending

    def _settle(self, job: Job) -> None:
        """Forget a job that has nothing left to write."""
        self._pending.pop(job.handle, None)
        self._finals.pop(job.handle, None)

    def _publish(self, jobs: list[Job]) -> None:
        batch = TokenBatch(self._scripts.keys)
        add = batch.add
        for job in jobs:
            job_id, fence, with_ids = job.entry.identity.id, job.start.fence, job.options.token_ids
            for chunk in job.outgoing.number_chunks():
                if chunk.logprobs is None and not with_ids:
                    add(job_id, fence, chunk.n or 0, chunk.index, chunk.text, len(chunk.token_ids))
                else:
                    add(job_id, fence, *self._event(job, chunk))
        refused = {
            refusal.job_id: refusal
            for refusal in reversed(self._scripts.publish(batch))
            if refusal.why is not Why.REPEAT
        }
        for job in jobs:
            if refused and job.id in refused:
                self._after_refusal(job, refused[job.id])
            else:
                job.outgoing.confirm()
                del self._pending[job.handle]

    def _after_refusal(self, job: Job, refused: Refused) -> None:
        if refused.why is Why.LOST:
            self._lose(job)
        elif refused.why is Why.GONE:
            self._start_again(job)
        else:
            # Redis is full, most likely; FINALISE is accepted all the same, and carries the unpublished text.
            self._contact.failed("publish", redis.ResponseError(refused.last_id))
            job.outgoing.confirm(below=refused.n)

    def _finalise(self, jobs: list[Job]) -> None:
        """Write the results of jobs that have ended, up to `ENDINGS` in one round trip."""
        for at in range(0, len(jobs), ENDINGS):
            some = jobs[at : at + ENDINGS]
            for job in some:
                job.outgoing.ending = True
            ends = [(job.ref, job.entry.identity, self._finals[job.handle].result, self._options(job)) for job in some]
            try:
                endings = self._scripts.end_all(ends)
            except redis.RedisError:
                for job in some:
                    job.outgoing.ending = False
                raise
            for job, ending in zip(some, endings, strict=True):
                self._after_end(job, ending)

    def _options(self, job: Job) -> EndOptions:
        dead = self._finals[job.handle].dead
        callback = job.entry.callback
        if not job.started:
            prompt_tokens = job.options.prompt_tokens or 0
            return {"fence": None, "prompt_tokens": prompt_tokens, "callback": callback, "dead": dead}
        out = job.outgoing
        return {
            "fence": job.start.fence,
            "published": out.confirmed if job.entry.identity.stream else 0,
            "events": [TokenWrite(*self._event(job, chunk)) for chunk in out.number_chunks()],
            "callback": callback,
            "dead": dead,
        }

    def _after_end(self, job: Job, ending: Ending) -> None:
        if ending in (Ending.GONE, Ending.LOST):
            job.outgoing.ending = False
            (self._start_again if ending is Ending.GONE else self._lose)(job)
        else:
            final = self._finals[job.handle]
            self._held.forget(job.handle)
            self._settle(job)
            if ending is Ending.DUP:
                logs.job_duplicate(job)
            else:
                self._count_end(job, final)
                _log_end(final.result)

    def _count_end(self, job: Job, final: Final) -> None:
        self._telemetry.ended(final.result)
        if final.dead is not None:
            self._telemetry.dead_letters.labels(final.dead.code.value).inc()
        seen_at = None if job.cancellation is None else job.cancellation.seen_at
        if final.result.status is Status.CANCELLED and seen_at is not None:
            self._telemetry.cancel_latency.add(time.monotonic() - seen_at)

    def _start_again(self, job: Job) -> None:
        """Call START for a new fence and write the whole text again, since Redis has lost events of the job."""
        prompt_tokens = job.options.prompt_tokens or 0
        started = self._scripts.start(job.ref, job.entry.identity, prompt_tokens=prompt_tokens, nonce=job.nonce)
        job.nonce = new_nonce()
        message = "Redis has lost text of the job that this worker had written; the whole text is written again"
        log.warning("stream_lost", **job.log_fields, message=message)
        if started.status is StartStatus.OK:
            job.outgoing.write_again()
            job.start = replace(job.start, fence=started.fence, attempt=started.attempt)
        elif started.status is StartStatus.CANCELLED:
            self._cancelled_again(job, started)
        else:
            self._lose(job)

    def _cancelled_again(self, job: Job, started: Started) -> None:
        """End a job that was cancelled while its text was lost: without choices, like a job that never started."""
        job.note_cancel(started.reason)
        job.start = replace(job.start, fence=0)
        job.outgoing.chunks.clear()
        if job.handle in self._finals:
            self._end(job, self._results.of_answer(job, Answer(job.handle, Status.CANCELLED)), None)
        else:
            self._settle(job)
            self._inbox.post(Cancel(job.handle))

    def _lose(self, job: Job) -> None:
        """Write nothing more of a job that another worker holds, and free its blocks."""
        self._telemetry.leases_lost.inc()
        logs.job_lost(job)
        self._held.forget(job.handle)
        self._settle(job)
        self._inbox.post(Drop(job.handle))

    def _event(self, job: Job, chunk: Chunk) -> tuple[int, int, str, int, str, str]:
        """Return n, choice, text, number of tokens, and their ids and log-probabilities as JSON."""
        ids = orjson.dumps(chunk.token_ids).decode() if job.options.token_ids else ""
        logprobs = self._results.logprobs.content(chunk.logprobs) if chunk.logprobs is not None else None
        packed = "" if logprobs is None else orjson.dumps(logprobs).decode()
        return chunk.n or 0, chunk.index, chunk.text, len(chunk.token_ids), ids, packed


def _log_end(result: Result) -> None:
    fields: dict[str, object] = {
        "id": result.id,
        "status": result.status.value,
        "reason": result.cancel_reason,
        "attempt": result.attempt,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "queued_ms": result.timings.queued_ms,
        "first_token_ms": result.timings.first_token_ms,
        "total_ms": result.timings.total_ms,
        "traceparent": result.traceparent,
    }
    level = logging.INFO
    if error := result.error:
        fields |= {"code": str(error.code), "cause": error.cause and str(error.cause), "message": error.message}
        level = logs.failure_level(error.code, error.cause)
    known = {name: value for name, value in fields.items() if value is not None}
    log.log(level, "job_failed" if result.status is Status.FAILED else "job_ended", **known)
