"""Logging of the worker process: structlog to stderr, as a console or as JSON lines; prompts and texts never go in.

Every line is an event of a fixed name with fields: `id` of the job, `code` of the wire protocol, `message`. Its level
says who must act: info where nobody must or the job's sender, warning where a worker was lost or Redis is away, error
where the engine or a thread failed. docs/reference.md lists the events.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from tokenmill.protocol.errors import ErrorCode
from worker.jobs.held import Job

log = structlog.get_logger()

_LEVELS = {
    ErrorCode.ENGINE_ERROR: logging.ERROR,
    ErrorCode.OUT_OF_MEMORY: logging.ERROR,
    ErrorCode.WORKER_LOST: logging.WARNING,
}
"""Of a failure; all other codes are the sender's fault."""


def failure_level(code: ErrorCode | str, cause: ErrorCode | str | None) -> int:
    """The level of a failed job: by the cause where it was given up."""
    return _LEVELS.get(ErrorCode(cause or code), logging.INFO)


def job_lost(job: Job) -> None:
    """A job that this worker held is another's now, or its entry was deleted."""
    log.warning(
        "job_lost",
        id=job.id,
        lane=job.lane,
        entry=job.entry,
        message="another worker has taken the job over, or its entry was deleted; this worker drops it",
    )


def without_none(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leave out the fields that are not known."""
    return {name: value for name, value in event.items() if value is not None}


def configure(shape: Literal["console", "json"], level: str) -> None:
    """Set up structlog for this process."""
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if shape == "json"
        # Plain: a traceback with local variables would show prompts and passwords.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    errors = [structlog.processors.format_exc_info] if shape == "json" else []
    structlog.configure(
        processors=[
            without_none,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *errors,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
