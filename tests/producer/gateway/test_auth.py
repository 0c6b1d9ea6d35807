"""API keys of requests: which requests are refused, and with what error."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from producer.gateway.keys import Caller
from producer.gateway.requests import caller_of
from tests.producer.gateway.asgi import served
from tests.tokenmill.mini import Queue

KEY = "sk-good"


def keys_file(folder: Path, *keys: str | bytes) -> str:
    path = folder / "keys"
    hashes = [hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest() for key in keys]
    path.write_text("".join(f"{digest} tenant-{number} rpm=100\n" for number, digest in enumerate(hashes)))
    return str(path)


def get(queue: Queue, path: str = "/v1/models", headers: Any = None, **settings: Any) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with served(queue, **settings) as (client, _):
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_a_known_key_is_accepted(queue: Queue, tmp_path: Path) -> None:
    path = keys_file(tmp_path, "other", KEY)
    for header in (f"Bearer {KEY}", f"bearer   {KEY} ", f"BEARER {KEY}"):
        assert get(queue, headers={"Authorization": header}, api_keys=path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer  ")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
        [(b"authorization", b"Bearer " + KEY.encode() + b", Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
        [(b"authorization", b"Bearer " + hashlib.sha256(KEY.encode()).hexdigest().encode())],
        [(b"authorization", b"Bearer " + b"x" * 60_000)],
        [(b"authorization", b"Bearer wrong"), (b"Authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode()), (b"AUTHORIZATION", b"Bearer " + KEY.encode())],
        [(b"x-api-key", KEY.encode())],
        [(b"cookie", b"authorization=Bearer " + KEY.encode())],
    ],
)
def test_a_request_without_one_known_key_gets_401(
    queue: Queue, tmp_path: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    answer = get(queue, headers=headers, api_keys=keys_file(tmp_path, KEY))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert KEY not in answer.text
    assert "wrong" not in answer.text


@pytest.mark.parametrize("key", ["ключ-🔑".encode(), b"\xe9\xff"])
def test_a_key_may_have_bytes_beyond_ascii(queue: Queue, tmp_path: Path, key: bytes) -> None:
    path = keys_file(tmp_path, key)
    assert get(queue, headers=[(b"authorization", b"Bearer " + key)], api_keys=path).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json"])
def test_the_paths_for_operators_need_no_key(queue: Queue, tmp_path: Path, path: str) -> None:
    assert get(queue, path, api_keys=keys_file(tmp_path, KEY)).status_code in (200, 503)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/jobs/x",
        "/healthz/",
        "/healthz/x",
        "//healthz",
        "/unknown",
        "/",
        "/v1/%2e%2e/healthz",
        "/healthz%00",
        "/HEALTHZ",
    ],
)
def test_every_other_path_needs_a_key_even_an_unknown_path(queue: Queue, tmp_path: Path, path: str) -> None:
    assert get(queue, path, api_keys=keys_file(tmp_path, KEY)).status_code == 401


def test_without_a_file_of_keys_every_request_is_of_the_same_caller(queue: Queue) -> None:
    assert get(queue).status_code == 200
    assert get(queue, headers={"Authorization": "Bearer anything"}).status_code == 200


def test_handlers_get_the_caller(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Caller] = []

    async def names(request: Any) -> list[str]:
        seen.append(caller_of(request))
        return []

    monkeypatch.setattr("producer.gateway.models._names", names)
    get(queue, headers={"Authorization": f"Bearer {KEY}"}, api_keys=keys_file(tmp_path, KEY))
    get(queue)
    assert seen == [
        Caller("tenant-0", rpm=100, key=hashlib.sha256(KEY.encode()).hexdigest()[:16]),
        Caller(None),
    ]


def test_keys_that_are_replaced_while_requests_run_let_each_request_pass_or_fail_as_a_whole(
    queue: Queue, tmp_path: Path
) -> None:
    path = Path(keys_file(tmp_path, "old"))

    async def main() -> None:
        async with served(queue, api_keys=str(path)) as (client, gateway):
            assert gateway.keys is not None

            async def ask(key: str) -> int:
                return (await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code

            async def replace() -> None:
                for number in range(20):
                    keys_file(tmp_path, "new" if number % 2 == 0 else "old")
                    for _ in range(2):
                        await asyncio.to_thread(gateway.keys.look)  # type: ignore[union-attr]

            replacing = asyncio.create_task(replace())
            found = set()
            while not replacing.done():
                found |= set(await asyncio.gather(*[ask(key) for key in ("old", "new") * 5]))
            await replacing
            assert found <= {200, 401}
            keys_file(tmp_path, "new")
            gateway.keys.look()
            gateway.keys.look()
            assert [await ask("old"), await ask("new")] == [401, 200]

    asyncio.run(main())
