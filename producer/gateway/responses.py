"""Responses and errors that several routes share."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from producer.gateway.answers import Answers
from tokenmill.openai.errors import ApiError


class JsonResponse(JSONResponse):
    """A JSON response; `orjson.Fragment` values are copied as they are."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: Answers = scope["app"].state.gateway.inflight.answers
        with answers.sent(len(self.body)):
            await super().__call__(scope, receive, send)


def shutting_down() -> ApiError:
    """Return the error of a request that a shutdown interrupts; its job goes on."""
    return ApiError(503, "The gateway shuts down; the job goes on.", code="shutting_down", retry_after=1.0)


def job_not_found(job_id: str) -> ApiError:
    """Return the error of a job that is unknown, or belongs to another tenant."""
    return ApiError(404, f"Job {job_id} is unknown, or its result has expired.")
