"""Error answers: status codes, OpenAI's body, headers, and the error of each kind of ended job."""

from __future__ import annotations

import pytest

from tokenmill.openai.errors import ApiError, error_of, error_of_info, error_of_job_error
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.result import ErrorInfo, Result, Status


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (409, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_the_body_is_openais_and_its_type_follows_from_the_status(status: int, kind: str) -> None:
    error = ApiError(status, "Something happened.", code="some_code", param="top_p")
    told = {"message": "Something happened.", "type": kind, "param": "top_p", "code": "some_code"}
    assert error.body() == {"error": told}
    assert str(error) == "Something happened."


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.0, "2"), (2.1, "3")])
def test_retry_after_is_whole_seconds_and_never_zero(seconds: float, header: str) -> None:
    assert ApiError(503, "x", retry_after=seconds).headers == {"Retry-After": header}


def test_an_error_has_no_headers_unless_asked() -> None:
    assert ApiError(400, "x").headers == {}
    assert ApiError(409, "x").headers == ApiError(500, "x", retry=False).headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("top_p: must be a number above 0 and at most 1", "top_p"),
        ("response_format.json_schema: schema is missing", "response_format"),
        ("unknown key 'topp'", "topp"),
        ("unknown key 'messages.0.foo'", "messages.0.foo"),
        ("something is wrong", None),
        ("body: must be an object", None),
    ],
)
def test_a_refused_body_names_the_key_as_param(message: str, param: str | None) -> None:
    error = error_of_job_error(JobError(ErrorCode.INVALID_REQUEST, message))
    assert (error.status, error.code, error.message, error.param) == (400, "invalid_request", message, param)


def test_a_cancelled_job_is_a_conflict_that_clients_do_not_repeat() -> None:
    error = error_of(Result("job", Status.CANCELLED, cancel_reason="by the operator"))
    assert (error.status, error.code, error.retry) == (409, "cancelled", False)
    assert error.message == "The job was cancelled: by the operator"


def test_an_expired_job_is_a_timeout() -> None:
    late = ErrorInfo.of(JobError(ErrorCode.DEADLINE_EXCEEDED, "ttl_ms ran out while the job ran"))
    error = error_of(Result("job", Status.EXPIRED, error=late))
    assert (error.status, error.code, error.message) == (504, "timeout", "ttl_ms ran out while the job ran")
    assert error_of(Result("job", Status.EXPIRED)).status == 504


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_ERROR, ErrorCode.GAVE_UP, ErrorCode.OUT_OF_MEMORY])
def test_a_failure_that_the_queue_has_retried_is_not_repeated_by_clients(code: ErrorCode) -> None:
    error = error_of(Result("job", Status.FAILED, error=ErrorInfo.of(JobError(code, "broken"))))
    assert (error.status, error.type, error.code) == (500, "server_error", code.value)
    assert error.headers == {"x-should-retry": "false"}


def test_a_failure_without_a_reason_and_a_code_of_a_newer_worker_are_server_errors() -> None:
    assert error_of(Result("job", Status.FAILED)).status == 500
    assert (error_of_info(ErrorInfo("melted", "hot")).status, error_of_info(ErrorInfo("melted", "hot")).code) == (
        500,
        "melted",
    )
