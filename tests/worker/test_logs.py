"""The log: fixed events, the message of each failure, a level by who must act, no fields without a value."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import structlog

from tests.support import eventually
from tests.worker.fakes import POISON
from tests.worker.harness import Queue, inside
from tokenmill.cli.logs import configure
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.job import Identity
from tokenmill.protocol.scripts import Ref, Scripts
from worker.ops import logs


@pytest.fixture
def captured() -> Any:
    with structlog.testing.capture_logs() as lines:
        yield lines


def named(lines: list[Any], event: str) -> list[Any]:
    return [line for line in lines if line["event"] == event]


def test_a_producers_error_is_logged_at_info_with_its_code_and_message(queue: Queue, captured: list[Any]) -> None:
    with inside(queue):
        job = queue.add({"prompt": "x", "best_of": 2})
        error = queue.check_ending(job)["error"]
        eventually(lambda: named(captured, "job_failed"))
    (line,) = named(captured, "job_failed")
    assert (line["id"], line["log_level"], line["code"], line["message"]) == (
        job, "info", "invalid_request", error["message"],
    )  # fmt: skip
    assert None not in line.values()


def test_an_engine_error_is_logged_at_error_and_its_retries_at_warning(queue: Queue, captured: list[Any]) -> None:
    with inside(queue, lease_seconds="0.6", max_attempts="2"):
        job = queue.add({"prompt": [POISON], "max_tokens": 3})
        queue.check_ending(job)
        eventually(lambda: named(captured, "job_failed"))
    (line,) = named(captured, "job_failed")
    assert (line["log_level"], line["code"], line["cause"]) == ("error", "gave_up", "engine_error")
    assert "poisoned" in line["message"]
    (retried,) = named(captured, "job_retried")
    assert (retried["log_level"], retried["id"], retried["code"]) == ("warning", job, "engine_error")
    assert "poisoned" in retried["message"]


@pytest.mark.parametrize("started", [False, True])
def test_a_takeover_names_the_former_worker(queue: Queue, captured: list[Any], started: bool) -> None:
    job = queue.add({"prompt": "x", "max_tokens": 2})
    dead = Scripts(queue.client, queue.keys, "host:1:dead")
    dead.ensure_groups()
    (delivery,) = dead.read(1) or []
    if started:
        dead.start(Ref(delivery.lane, delivery.entry, job), Identity(job), prompt_tokens=1)
    with inside(queue, lease_seconds="0.4"):
        queue.check_ending(job)
    (line,) = named(captured, "job_taken_over")
    assert (line["id"], line["worker"], line["log_level"]) == (job, "host:1:dead", "warning")


def test_a_second_entry_of_an_id_is_logged_as_deleted(queue: Queue, captured: list[Any]) -> None:
    with inside(queue):
        queue.check_ending(queue.add({"prompt": "x", "max_tokens": 2}, id="twice"))
        queue.add({"prompt": "x", "max_tokens": 2}, id="twice")
        eventually(lambda: named(captured, "job_duplicate"))
    (line,) = named(captured, "job_duplicate")
    assert (line["id"], line["log_level"]) == ("twice", "info")


@pytest.mark.parametrize(
    ("code", "cause", "level"),
    [
        ("invalid_json", None, logging.INFO),
        ("engine_error", None, logging.ERROR),
        ("gave_up", "worker_lost", logging.WARNING),
        ("gave_up", "out_of_memory", logging.ERROR),
    ],
)
def test_a_job_that_was_given_up_is_logged_at_the_level_of_its_cause(code: str, cause: str | None, level: int) -> None:
    assert logs.failure_level(ErrorCode(code), cause) == level


def test_a_log_line_has_no_fields_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        configure("json", "info")
        structlog.get_logger().info("event", id="x", code=None)
    finally:
        structlog.configure(**before)
    assert set(json.loads(capsys.readouterr().err)) == {"event", "id", "level", "timestamp"}
