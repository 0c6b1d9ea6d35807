"""The events that a worker logs, and their levels; `tokenmill.cli.logs` sets the log up. No prompts and outputs.

Every line is an event of a fixed name with fields: `id` of the job, `code` of the wire protocol, `message`. Levels:
info where the operator need not act; warning if a worker was lost, or Redis cannot be reached; error if the engine or a
thread failed. docs/reference.md lists the events.
"""

from __future__ import annotations

import logging

import structlog

from tokenmill.protocol.errors import ErrorCode
from worker.jobs.job import Job

log = structlog.get_logger()

_LEVELS = {
    ErrorCode.ENGINE_ERROR: logging.ERROR,
    ErrorCode.OUT_OF_MEMORY: logging.ERROR,
    ErrorCode.WORKER_LOST: logging.WARNING,
}
"""Error code → level of the event; all other codes are the producer's fault, and logged at info."""


def failure_level(code: ErrorCode | str, cause: ErrorCode | str | None) -> int:
    """Return the level at which a failed job is logged; `cause`: code of its last error, if the job was given up."""
    return _LEVELS.get(ErrorCode(cause or code), logging.INFO)


def job_lost(job: Job) -> None:
    """Log that this worker no longer holds a job's entry."""
    message = "another worker has taken the job over, or its entry was deleted; this worker drops it"
    log.warning("job_lost", **job.log_fields, message=message)


def job_duplicate(job: Job) -> None:
    """Log that another entry with this job's id was accepted before, so that this entry is deleted."""
    message = "the id has its result already, or another entry with this id is queued or running; this entry is deleted"
    log.info("job_duplicate", **job.log_fields, message=message)
