"""The routes of files: what is stored, listed, read and deleted, and what wrong requests get."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import FileDeleted, FileObject
from starlette.testclient import TestClient

from producer.files.catalog import delete_expired
from producer.files.folder import FolderBucket
from producer.files.objects import file_record
from producer.files.storage import FILE, new_id
from producer.gateway.gateway import Gateway
from producer.gateway.keys import Caller
from tests.producer.gateway.inside import inside, upload
from tests.support import free_port

LIMIT = 100_000
BOUNDARY = "xyz"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """Files need no Redis."""
    with inside(f"redis://127.0.0.1:{free_port()}/0", tmp_path / "files", max_file_bytes=LIMIT) as made:
        yield made


def gateway(client: TestClient) -> Gateway:
    found: Any = client.app
    return found.state.gateway  # type: ignore[no-any-return]


def leftovers(tmp_path: Path) -> list[str]:
    """Everything among the files of a gateway without keys that is no stored file."""
    folder = tmp_path / "files" / "open" / "files"
    return [name for name in os.listdir(folder) if not name.startswith(FILE)] if folder.exists() else []


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    more = f'; filename="{filename}"' if filename is not None else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def send(client: TestClient, *parts: bytes, end: bytes = f"--{BOUNDARY}--\r\n".encode()) -> Any:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return client.post("/v1/files", content=b"".join(parts) + end, headers=headers)


PURPOSE = part("purpose", b"batch")
A_FILE = part("file", b"{}\n", "in.jsonl")


def test_a_file_is_stored_as_it_was_sent_and_described_as_openai_does(client: TestClient) -> None:
    content = bytes(range(256)) * 300
    answer = upload(client, content, "ünder score.jsonl")
    assert answer.status_code == 200
    file = FileObject.model_validate(answer.json(), strict=True)
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(content), "ünder score.jsonl", "batch", "processed",
    )  # fmt: skip
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 30 * 86_400
    assert client.get(f"/v1/files/{file.id}").json() == answer.json()
    read = client.get(f"/v1/files/{file.id}/content")
    assert read.content == content
    assert read.headers["content-length"] == str(len(content))
    gone = client.delete(f"/v1/files/{file.id}")
    assert FileDeleted.model_validate(gone.json(), strict=True).deleted
    for answer in (
        client.get(f"/v1/files/{file.id}"),
        client.get(f"/v1/files/{file.id}/content"),
        client.delete(f"/v1/files/{file.id}"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


def test_the_file_may_come_before_the_fields(client: TestClient) -> None:
    assert send(client, A_FILE, PURPOSE).status_code == 200


def test_an_empty_file_is_stored(client: TestClient) -> None:
    assert upload(client, b"").json()["bytes"] == 0


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([A_FILE], "purpose"),
        ([PURPOSE], "file"),
        ([part("purpose", b"fine-tune"), A_FILE], "purpose"),
        ([PURPOSE, PURPOSE, A_FILE], "purpose"),
        ([PURPOSE, A_FILE, A_FILE], "file"),
        ([PURPOSE, A_FILE, part("other", b"1")], None),
        ([part("purpose", b"b" * 5000), A_FILE], "purpose"),
        ([PURPOSE, A_FILE, part("expires_after[seconds]", b"3600")], "expires_after"),
        (
            [PURPOSE, A_FILE, part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"9")],
            "expires_after.seconds",
        ),
        ([part("", b"x"), PURPOSE, A_FILE], None),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(
    client: TestClient, tmp_path: Path, parts: list[bytes], param: str | None
) -> None:
    answer = send(client, *parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.get("/v1/files").json()["data"] == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "body", [b"", b"nothing like a form", A_FILE[:60], PURPOSE + A_FILE, PURPOSE + A_FILE + b"--xy", b"--xyz\r\n: \r\n"]
)
def test_an_incomplete_form_is_refused_and_leaves_nothing(client: TestClient, tmp_path: Path, body: bytes) -> None:
    assert send(client, body, end=b"").status_code == 400
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 999}"]
)
def test_another_content_type_is_refused(client: TestClient, kind: str) -> None:
    answer = client.post("/v1/files", content=PURPOSE + A_FILE, headers={"content-type": kind})
    assert answer.status_code == 400


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [LIMIT + 1, 20 * LIMIT])
def test_too_large_a_file_is_refused_and_leaves_nothing(
    client: TestClient, tmp_path: Path, size: int, announced: bool
) -> None:
    body = PURPOSE + part("file", b"x" * size, "a") + f"--{BOUNDARY}--\r\n".encode()
    pieces = (body[at : at + 10_000] for at in range(0, len(body), 10_000))
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = client.post("/v1/files", content=body if announced else pieces, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert leftovers(tmp_path) == []
    assert upload(client, b"x" * LIMIT).status_code == 200


def test_a_full_disk_is_an_error_that_may_pass_and_leaves_nothing(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    answer = upload(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "space" not in answer.text
    assert leftovers(tmp_path) == []


def test_the_name_of_a_file_is_kept_but_leads_nowhere(client: TestClient, tmp_path: Path) -> None:
    file = upload(client, b"x", "../../../etc/passwd").json()
    assert file["filename"] == "../../../etc/passwd"
    assert client.get(f"/v1/files/{file['id']}/content").content == b"x"
    assert "passwd" not in client.get(f"/v1/files/{file['id']}/content").headers["content-disposition"]
    assert [path.name for path in tmp_path.rglob("passwd")] == []


@pytest.mark.parametrize(
    "wicked", ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "file-..", f"file-{'0' * 32}", "file-%00", "batch_" + "0" * 32]
)
def test_a_malformed_id_is_not_found(client: TestClient, wicked: str) -> None:
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/content")]:
        answer = client.request(method, f"/v1/files/{wicked}{path}")
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_file_expires_after_the_seconds_of_its_upload(client: TestClient, tmp_path: Path) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(client, **fields).json()
    assert file["expires_at"] - file["created_at"] == 3600
    storage = gateway(client).storage
    assert storage is not None
    bucket = storage.files(None)
    bucket.save(file["id"], {**(bucket.load(file["id"]) or {}), "expires_at": int(time.time())})
    stays = upload(client).json()
    assert client.get(f"/v1/files/{file['id']}").status_code == 404
    assert [one["id"] for one in client.get("/v1/files").json()["data"]] == [stays["id"]]
    assert bucket.ids() == [file["id"], stays["id"]]
    assert delete_expired(storage)["files"] == 1
    assert bucket.ids() == [stays["id"]]


def test_files_never_expire_with_zero_days(tmp_path: Path) -> None:
    with inside(f"redis://127.0.0.1:{free_port()}/0", tmp_path, file_ttl_days=0) as client:
        assert upload(client).json()["expires_at"] is None


def test_without_a_folder_there_are_no_files() -> None:
    with inside(f"redis://127.0.0.1:{free_port()}/0", None) as client:
        for answer in (upload(client), client.get("/v1/files"), client.get("/v1/batches")):
            assert answer.status_code == 404
            assert "--files" in answer.json()["error"]["message"]


def test_a_tenant_sees_its_own_files_only(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = [Caller("a")]
    monkeypatch.setattr("producer.gateway.files.caller_of", lambda request: caller[0])
    file_id = upload(client).json()["id"]
    for other in ("b", ".", "..", None):
        caller[0] = Caller(other)
        assert client.get("/v1/files").json()["data"] == []
        assert client.get(f"/v1/files/{file_id}").status_code == 404
        assert client.get(f"/v1/files/{file_id}/content").status_code == 404
        assert client.delete(f"/v1/files/{file_id}").status_code == 404
    caller[0] = Caller("a")
    assert client.get(f"/v1/files/{file_id}").status_code == 200


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(client: TestClient, count: int) -> list[str]:
    """Store `count` small files without HTTP, oldest first; every third is the output of a batch."""
    storage = gateway(client).storage
    assert storage is not None
    bucket, begun, made = storage.files(None), time.time() - count, []
    assert isinstance(bucket, FolderBucket)
    for n in range(count):
        file_id, record = (
            new_id(FILE, begun + n),
            file_record("a", 0, "batch_output" if n % 3 == 0 else "batch", n, None),
        )
        bucket.ensure()
        folder = bucket.path / f".new-{n}"
        folder.mkdir()
        (folder / "content").touch()
        bucket.take_in(folder, file_id, record)
        made.append(file_id)
    return made


def pages(client: TestClient, **query: Any) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        found = client.get("/v1/files", params={**query, **after}).json()
        yield found
        if not found["has_more"]:
            return
        after = {"after": found["last_id"]}


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_five_thousand_files_are_listed_page_by_page_each_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = fill(client, 5000)
    found = [one["id"] for page in pages(client, limit=700, order=order) for one in page["data"]]
    assert found == (made if order == "asc" else made[::-1])
    assert len(client.get("/v1/files").json()["data"]) == 5000


@pytest.mark.parametrize("limit", [1, 3, 4, 100])
def test_a_list_of_one_purpose_has_its_first_and_last_id_and_no_empty_last_page(client: TestClient, limit: int) -> None:
    made = fill(client, 12)
    wanted = [file_id for n, file_id in enumerate(made) if n % 3 == 0][::-1]
    found = list(pages(client, limit=limit, purpose="batch_output"))
    assert [one["id"] for page in found for one in page["data"]] == wanted
    for page in found:
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    assert len(found) == -(-len(wanted) // limit)


def test_a_page_begins_behind_a_file_that_was_deleted_meanwhile(client: TestClient) -> None:
    made = fill(client, 5)
    client.delete(f"/v1/files/{made[2]}")
    found = client.get("/v1/files", params={"after": made[2]}).json()
    assert [one["id"] for one in found["data"]] == [made[1], made[0]]


def test_an_empty_list_has_no_ids(client: TestClient) -> None:
    assert client.get("/v1/files").json() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "../x"}, "after"),
    ],
)
def test_a_wrong_query_names_its_parameter(client: TestClient, query: dict[str, str], param: str) -> None:
    answer = client.get("/v1/files", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
