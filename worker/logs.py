"""Logging of the worker process: structlog to stderr, as a console or as JSON lines; prompts and texts never go in."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


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
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *errors,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
