"""The publisher's thread: what the engine says goes to Redis, all token events of a step in one command.

Writes may be repeated at will: events carry explicit IDs, FINALISE is once-only. So an error of the connection is
answered by trying again; a refusal by Redis tells whether the job was lost or only its stream. What is kept meanwhile
is bounded by the jobs that run, since none is started while Redis is away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from worker.jobs.held import Chunk, Held, Job, new_nonce
from worker.jobs.results import Answer, Results, fault, gave_up
from worker.loop import Cancel, Drop, EngineLoop
from worker.ops import logs
from worker.ops.links import Contact, passing
from worker.queue.outbox import Output

log = structlog.get_logger()

ENDINGS = 64
"""Results written in one round trip."""
RETRY_SECONDS = 0.5
"""Between two tries while Redis takes nothing."""


@dataclass(frozen=True, slots=True)
class LastWord:
    """A result to be written, with the dead letter that goes with it."""

    result: Result
    dead: DeadLetter | None = None


class Publisher:
    """Consumes the engine loop's outbox. A job leaves the registry here, once its result is in Redis."""

    def __init__(
        self,
        scripts: Scripts,
        results: Results,
        held: Held,
        loop: EngineLoop,
        contact: Contact,
        stop: threading.Event,
        retry: Callable[[Job, JobError], None],
    ) -> None:
        """`retry`: hands a job back whose failure may pass."""
        self._scripts = scripts
        self._results = results
        self._held = held
        self._loop = loop
        self._contact = contact
        self._stop = stop
        self._retry = retry
        self._pending: dict[str, Job] = {}
        """Jobs with chunks or a last word that Redis has not confirmed."""
        self._last_words: dict[str, LastWord] = {}

    @property
    def backlog(self) -> int:
        """Outputs not taken in, and jobs with something unwritten."""
        return self._loop.outbox.qsize() + len(self._pending)

    def run(self) -> None:
        """Write until `stop` is set, then once more; what Redis does not take is kept and tried again."""
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

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, block: bool) -> None:
        """Take in all outputs there are; several deltas of one choice become one chunk."""
        try:
            at, output = self._loop.outbox.get(block=block, timeout=0.2)
            while True:
                self._take(at, output)
                at, output = self._loop.outbox.get_nowait()
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
        """The way of every token: microseconds count here."""
        get, pending, telemetry = self._held.get, self._pending, self._loop.telemetry
        gaps = []
        for delta in deltas:
            job = get(delta.request_id)
            if job is None or not job.fence:
                continue
            ids = delta.token_ids
            job.tokens += len(ids)
            before, job.last_text_at = job.last_text_at, at
            if before is None:
                job.first_token_at = at
                telemetry.first_token.add((job.since_queued(at) or 0) / 1000)
            else:
                gaps.append(at - before)
            if job.who.stream:
                job.add_text(delta.index, delta.text, ids, delta.logprobs)
                pending[job.handle] = job
        telemetry.inter_token.add_all(gaps)

    def _take_finished(self, finished: Finished) -> None:
        job = self._held.get(finished.request_id)
        if job is None:
            return
        error = fault(finished)
        if error is not None and error.retryable:
            if job.tries < job.max_attempts:
                self._loop.telemetry.retries.inc()
                self._retry(job, error)
                return
            error = gave_up(job, error)
        self._end(job, self._results.of_finished(job, finished, error), error)

    def _end(self, job: Job, result: Result, error: JobError | None) -> None:
        dead = None
        if error is not None and error.code is ErrorCode.GAVE_UP:
            dead = DeadLetter(error.code, error.message, job.attempt, job.body)
        job.over = True
        self._last_words[job.handle] = LastWord(result, dead)
        self._pending[job.handle] = job

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> bool:
        """Write all that is pending, except of jobs whose lease has run out here: those wait for its renewal.

        Returns whether Redis took everything else.

        Raises:
            redis.RedisError: nothing is lost, call again.
        """
        now = time.monotonic()
        speaking: list[Job] = []
        ending: list[Job] = []
        get = self._held.get
        for job in list(self._pending.values()):
            if get(job.handle) is not job:
                self._settle(job)
            elif job.lease_until > now:
                (ending if job.over else speaking).append(job)
        self._finalise(ending)  # first: a reader waits for nothing longer than for the end
        self._publish(speaking)
        return not self._pending

    def _settle(self, job: Job) -> None:
        """Nothing of this job is left to write."""
        self._pending.pop(job.handle, None)
        self._last_words.pop(job.handle, None)

    def _publish(self, jobs: list[Job]) -> None:
        batch = TokenBatch(self._scripts.keys)
        add = batch.add
        for job in jobs:
            job_id, fence = job.who.id, job.fence
            for chunk in job.number_chunks():
                if chunk.logprobs is None and not job.token_ids:
                    add(job_id, fence, chunk.n or 0, chunk.index, chunk.text, len(chunk.token_ids))
                else:
                    add(job_id, fence, *self._event(job, chunk))
        refused = {one.job_id: one for one in reversed(self._scripts.publish(batch)) if one.why is not Why.REPEAT}
        for job in jobs:
            if refused and job.id in refused:
                self._after_refusal(job, refused[job.id])
            else:
                job.confirm()
                del self._pending[job.handle]

    def _after_refusal(self, job: Job, refused: Refused) -> None:
        if refused.why is Why.LOST:
            self._lose(job)
        elif refused.why is Why.GONE:
            self._start_again(job)
        else:
            # Redis is full, most likely; FINALISE gets through all the same, and carries what is left.
            self._contact.failed("publish", redis.ResponseError(refused.last_id))
            job.confirm(below=refused.n)

    def _finalise(self, jobs: list[Job]) -> None:
        """All endings in one round trip, a bounded number at a time."""
        for at in range(0, len(jobs), ENDINGS):
            some = jobs[at : at + ENDINGS]
            for job in some:
                job.ending = True
            ends = [(job.ref, job.who, self._last_words[job.handle].result, self._options(job)) for job in some]
            try:
                endings = self._scripts.end_all(ends)
            except redis.RedisError:
                for job in some:
                    job.ending = False
                raise
            for job, ending in zip(some, endings, strict=True):
                self._after_end(job, ending)

    def _options(self, job: Job) -> EndOptions:
        dead = self._last_words[job.handle].dead
        if not job.started:
            prompt_tokens = job.prompt_tokens or 0
            return {"fence": None, "prompt_tokens": prompt_tokens, "callback": job.callback, "dead": dead}
        return {
            "fence": job.fence,
            "published": job.confirmed if job.who.stream else 0,
            "events": [TokenWrite(*self._event(job, chunk)) for chunk in job.number_chunks()],
            "callback": job.callback,
            "dead": dead,
        }

    def _after_end(self, job: Job, ending: Ending) -> None:
        if ending in (Ending.GONE, Ending.LOST):
            job.ending = False
            (self._start_again if ending is Ending.GONE else self._lose)(job)
        else:
            last = self._last_words[job.handle]
            self._held.forget(job.handle)
            self._settle(job)
            self._count_end(job, last, ending)
            _log_end(job, last.result, ending)

    def _count_end(self, job: Job, last: LastWord, ending: Ending) -> None:
        if ending is Ending.DUP:
            return
        telemetry = self._loop.telemetry
        telemetry.ended(last.result)
        if last.dead is not None:
            telemetry.dead_letters.labels(last.dead.code.value).inc()
        if last.result.status is Status.CANCELLED and job.cancel_seen_at is not None:
            telemetry.cancel_latency.add(time.monotonic() - job.cancel_seen_at)

    def _start_again(self, job: Job) -> None:
        """The stream lacks what we wrote: take a new fence, and write the whole text again."""
        started = self._scripts.start(job.ref, job.who, prompt_tokens=job.prompt_tokens or 0, nonce=job.nonce)
        job.nonce = new_nonce()
        message = "Redis has lost text of the job that it had; all of it is written again"
        log.warning("stream_lost", id=job.id, lane=job.lane, entry=job.entry, message=message)
        if started.status is StartStatus.OK:
            job.begin_again(started.fence, started.attempt)
            return
        if started.status is StartStatus.CANCELLED:
            self._cancelled_again(job, started)
        else:
            self._lose(job)

    def _cancelled_again(self, job: Job, started: Started) -> None:
        """Cancelled while its text was lost: it ends without choices, as one that never started."""
        job.cancel_reason = started.reason
        job.fence = 0
        job.chunks.clear()
        if job.handle in self._last_words:
            self._end(job, self._results.of_answer(job, Answer(job.handle, Status.CANCELLED)), None)
        else:
            self._settle(job)
            self._loop.post(Cancel(job.handle))

    def _lose(self, job: Job) -> None:
        """Another worker has it: say nothing more of it and free its blocks."""
        self._loop.telemetry.leases_lost.inc()
        logs.job_lost(job)
        self._held.forget(job.handle)
        self._settle(job)
        self._loop.post(Drop(job.handle))

    def _event(self, job: Job, chunk: Chunk) -> tuple[int, int, str, int, str, str]:
        """n, choice, text, number of tokens, their ids and their log-probabilities as JSON."""
        ids = orjson.dumps(chunk.token_ids).decode() if job.token_ids else ""
        logprobs = self._results.logprobs.content(chunk.logprobs) if chunk.logprobs is not None else None
        packed = "" if logprobs is None else orjson.dumps(logprobs).decode()
        return chunk.n or 0, chunk.index, chunk.text, len(chunk.token_ids), ids, packed


def _log_end(job: Job, result: Result, ending: Ending) -> None:
    if ending is Ending.DUP:
        message = "the id had its result already, or another entry of it is live; this entry is deleted"
        log.info("job_duplicate", id=job.id, lane=job.lane, entry=job.entry, message=message)
        return
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
