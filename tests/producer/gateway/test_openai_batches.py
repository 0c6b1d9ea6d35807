"""The official `openai` package, sync and async, unmodified: files and batches, run by a real clerk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.producer.gateway.faces import Face
from tests.producer.gateway.harness import GatewayProcess
from tests.worker.fakes import text_of

pytestmark = [pytest.mark.redis_server, pytest.mark.timeout(300)]
URL = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Face:
    return Face(request.param, gateway)


def line(number: int, url: str = URL, **given: Any) -> dict[str, Any]:
    """A request of a batch."""
    body = {"model": "fake", "messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 3, **given}
    return {"custom_id": f"q-{number}", "method": "POST", "url": url, "body": body}


def text(number: int, count: int = 3) -> str:
    """The text that the fake worker generates for it."""
    return text_of(list(f"<user>Question {number}".encode()), 0, count)


def upload(face: Face, lines: list[dict[str, Any]], name: str = "in.jsonl") -> Any:
    raw = "".join(json.dumps(one) + "\n" for one in lines).encode()
    return face(lambda c: c.files.create(file=(name, raw), purpose="batch"))


def begin(face: Face, file: str, **given: Any) -> Any:
    options = {"input_file_id": file, "endpoint": URL, "completion_window": "24h", **given}
    return face(lambda c: c.batches.create(**options))


def ended(face: Face, batch: str, timeout: float = 120) -> Any:
    """Poll a batch as a user does until it is in a last state, and return it."""
    deadline = time.monotonic() + timeout
    while True:
        found = face(lambda c: c.batches.retrieve(batch))
        if found.status in ENDED:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def rows(face: Face, file: str) -> dict[str, dict[str, Any]]:
    """Custom id → line of an output or error file; no id is there twice."""
    lines = [json.loads(one) for one in face(lambda c: c.files.content(file)).text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


def test_a_file_is_kept_listed_read_and_deleted(face: Face, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line(1)) + "\n")
    file = face(lambda c: c.files.create(file=path, purpose="batch"))
    assert (file.object, file.filename, file.purpose) == ("file", "requests.jsonl", "batch")
    assert file.bytes == path.stat().st_size
    assert abs(file.created_at - time.time()) < 120
    assert face(lambda c: c.files.retrieve(file.id)) == file
    assert face(lambda c: c.files.content(file.id)).content == path.read_bytes()
    assert file.id in [one.id for one in face.items(lambda c: c.files.list(purpose="batch"))]
    gone = face(lambda c: c.files.delete(file.id))
    assert (gone.id, gone.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError):
        face(lambda c: c.files.retrieve(file.id))
    assert file.id not in [one.id for one in face.items(lambda c: c.files.list())]


def test_a_list_of_files_has_pages_in_either_order(face: Face) -> None:
    made = [upload(face, [line(n)]).id for n in range(5)]
    for order in ("asc", "desc"):
        listed = [one.id for one in face.items(lambda c, o=order: c.files.list(limit=2, order=o)) if one.id in made]
        assert listed == (made if order == "asc" else made[::-1])


def test_a_file_of_another_purpose_is_refused(face: Face) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        face(lambda c: c.files.create(file=("x.jsonl", b"{}\n"), purpose="fine-tune"))


def test_a_batch_is_completed_with_an_output_for_every_request(face: Face) -> None:
    file = upload(face, [line(n) for n in range(12)])
    batch = begin(face, file.id, metadata={"night": "first"})
    assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", URL, file.id)
    assert batch.status in ("validating", "in_progress")
    assert batch.metadata == {"night": "first"}
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = ended(face, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 12, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.error_file_id is None
    assert done.errors is None
    output = rows(face, done.output_file_id)
    for number in range(12):
        body = output[f"q-{number}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == text(number)
    assert face(lambda c: c.files.retrieve(done.output_file_id)).purpose == "batch_output"
    assert batch.id in [one.id for one in face.items(lambda c: c.batches.list(limit=3))]


def test_requests_that_fail_are_in_the_error_file(face: Face) -> None:
    too_long = line(1, messages=[{"role": "user", "content": "x" * 600}])
    file = upload(face, [line(0), too_long, line(2), line(3, temperature=9)])
    done = ended(face, begin(face, file.id).id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 2, 2)
    output, errors = rows(face, done.output_file_id), rows(face, done.error_file_id)
    assert {*output} == {"q-0", "q-2"}
    assert {*errors} == {"q-1", "q-3"}
    assert [errors[f"q-{n}"]["response"]["status_code"] for n in (1, 3)] == [400, 400]
    assert errors["q-3"]["response"]["body"]["error"]["param"] == "temperature"


def test_a_batch_of_which_no_request_succeeds_has_no_output_file(face: Face) -> None:
    file = upload(face, [line(n, model="other") for n in range(3)])
    done = ended(face, begin(face, file.id).id)
    assert (done.status, done.output_file_id) == ("completed", None)
    assert done.request_counts.failed == 3
    assert {*rows(face, done.error_file_id)} == {"q-0", "q-1", "q-2"}


def test_a_faulty_file_gives_a_batch_that_fails_and_names_the_line(face: Face) -> None:
    wrong = [line(0), line(1, url="/v1/embeddings"), {**line(2), "method": "GET"}, line(3, model="other")]
    file = upload(face, [line(0), *wrong])
    failed = ended(face, begin(face, file.id).id)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert {error.line for error in failed.errors.data} == {2, 3, 4, 5}
    assert all(error.code and error.message for error in failed.errors.data)


def test_a_batch_of_an_unknown_file_or_endpoint_is_refused(face: Face) -> None:
    with pytest.raises(openai.NotFoundError):
        begin(face, "file-nope")
    file = upload(face, [line(0)])
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "soon"}):
        with pytest.raises(openai.BadRequestError):
            begin(face, file.id, **wrong)


def test_a_cancelled_batch_keeps_what_is_done_and_names_every_other_request(face: Face) -> None:
    count = 120
    file = upload(face, [line(n, max_tokens=40) for n in range(count)])
    batch = begin(face, file.id)
    deadline = time.monotonic() + 60
    while not face(lambda c: c.batches.retrieve(batch.id)).request_counts.completed:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    asked = face(lambda c: c.batches.cancel(batch.id))
    assert asked.status in ("cancelling", "cancelled")
    assert asked.cancelling_at is not None
    done = ended(face, batch.id)
    assert done.status == "cancelled"
    assert done.cancelled_at >= asked.cancelling_at
    output, errors = rows(face, done.output_file_id), rows(face, done.error_file_id)
    assert {*output, *errors} == {f"q-{n}" for n in range(count)}
    assert not {*output} & {*errors}
    assert output
    assert errors
    for number in range(count):
        if f"q-{number}" in output:
            body = output[f"q-{number}"]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == text(number, 40)
        else:
            assert errors[f"q-{number}"]["error"]["code"] == "batch_cancelled"


def test_a_batch_past_its_window_expires_with_a_line_for_every_request(face: Face) -> None:
    count = 200
    file = upload(face, [line(n, max_tokens=60) for n in range(count)])
    done = ended(face, begin(face, file.id, completion_window="4s").id)
    assert done.status == "expired"
    assert done.expired_at >= done.expires_at
    output = rows(face, done.output_file_id) if done.output_file_id else {}
    errors = rows(face, done.error_file_id)
    assert {*output, *errors} == {f"q-{n}" for n in range(count)}
    assert not {*output} & {*errors}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}


def test_deleting_the_input_file_does_not_harm_its_batch(face: Face) -> None:
    file = upload(face, [line(n) for n in range(3)])
    batch = begin(face, file.id)
    face(lambda c: c.files.delete(file.id))
    assert ended(face, batch.id).request_counts.completed == 3
