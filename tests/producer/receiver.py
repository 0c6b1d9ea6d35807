"""A receiver of webhooks on loopback (HTTP or HTTPS) that records requests and answers with given statuses."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from tests.support import output_of


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes
    sni: str | None


class Receiver:
    """Answers with `answers` in turn, the last of them for ever; None: not until `release()`."""

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        self.received: list[Received] = []
        self.answers: list[int | None] = [200]
        self.headers: dict[str, str] = {}
        """More headers of each answer."""
        self.name: str | None = None
        self._go = threading.Event()
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.scheme = "http"
        if certificate is not None:
            self.scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            context.sni_callback = self._sni
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def url(self, path: str = "/hook", host: str = "localhost") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def release(self) -> None:
        self._go.set()

    def close(self) -> None:
        self._go.set()
        self.server.shutdown()
        self.server.server_close()

    def _sni(self, _: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        self.name = name

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with receiver._lock:
                    receiver.received.append(Received(self.path, headers, body, receiver.name))
                    answers = receiver.answers
                    answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer is None:
                    receiver._go.wait(30)
                    answer = 200
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("location", receiver.url("/elsewhere"))
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        return Handler


@contextmanager
def receiving(certificate: tuple[Path, Path] | None = None) -> Iterator[Receiver]:
    receiver = Receiver(certificate)
    try:
        yield receiver
    finally:
        receiver.close()


def certificate(folder: Path, name: str, host: str = "localhost") -> tuple[Path, Path]:
    """A certificate of an authority of its own, for `host`, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}", "-keyout", str(key), "-out", str(cert)]
    output_of(command)
    return cert, key
