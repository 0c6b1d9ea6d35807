"""The routes of batches: what is created, listed and refused; keys and tenants. No clerk runs here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rq
from openai.types import Batch
from rq.serializers import JSONSerializer
from starlette.testclient import TestClient

from producer.files.storage import BATCH, FILE
from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller
from tests.producer.gateway.inside import inside, upload
from tests.support import RedisServer, free_port
from tokenmill.protocol.connection import command_client

pytestmark = pytest.mark.redis_server
URL = "/v1/chat/completions"


@pytest.fixture
def client(redis_server: RedisServer, tmp_path: Path) -> Iterator[TestClient]:
    with inside(redis_server.url, tmp_path / "files") as made:
        yield made


def gateway(client: TestClient) -> Gateway:
    found: Any = client.app
    return found.state.gateway  # type: ignore[no-any-return]


def begin(client: TestClient, headers: dict[str, str] | None = None, **given: Any) -> Any:
    """Create a batch; a value of `...` leaves the key out."""
    body = {"endpoint": URL, "completion_window": "24h", **given}
    body.setdefault("input_file_id", "")
    if body["input_file_id"] == "":
        body["input_file_id"] = upload(client).json()["id"]
    sent = {key: value for key, value in body.items() if value is not ...}
    return client.post("/v1/batches", json=sent, headers=headers or {})


def rq_jobs(client: TestClient) -> list[str]:
    settings = gateway(client).settings
    with command_client(settings.redis) as redis:
        return list(rq.Queue(settings.batch_queue, connection=redis, serializer=JSONSerializer).job_ids)


def test_a_batch_is_created_as_openai_describes_it_with_one_rq_job(client: TestClient) -> None:
    answer = begin(client, metadata={"a": "b"})
    assert answer.status_code == 200
    batch = Batch.model_validate(answer.json(), strict=True)
    assert (batch.status, batch.metadata, batch.errors) == ("validating", {"a": "b"}, None)
    assert batch.expires_at == batch.created_at + 86_400
    assert client.get(f"/v1/batches/{batch.id}").json() == answer.json()
    assert rq_jobs(client) == [batch.id]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input_file_id": ...}, "input_file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"endpoint": ...}, "endpoint"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": ["/v1/chat/completions"]}, "endpoint"),
        ({"completion_window": ...}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "-1h"}, "completion_window"),
        ({"completion_window": "1 h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after.seconds"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_key_and_creates_nothing(
    client: TestClient, given: dict[str, Any], param: str
) -> None:
    answer = begin(client, **given)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert client.get("/v1/batches").json()["data"] == []
    assert rq_jobs(client) == []


@pytest.mark.parametrize("window", ["1s", "90m", "24h", "7d", "30d"])
def test_a_window_of_seconds_minutes_hours_or_days_is_taken(client: TestClient, window: str) -> None:
    assert begin(client, completion_window=window).json()["completion_window"] == window


def test_nulls_are_absent(client: TestClient) -> None:
    assert begin(client, metadata=None, output_expires_after=None, surprise=None).status_code == 200


@pytest.mark.parametrize("file", ["nope", "../../etc/passwd", f"{FILE}{'0' * 32}", f"{BATCH}{'0' * 32}", "\0"])
def test_a_batch_of_an_unknown_file_is_not_found(client: TestClient, file: str) -> None:
    answer = begin(client, input_file_id=file)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "not_found", "input_file_id")
    assert client.get("/v1/batches").json()["data"] == []


def test_the_output_of_a_batch_is_no_input(client: TestClient) -> None:
    file_id, storage = upload(client).json()["id"], gateway(client).storage
    assert storage is not None
    bucket = storage.files(None)
    bucket.save(file_id, {**(bucket.load(file_id) or {}), "purpose": "batch_output"})
    assert begin(client, input_file_id=file_id).status_code == 400


@pytest.mark.parametrize("wicked", ["nope", "..", f"{FILE}{'0' * 32}", f"{BATCH}{'0' * 32}", "..%2f.."])
def test_an_unknown_batch_is_not_found(client: TestClient, wicked: str) -> None:
    for answer in (client.get(f"/v1/batches/{wicked}"), client.post(f"/v1/batches/{wicked}/cancel")):
        assert answer.status_code in (404, 405)


def test_a_repeated_request_with_its_key_is_the_same_batch(client: TestClient) -> None:
    file, key = upload(client).json()["id"], {"idempotency-key": "k"}
    first = begin(client, key, input_file_id=file)
    client.delete(f"/v1/files/{file}")
    assert begin(client, key, input_file_id=file).json() == first.json()
    assert len(client.get("/v1/batches").json()["data"]) == 1
    assert rq_jobs(client) == [first.json()["id"]]
    other = begin(client, key, input_file_id=upload(client).json()["id"])
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_a_key_whose_request_was_refused_may_be_used_again_for_it(client: TestClient) -> None:
    key = {"idempotency-key": "k"}
    assert begin(client, key, input_file_id="nope").status_code == 404
    assert begin(client, key, input_file_id="nope").status_code == 404
    assert begin(client, {"idempotency-key": "x" * 256}).status_code == 400


def test_the_same_key_of_two_tenants_makes_two_batches(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()
    for tenant in ("a", "b"):
        for module in ("files", "batches"):
            monkeypatch.setattr(f"producer.gateway.{module}.caller_of", lambda request, t=tenant: Caller(t))
        made.add(begin(client, {"idempotency-key": "k"}).json()["id"])
    assert len(made) == 2


def test_a_tenant_sees_and_cancels_its_own_batches_only(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = [Caller("a")]
    for module in ("files", "batches"):
        monkeypatch.setattr(f"producer.gateway.{module}.caller_of", lambda request: caller[0])
    file_id = upload(client).json()["id"]
    batch_id = begin(client, input_file_id=file_id).json()["id"]
    for other in ("b", ".", "..", None):
        caller[0] = Caller(other)
        assert client.get("/v1/batches").json()["data"] == []
        assert client.get(f"/v1/batches/{batch_id}").status_code == 404
        assert client.post(f"/v1/batches/{batch_id}/cancel").status_code == 404
        assert begin(client, input_file_id=file_id).status_code == 404
    caller[0] = Caller("a")
    assert client.get(f"/v1/batches/{batch_id}").json()["status"] == "validating"


def test_batches_are_listed_page_by_page_newest_first(client: TestClient) -> None:
    file_id = upload(client).json()["id"]
    made = [begin(client, input_file_id=file_id).json()["id"] for _ in range(25)]
    made = sorted(made, reverse=True)
    page = client.get("/v1/batches").json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (made[:20], True)
    rest = client.get("/v1/batches", params={"after": page["last_id"], "limit": 100}).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (made[20:], False)
    assert client.get("/v1/batches", params={"limit": 101}).status_code == 400


def test_a_cancelled_batch_waits_for_its_end(client: TestClient) -> None:
    batch_id = begin(client).json()["id"]
    answer = client.post(f"/v1/batches/{batch_id}/cancel")
    assert answer.status_code == 200
    batch = Batch.model_validate(answer.json(), strict=True)
    assert batch.status == "cancelling"
    assert batch.cancelling_at is not None
    assert client.get(f"/v1/batches/{batch_id}").json() == answer.json()


def test_a_batch_is_kept_when_its_rq_job_cannot_be_enqueued(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = rq.Queue("x", connection=command_client(f"redis://127.0.0.1:{free_port()}/0", retries=0))
    monkeypatch.setattr("producer.gateway.batches._queue", lambda url, name: nowhere)
    batch_id = begin(client).json()["id"]
    assert client.get(f"/v1/batches/{batch_id}").status_code == 200
    storage = gateway(client).storage
    assert storage is not None
    assert [found for found, _, _ in storage.open_batches()] == [batch_id]


def test_while_redis_is_away_batches_are_read_but_not_created(tmp_path: Path) -> None:
    with inside(f"redis://127.0.0.1:{free_port()}/0", tmp_path) as client:
        gateway(client).redis.up = False
        answer = begin(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert client.get("/v1/batches").status_code == 200
