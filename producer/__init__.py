"""What other services import to use the queue: `Client`, `AsyncClient` and what they return and raise."""

from producer.aio import AsyncClient, AsyncJob
from producer.client import Client, Job
from producer.core import TextRestarted
from producer.protocol.calls import EnqueueRefused, JobExists, QueueFull, QuotaExceeded
from producer.protocol.errors import ErrorCode, JobError
from producer.protocol.events import Event, FinalEvent, StartEvent, TokenEvent
from producer.protocol.replies import CancelReply
from producer.protocol.result import Choice, ErrorInfo, Result, Status, Timings, Usage

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
