"""The library that services import to use the queue: `Client`, `AsyncClient`, and the types they return and raise.

A name is imported when it is first used, and nothing before: until this module has run, the command cannot handle
Ctrl-C.
"""

from __future__ import annotations

TYPE_CHECKING = False  # equals `typing.TYPE_CHECKING`, without the import of typing
if TYPE_CHECKING:
    from typing import Any

    from tokenmill.client.aio import AsyncClient
    from tokenmill.client.core import JobLost
    from tokenmill.client.follow import TextRestarted
    from tokenmill.client.groups import Finished, GroupLost, GroupResult, Progress
    from tokenmill.client.handles import AsyncGroup, AsyncJob, Group, Job
    from tokenmill.client.params import GroupOptions, JobOptions, MapOptions, RequestParams
    from tokenmill.client.patience import WaitTimeout
    from tokenmill.client.state import Lookup
    from tokenmill.client.sync import Client
    from tokenmill.client.window import MapResult
    from tokenmill.protocol.calls import EnqueueRefused, JobExists, QueueFull, QuotaExceeded
    from tokenmill.protocol.errors import ErrorCode, JobError, TokenmillError
    from tokenmill.protocol.events import Event, FinalEvent, StartEvent, TokenEvent
    from tokenmill.protocol.replies import CancelReply
    from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Timings, Usage
    from tokenmill.protocol.state import JobStatus
    from tokenmill.protocol.workers import WorkerInfo

__all__ = [
    "AsyncClient",
    "AsyncGroup",
    "AsyncJob",
    "CancelReply",
    "Choice",
    "Client",
    "EnqueueRefused",
    "ErrorCode",
    "ErrorInfo",
    "Event",
    "FinalEvent",
    "Finished",
    "Group",
    "GroupLost",
    "GroupOptions",
    "GroupResult",
    "Job",
    "JobError",
    "JobExists",
    "JobLost",
    "JobOptions",
    "JobStatus",
    "Lookup",
    "MapOptions",
    "MapResult",
    "Progress",
    "QueueFull",
    "QuotaExceeded",
    "RequestParams",
    "Result",
    "StartEvent",
    "Status",
    "TextRestarted",
    "Timings",
    "TokenEvent",
    "TokenmillError",
    "Usage",
    "WaitTimeout",
    "WorkerInfo",
]

_MODULES = (
    "tokenmill.protocol.errors",
    "tokenmill.protocol.events",
    "tokenmill.protocol.replies",
    "tokenmill.protocol.result",
    "tokenmill.protocol.state",
    "tokenmill.protocol.calls",
    "tokenmill.protocol.workers",
    "tokenmill.client.params",
    "tokenmill.client.patience",
    "tokenmill.client.core",
    "tokenmill.client.state",
    "tokenmill.client.follow",
    "tokenmill.client.window",
    "tokenmill.client.groups",
    "tokenmill.client.handles",
    "tokenmill.client.sync",
    "tokenmill.client.aio",
)
"""The modules that hold the names, ordered by how little they import."""


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:
        for module in map(importlib.import_module, _MODULES):
            if hasattr(module, name):
                found = globals()[name] = getattr(module, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
