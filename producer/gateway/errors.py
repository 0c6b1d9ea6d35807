"""Turn the exceptions of a request into OpenAI's errors."""

from __future__ import annotations

from http import HTTPStatus

import structlog
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from producer.gateway.gateway import redis_away
from tokenmill.openai.errors import ApiError, error_of_job_error
from tokenmill.protocol.calls import EnqueueRefused, JobExists, QueueFull, QuotaExceeded
from tokenmill.protocol.errors import JobError
from tokenmill.protocol.faults import refused, transient

log = structlog.get_logger()

FULL_SECONDS = 5.0
"""`Retry-After` of a full queue and of a used-up quota."""


def api_error(error: BaseException) -> ApiError | None:
    """Return the answer to a request that ended with an exception; None: the exception is a fault of the gateway."""
    match error:
        case ApiError():
            return error
        case JobError():
            return error_of_job_error(error)
        case JobExists():
            return ApiError(409, str(error), code="job_exists")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after=FULL_SECONDS)
        case QuotaExceeded():
            return ApiError(429, str(error), code="quota_exceeded", retry_after=FULL_SECONDS)
        case EnqueueRefused():
            return ApiError(503, str(error), code="queue_full", retry_after=FULL_SECONDS)
        case HTTPException():
            return _of_status(error)
        case RedisError() if refused(error):  # the operator must act; a retry works afterwards
            log.error("redis_refuses", message=str(error))
            return redis_away()
        case RedisError() if transient(error):
            return redis_away()
        case TimeoutError():
            return redis_away()
    return None


def _of_status(error: HTTPException) -> ApiError:
    """Return OpenAI's form of an error that Starlette raises: unknown path, wrong method, faulty form."""
    status = HTTPStatus(error.status_code)
    messages = {
        404: "Unknown path. The paths of the API begin with /v1, such as /v1/models.",
        405: "This path does not take this method.",
    }
    detail = error.detail if error.detail != status.phrase else f"{status.phrase}."
    return ApiError(error.status_code, messages.get(status, detail))


def internal_error() -> ApiError:
    """Return the answer to a request that failed by a fault of the gateway; the log has the details."""
    return ApiError(500, "The gateway failed; its log has the details under the request's id.", code="internal_error")


def response_of(error: ApiError) -> JSONResponse:
    """Return the HTTP response of an error."""
    return JSONResponse(error.body(), error.status, error.headers)


async def http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answer an exception of Starlette's router; an `exception_handlers` entry."""
    assert isinstance(error, HTTPException)
    response = response_of(_of_status(error))
    response.headers.update(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes of a request's path; Starlette's error names those of the first one."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
