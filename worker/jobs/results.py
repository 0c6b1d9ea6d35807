"""The results that this worker writes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.outputs import ChoiceResult, Fault, Finished, Outcome
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Timings, Usage
from worker.jobs.job import Job
from worker.jobs.logprobs import LogprobsWriter
from worker.ops.links import RedisClock

_FAULTS = {
    None: JobError(ErrorCode.ENGINE_ERROR, "the engine failed"),
    Fault.NON_FINITE_LOGITS: JobError(
        ErrorCode.ENGINE_ERROR, "the model computed logits that are not finite", retryable=False
    ),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a job that the engine does not report: nothing was computed for it, or its text is no longer kept."""

    handle: str
    status: Status
    error: JobError | None = None

    @classmethod
    def of(cls, handle: str, error: JobError) -> Answer:
        """Return the answer for an error: `expired` if the job's deadline has passed, else `failed`."""
        expired = error.code is ErrorCode.DEADLINE_EXCEEDED
        return cls(handle, Status.EXPIRED if expired else Status.FAILED, error)


def fault(finished: Finished) -> JobError | None:
    """Return the error of a finished request; None if it succeeded or was cancelled."""
    if finished.outcome is Outcome.EXPIRED:
        return JobError(ErrorCode.DEADLINE_EXCEEDED, "ttl_ms ran out while the job ran")
    if finished.outcome is not Outcome.FAILED:
        return None
    known = _FAULTS.get(finished.fault)
    if known is not None:
        return known
    if finished.fault is Fault.GRAMMAR:
        return JobError(
            ErrorCode.ENGINE_ERROR, finished.message or "the grammar cannot be matched further", retryable=False
        )
    code = ErrorCode.OUT_OF_MEMORY if finished.fault is Fault.OUT_OF_MEMORY else ErrorCode.ENGINE_ERROR
    return JobError(code, finished.message or "the engine failed")


def gave_up(job: Job, cause: JobError | None) -> JobError:
    """Return the error of a job that has used all its attempts; `cause`: the error of its last run."""
    code = ErrorCode.WORKER_LOST if cause is None else cause.code
    last = "the worker that ran it was lost each time" if cause is None else f"the last error: {cause.message}"
    return JobError(ErrorCode.GAVE_UP, f"given up after {job.start.attempt} starts; {last}", cause=code)


def kills_readers() -> JobError:
    """Return the error of a job whose body killed each worker that read it."""
    message = "given up unread: each worker that began to read it was lost"
    return JobError(ErrorCode.GAVE_UP, message, cause=ErrorCode.WORKER_LOST)


def no_grammar(key: str, reason: str) -> JobError:
    """Return the error of a job whose grammar this worker could not compile, though the grammar may be valid."""
    message = f"{key}: given up before its start, since this worker cannot compile grammars now: {reason}"
    return JobError(ErrorCode.GAVE_UP, message, cause=ErrorCode.ENGINE_ERROR)


class Results:
    """Builds results, with the fields that all results of this worker share."""

    def __init__(self, model: str, worker: str, clock: RedisClock, logprobs: LogprobsWriter) -> None:
        self._model = model
        self._worker = worker
        self._clock = clock
        self.logprobs = logprobs

    def of_answer(self, job: Job, answer: Answer) -> Result:
        """Build the result of an answer: without choices."""
        return self._result(job, answer.status, (), Usage(prompt_tokens=job.options.prompt_tokens), answer.error)

    def of_finished(self, job: Job, finished: Finished, error: JobError | None) -> Result:
        """Build the result of a finished request; without choices if the job has no fence: its stream has no text."""
        choices = tuple(self._choice(job, c) for c in finished.choices)
        usage = Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens)
        return self._result(job, Status(finished.outcome.value), choices if job.started else (), usage, error)

    def _choice(self, job: Job, c: ChoiceResult) -> Choice:
        return Choice(
            index=c.index,
            text=c.text,
            finish_reason=c.finish_reason.value,
            stop=c.stop,
            token_ids=list(c.token_ids) if job.options.token_ids else None,
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
            attempt=job.start.attempt,
            worker=self._worker,
            choices=choices,
            usage=usage,
            timings=self._timings(job),
            error=None if error is None else ErrorInfo.of(error),
            clamped=job.options.clamped or None,
            traceparent=job.entry.identity.traceparent,
            cancel_reason=job.cancellation.reason if job.cancellation and status is Status.CANCELLED else None,
        )

    def _timings(self, job: Job) -> Timings:
        if not job.started:
            return Timings(total_ms=max(0, self._clock.now_ms() - job.ref.added_ms))
        first_at = job.outgoing.first_token_at
        first = None if first_at is None else job.start.since_queued(first_at)
        return Timings(job.start.queued_ms, first, job.start.since_queued(time.monotonic()))
