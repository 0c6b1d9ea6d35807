"""The HTTP port of a worker: `/healthz`, `/readyz`, `/metrics`. Opened only with `--http-port`."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from worker.loop import EngineLoop
from worker.ops.exits import Exit
from worker.ops.links import Contact
from worker.ops.threads import Fatal

log = structlog.get_logger()

REDIS_READY_SECONDS = 5.0
"""Time without an answer of Redis after which a worker is not ready."""
ENGINE_READY_SECONDS = 30.0
"""Duration of one engine step after which a worker is not ready."""
IDLE_SECONDS = 5.0
"""How long a connection may be silent before it is closed."""


def not_ready(loop: EngineLoop | None, contact: Contact, draining: bool, stall_seconds: float) -> str | None:
    """Return why a worker can do no work now, None if it can; `loop` is None until the model is loaded."""
    now = time.monotonic()
    if loop is None:
        return "the model is being loaded"
    if draining:
        return "draining"
    if not contact.up or now - contact.last_ok > REDIS_READY_SECONDS:
        return "Redis does not answer"
    if now - max(loop.ticked_at, loop.step_since or 0.0) > min(ENGINE_READY_SECONDS, stall_seconds):
        return "the engine makes no progress"
    return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen on the first address that `host` resolves to.

        Raises:
            OSError: the host is unknown or no address of this machine, or the port is taken.
        """
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), handler)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name; `::` accepts IPv4 connections, too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        address: Any = self.server_address
        self.server_name, self.server_port = str(address[0]), int(address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("probe_went_away", exc_info=True)


class Health:
    """An HTTP server on a thread of its own; an error in a request handler never reaches the worker."""

    def __init__(
        self, port: int, not_ready: Callable[[], str | None], metrics: Callable[[], bytes], host: str = "127.0.0.1"
    ) -> None:
        """Open the port; 0 takes a free one.

        Args:
            not_ready: returns why the worker can do no work now, None if it can.
            metrics: returns Prometheus' text format.

        Raises:
            Fatal: the port is taken, or the host is no address of this machine.
        """
        self._not_ready = not_ready
        self._metrics = metrics
        try:
            self._server = _Server(host, port, self._handler())
        except OSError as error:
            where = f"{host}:{port}" if ":" not in host or host.startswith("[") else f"[{host}]:{port}"
            why = error.strerror or str(error)
            raise Fatal(Exit.USAGE, f"--http-host, --http-port: cannot listen on {where}: {why}") from error
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True).start()
        log.info("http_listening", host=self._server.server_name, port=self.port)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for the path of a GET."""
        match path.partition("?")[0]:
            case "/healthz":
                return 200, "text/plain", b"ok\n"
            case "/readyz":
                reason = self._not_ready()
                return (
                    (200, "text/plain", b"ready\n") if reason is None else (503, "text/plain", f"{reason}\n".encode())
                )
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, self._metrics()
        return 404, "text/plain", b"not found; the paths are /healthz, /readyz and /metrics\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_SECONDS

            def do_GET(self) -> None:
                try:
                    status, kind, body = health.answer(self.path)
                except Exception as error:  # a probe gets an answer whatever breaks
                    log.exception("probe_failed", path=self.path[:80])
                    status, kind, body = 500, "text/plain", f"{type(error).__name__}\n".encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing for a request."""

        return Handler
