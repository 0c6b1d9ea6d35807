"""Worker and client over TLS: with the right authority they work, without it they refuse to talk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.e2e.process import Start
from tests.support import eventually, free_port, output_of
from tests.worker.harness import Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.ops.exits import Exit

pytestmark = pytest.mark.redis_server


@dataclass
class Secured:
    """A server that speaks TLS only."""

    port: int
    authority: Path
    stranger: Path
    """An authority that has signed nothing here."""

    def url(self, authority: Path | None = None) -> str:
        return f"rediss://localhost:{self.port}/0" + (f"?ssl_ca_certs={authority}" if authority else "")


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    output_of(command)
    return cert, key


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    cert, key = certificate(folder, "server")
    stranger, _ = certificate(folder, "stranger")
    command = [shutil.which("redis-server") or "redis-server", "--port", "0", "--tls-port", str(port)]
    command += ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
    command += ["--tls-auth-clients", "no", "--dir", str(folder), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found = Secured(port, cert, stranger)

    def up() -> bool:
        with closing(command_client(found.url(cert), retries=0)) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return process.poll() is not None

    eventually(up)
    assert process.poll() is None, "this redis-server has no TLS"
    yield found
    process.kill()
    process.wait()


def test_a_job_travels_encrypted_all_the_way(secured: Secured, start: Start) -> None:
    url = secured.url(secured.authority)
    with closing(command_client(url)) as connection, Client(url, "tls") as client:
        worker = start(Queue(connection, url, Keys("tls")))
        job = client.submit("x", max_tokens=3)
        assert "".join(job.text(timeout=20)) == job.result(timeout=10).text
        assert worker.stop() == Exit.OK


@pytest.mark.parametrize("known", [False, True])
def test_a_server_that_no_known_authority_vouches_for_is_not_talked_to(secured: Secured, known: bool) -> None:
    client = command_client(secured.url(secured.stranger if known else None), retries=0)
    with closing(client), pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
        client.ping()


def test_without_tls_there_is_no_talk(secured: Secured) -> None:
    client = command_client(f"redis://localhost:{secured.port}/0", retries=0)
    with closing(client), pytest.raises(redis.ConnectionError, match="speaks TLS only: use rediss://"):
        client.ping()


def test_a_client_reports_at_once_a_server_that_it_cannot_trust(secured: Secured) -> None:
    for url in (f"redis://localhost:{secured.port}/0", secured.url(secured.stranger)):
        with Client(url) as client, pytest.raises(redis.ConnectionError, match=r"(?i)certificate|speaks TLS only"):
            client.job("a").result(timeout=3600)


def test_a_worker_waits_and_says_why(secured: Secured, start: Start) -> None:
    url = secured.url(secured.stranger)
    with closing(command_client(secured.url(secured.authority))) as connection:
        worker = start(Queue(connection, url, Keys("tls-refused")))
        eventually(lambda: "redis_unreachable" in worker.log, 20)
        assert "certificate" in worker.log.lower()
        assert worker.stop() == Exit.OK
