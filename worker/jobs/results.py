"""The final results that this worker writes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.outputs import ChoiceResult, Fault, Finished, Outcome
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Timings, Usage
from worker.jobs.held import Job
from worker.jobs.logprobs import LogprobsWriter
from worker.ops.links import RedisClock

_FAULTS = {
    None: JobError(ErrorCode.ENGINE_ERROR, "the engine failed"),
    Fault.NON_FINITE_LOGITS: JobError(
        ErrorCode.ENGINE_ERROR, "the model gave logits that are not finite", retryable=False
    ),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An ending that the engine has no part in: nothing was computed, or nothing of it is held any more."""

    handle: str
    status: Status
    error: JobError | None = None

    @classmethod
    def of(cls, handle: str, error: JobError) -> Answer:
        """`expired` where the budget ran out, else `failed`."""
        expired = error.code is ErrorCode.DEADLINE_EXCEEDED
        return cls(handle, Status.EXPIRED if expired else Status.FAILED, error)


def fault(finished: Finished) -> JobError | None:
    """Why a request ended as it did, where that needs saying."""
    if finished.outcome is Outcome.EXPIRED:
        return JobError(ErrorCode.DEADLINE_EXCEEDED, "ttl_ms ran out")
    if finished.outcome is not Outcome.FAILED:
        return None
    known = _FAULTS.get(finished.fault)
    if known is not None:
        return known
    if finished.fault is Fault.GRAMMAR:
        return JobError(ErrorCode.ENGINE_ERROR, finished.message or "the grammar gave up", retryable=False)
    code = ErrorCode.OUT_OF_MEMORY if finished.fault is Fault.OUT_OF_MEMORY else ErrorCode.ENGINE_ERROR
    return JobError(code, finished.message or "the engine failed")


def gave_up(job: Job, cause: JobError | None) -> JobError:
    """The end of a job that was started as often as it may be."""
    code = ErrorCode.WORKER_LOST if cause is None else cause.code
    last = "its worker was lost each time" if cause is None else f"the last time: {cause.message}"
    return JobError(ErrorCode.GAVE_UP, f"given up after {job.attempt} starts; {last}", cause=code)


def kills_readers() -> JobError:
    """The end of a job whose body killed each process that read it."""
    message = "given up unread: each worker that began to read it was lost"
    return JobError(ErrorCode.GAVE_UP, message, cause=ErrorCode.WORKER_LOST)


def no_grammar(key: str, reason: str) -> JobError:
    """The end of a job whose grammar this worker could not try, though the job may be sound."""
    message = f"{key}: given up unread, this worker cannot compile grammars now: {reason}"
    return JobError(ErrorCode.GAVE_UP, message, cause=ErrorCode.ENGINE_ERROR)


class Results:
    """Knows what every result of this worker has in common."""

    def __init__(self, model: str, worker: str, clock: RedisClock, logprobs: LogprobsWriter) -> None:
        self._model = model
        self._worker = worker
        self._clock = clock
        self.logprobs = logprobs

    def of_answer(self, job: Job, answer: Answer) -> Result:
        """Of a job whose text nobody holds: no choices."""
        return self._result(job, answer.status, (), Usage(prompt_tokens=job.prompt_tokens), answer.error)

    def of_finished(self, job: Job, finished: Finished, error: JobError | None) -> Result:
        """Of a job that the engine worked on; without a fence nothing of it is in the stream, so nothing is told."""
        choices = tuple(self._choice(job, c) for c in finished.choices)
        usage = Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens)
        return self._result(job, Status(finished.outcome.value), choices if job.started else (), usage, error)

    def _choice(self, job: Job, c: ChoiceResult) -> Choice:
        return Choice(
            index=c.index,
            text=c.text,
            finish_reason=c.finish_reason.value,
            stop=c.stop,
            token_ids=list(c.token_ids) if job.token_ids else None,
            logprobs=None if c.logprobs is None else self.logprobs.content(c.logprobs),
            prompt_logprobs=None if c.prompt_logprobs is None else self.logprobs.prompt(c.prompt_logprobs),
        )

    def _result(
        self, job: Job, status: Status, choices: tuple[Choice, ...], usage: Usage, error: JobError | None
    ) -> Result:
        return Result(
            id=job.id,
            status=status,
            model=self._model,
            attempt=job.attempt,
            worker=self._worker,
            choices=choices,
            usage=usage,
            timings=self._timings(job),
            error=None if error is None else ErrorInfo.of(error),
            clamped=job.clamped or None,
            traceparent=job.who.traceparent,
            cancel_reason=job.cancel_reason if status is Status.CANCELLED else None,
        )

    def _timings(self, job: Job) -> Timings:
        if not job.started:
            return Timings(total_ms=max(0, self._clock.now_ms() - job.ref.added_ms))
        first = None if job.first_token_at is None else job.since_queued(job.first_token_at)
        return Timings(job.queued_ms, first, job.since_queued(time.monotonic()))
