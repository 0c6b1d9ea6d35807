"""Uploads to a real gateway: large files in bounded memory, refusals in mid-upload, clients that vanish."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.producer.gateway.harness import HOST, GatewayProcess, Stack, client_of, stack
from tests.support import RedisServer, eventually

pytestmark = pytest.mark.redis_server
MIB = 1 << 20
LIMIT = 40 * MIB


@pytest.fixture(scope="module")
def store(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(redis_server.url, tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def receiving(store: Stack) -> GatewayProcess:
    return store.gateway(max_file_bytes=str(LIMIT))


def drafts(store: Stack) -> list[Path]:
    return list(store.files.rglob(".new-*"))


def begin(gateway: GatewayProcess, content: bytes) -> socket.socket:
    """Send the beginning of an upload."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        f"Content-Length: {10 * MIB}\r\n\r\n"
    )
    made = socket.create_connection((HOST, gateway.port))
    made.sendall(head.encode() + part + content)
    return made


def test_a_large_file_passes_through_little_memory(receiving: GatewayProcess) -> None:
    with client_of(receiving) as client:
        client.files.create(file=("small", b"x"), purpose="batch")
        before, content = receiving.rss, bytes(range(256)) * (LIMIT // 256)
        file = client.files.create(file=("large", content), purpose="batch")
        assert file.bytes == LIMIT
        assert receiving.rss - before < LIMIT // 2
        read = client.files.content(file.id).content
    assert hashlib.sha256(read).digest() == hashlib.sha256(content).digest()
    assert receiving.rss - before < LIMIT // 2


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
def test_the_client_of_a_too_large_upload_reads_its_413(receiving: GatewayProcess, store: Stack, size: int) -> None:
    with client_of(receiving) as client, pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("large", b"x" * size), purpose="batch")
    assert refused.value.status_code == 413
    eventually(lambda: not drafts(store))


def test_an_upload_whose_client_goes_away_leaves_nothing(receiving: GatewayProcess, store: Stack) -> None:
    sending = begin(receiving, b"x" * MIB)
    eventually(lambda: drafts(store))
    sending.close()
    eventually(lambda: not drafts(store))


def test_an_upload_whose_gateway_is_killed_is_no_file(store: Stack) -> None:
    killed = store.gateway()
    with client_of(killed) as client:
        before = [file.id for file in client.files.list()]
    with begin(killed, b"x" * MIB):
        eventually(lambda: drafts(store))
        killed.kill()
    with client_of(store.gateway()) as client:
        assert [file.id for file in client.files.list()] == before


def test_a_folder_that_cannot_be_used_ends_the_gateway_with_status_2(store: Stack) -> None:
    (store.folder / "taken").touch()
    gateway = store.gateway(wait=False, files=str(store.folder / "taken" / "x"))
    assert gateway.popen.wait(60) == 2
    assert "--files: " in gateway.log
    assert "Traceback" not in gateway.log
