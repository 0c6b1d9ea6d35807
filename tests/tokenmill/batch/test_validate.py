"""A file is checked as a whole, and every error is reported with its line and OpenAI's code."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tokenmill.batch.files import CHAT, COMPLETIONS, request, write
from tokenmill.batch.report import SHOWN_FAULTS, BatchInvalid, BatchStopped
from tokenmill.batch.source import Source
from tokenmill.batch.validate import Validator


def validate(path: Path, url: str | None = None) -> list[int]:
    """The numbers of the planned lines."""
    with Source(path, path.parent) as source:
        index = Validator(source, threading.Event(), url).index()
        planned = [line.number for line in index.plan()]
        index.close()
        return planned


def faults(path: Path) -> list[tuple[int | None, str]]:
    with pytest.raises(BatchInvalid) as invalid:
        validate(path)
    assert invalid.value.count == len(invalid.value.faults)
    return [(fault.line, fault.code) for fault in invalid.value.faults]


def without(key: str) -> dict[str, Any]:
    line = request("x")
    del line[key]
    return line


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        ("null", "invalid_json_line"),
        ('{"custom_id": NaN}', "invalid_json_line"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line"),
        ("[" * 5000, "invalid_json_line"),
        (without("custom_id"), "missing_required_parameter"),
        (without("method"), "missing_required_parameter"),
        (without("url"), "missing_required_parameter"),
        (without("body"), "missing_required_parameter"),
        ({**request("x"), "extra": 1}, "unknown_parameter"),
        (request(""), "invalid_custom_id"),
        ({**request("x"), "custom_id": 7}, "invalid_custom_id"),
        (request("x" * 513), "invalid_custom_id"),
        ({**request("x"), "method": "GET"}, "invalid_method"),
        ({**request("x"), "url": "/v1/embeddings"}, "invalid_url"),
        ({**request("x"), "url": ["/v1/completions"]}, "invalid_url"),
        ({**request("x"), "body": []}, "invalid_body"),
        (request("x", url=CHAT), "url_mismatch"),
        (request("x", model="other"), "model_mismatch"),
        (request("x", model=["m"]), "invalid_model"),
        (request("first"), "duplicate_custom_id"),
    ],
)
def test_each_fault_has_its_line_and_code(tmp_path: Path, line: Any, code: str) -> None:
    path = write(tmp_path / "in.jsonl", [request("first"), "", line, request("last")])
    assert faults(path) == [(3, code)]


def test_a_line_with_another_url_than_that_of_the_batch_is_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), request("b", url=CHAT), request("c")])
    with pytest.raises(BatchInvalid) as invalid:
        validate(path, CHAT)
    assert [fault.line for fault in invalid.value.faults] == [1, 3]
    assert {(fault.code, fault.param) for fault in invalid.value.faults} == {("url_mismatch", "url")}
    assert "that of the batch is /v1/chat/completions" in str(invalid.value)
    assert validate(write(tmp_path / "in.jsonl", [request("a")]), COMPLETIONS) == [1]


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ("{", None),
        (without("method"), "method"),
        ({**request("x"), "extra": 1}, "extra"),
        ({**request("x"), "custom_id": 7}, "custom_id"),
        ({**request("x"), "method": "GET"}, "method"),
        ({**request("x"), "url": "/"}, "url"),
        ({**request("x"), "body": []}, "body"),
        (request("x", model=["m"]), "body.model"),
        (request("x", model="other"), "body.model"),
        (request("first"), "custom_id"),
    ],
)
def test_a_fault_of_one_key_names_it(tmp_path: Path, line: Any, param: str | None) -> None:
    path = write(tmp_path / "in.jsonl", [request("first"), line])
    with pytest.raises(BatchInvalid) as invalid:
        validate(path)
    assert [fault.param for fault in invalid.value.faults] == [param]


def test_bytes_that_are_not_utf8_are_an_invalid_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "\xff"}\n')
    assert faults(path) == [(1, "invalid_json_line")]


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_a_file_without_requests_is_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    assert faults(tmp_path / "in.jsonl") == [(None, "empty_file")]


def test_faults_of_all_kinds_come_in_the_order_of_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), request("a"), "{", request("a"), "["])
    assert faults(path) == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_json_line"),
    ]


def test_of_many_faults_the_first_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), *(["{"] * 300), *([request("a")] * 300)])
    with pytest.raises(BatchInvalid) as invalid:
        validate(path)
    assert invalid.value.count == 600
    assert [fault.line for fault in invalid.value.faults] == list(range(2, 2 + SHOWN_FAULTS))
    assert "and 500 more" in str(invalid.value)


def test_a_wrong_body_is_not_a_fault_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a", stream=True, temperature=-1, nonsense=1), request("b")])
    assert validate(path) == [1, 2]


def test_lines_of_one_system_prompt_stand_together_where_the_first_of_them_stands(tmp_path: Path) -> None:
    def chat(number: int, system: str | None) -> dict[str, Any]:
        head = [] if system is None else [{"role": "system", "content": system}]
        return request(f"{number}", url=CHAT, messages=[*head, {"role": "user", "content": f"{number}"}])

    systems = ["A", "B", None, "A", None, "B", "A", "C"]
    path = write(tmp_path / "in.jsonl", [chat(number, system) for number, system in enumerate(systems, 1)])
    assert validate(path) == [1, 4, 7, 2, 6, 3, 5, 8]


def test_requests_that_are_done_do_not_change_the_order_of_the_remaining_ones(tmp_path: Path) -> None:
    system = [{"role": "system", "content": "A"}, {"role": "user", "content": "?"}]
    lines = [request("a", url=CHAT, messages=system), request("b", url=CHAT), request("c", url=CHAT, messages=system)]
    path = write(tmp_path / "in.jsonl", lines)
    with Source(path, tmp_path) as source:
        index = Validator(source, threading.Event()).index()
        assert index.take("a")
        assert not index.take("a")
        assert not index.take("unknown")
        assert [line.custom_id for line in index.plan()] == ["c", "b"]
        index.close()


def test_a_check_can_be_stopped(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a")])
    stop = threading.Event()
    stop.set()
    with Source(path, tmp_path) as source, pytest.raises(BatchStopped):
        Validator(source, stop).index()
