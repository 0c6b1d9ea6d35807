"""A gateway process that tests talk to over plain sockets, and what reads its answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import eventually, free_port

GENEROUS_S = 60.0
POST = "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
"""Without the end of the headers."""
REDIS_AWAY = "redis://127.0.0.1:1/0"


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


class Served:
    """A gateway process with the routes of `served.py`. Options are settings, or variables in capitals.

    Args:
        open_files: limit of open files.
    """

    def __init__(self, folder: Path, *, open_files: int | None = None, **options: str) -> None:
        self.port = free_port()
        self.log_file = folder / "gateway.log"
        settings = {"redis": REDIS_AWAY, "port": str(self.port), "log_format": "json", "log_level": "debug", **options}
        given = {name if name.isupper() else f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        with self.log_file.open("wb") as out:
            command = [sys.executable, "-m", "tests.producer.gateway.served"]
            if open_files is not None:
                command = ["bash", "-c", f'ulimit -n {open_files} && exec "$@"', "bash", *command]
            self.popen = subprocess.Popen(command, env={**os.environ, **given}, stdout=out, stderr=out)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait(self) -> Served:
        def listens() -> bool:
            assert self.popen.poll() is None, self.log
            return bool(self.events("gateway_listening"))

        eventually(listens, GENEROUS_S, 0.05)
        return self

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=GENEROUS_S)

    def ask(self, head: str, body: bytes = b"", host: str = "localhost") -> Answer:
        """Send one request and read its answer; `head`: request line and headers but Host and Content-Length."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        with self.connect() as sock:
            sock.sendall(f"{head}\r\nHost: {host}\r\n{length}\r\n".replace("\n\r\n\r\n", "\n\r\n").encode() + body)
            return read_answer(sock)

    def post(self, path: str, body: bytes, kind: str = "application/json") -> Answer:
        return self.ask(f"POST {path} HTTP/1.1\r\nContent-Type: {kind}", body)

    def lives(self) -> bool:
        return self.ask("GET /healthz HTTP/1.1").status == 200

    def answers(self) -> bool:
        try:
            return self.lives()
        except (AssertionError, ConnectionError):
            return False

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


def read_answer(sock: socket.socket, kept: bytearray | None = None) -> Answer:
    """Read one response of a connection; `kept`: bytes read beyond it."""
    data = bytearray() if kept is None else kept
    while b"\r\n\r\n" not in data:
        data += _more(sock, data)
    head, _, _ = bytes(data).partition(b"\r\n\r\n")
    del data[: len(head) + 4]
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(data) < length:
        data += _more(sock, data)
    body = bytes(data[:length])
    del data[:length]
    return Answer(int(first.split()[1]), headers, body)


def _more(sock: socket.socket, data: bytearray) -> bytes:
    more = sock.recv(65536)
    assert more, f"the connection ended after {bytes(data)!r}"
    return more


def ended(sock: socket.socket) -> bool:
    """Read a connection to its end; return whether it ended."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def read_all(sock: socket.socket) -> bytes:
    """Read a connection to its end."""
    data = b""
    while more := sock.recv(65536):
        data += more
    return data
