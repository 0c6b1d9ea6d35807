"""Set up the log of a process that serves: structlog to stderr, as console lines or JSON lines.

configure("json", "info")
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def without_none(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Drop the fields that are None; a structlog processor."""
    return {name: value for name, value in event.items() if value is not None}


def configure(shape: Literal["console", "json"], level: str) -> None:
    """Set up structlog for this process: the shape of the lines, and the least severe level that is logged."""
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
