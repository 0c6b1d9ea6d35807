"""Services that put work into the queue for others: RQ jobs, the clerk, webhooks, the janitor.

The client library is `tokenmill`; the names that it had as `producer` stay importable from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import tokenmill

if TYPE_CHECKING:
    from tokenmill import (
        AsyncClient,
        AsyncJob,
        CancelReply,
        Choice,
        Client,
        EnqueueRefused,
        ErrorCode,
        ErrorInfo,
        Event,
        FinalEvent,
        Job,
        JobError,
        JobExists,
        JobLost,
        QueueFull,
        QuotaExceeded,
        Result,
        StartEvent,
        Status,
        TextRestarted,
        Timings,
        TokenEvent,
        Usage,
    )

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "CancelReply",
    "Choice",
    "Client",
    "EnqueueRefused",
    "ErrorCode",
    "ErrorInfo",
    "Event",
    "FinalEvent",
    "Job",
    "JobError",
    "JobExists",
    "JobLost",
    "QueueFull",
    "QuotaExceeded",
    "Result",
    "StartEvent",
    "Status",
    "TextRestarted",
    "Timings",
    "TokenEvent",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(tokenmill, name)
    if name == "batch":  # `from producer import batch`
        return importlib.import_module("tokenmill.batch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
