"""Run the gateway: sockets, uvicorn, signals, graceful shutdown.

main(GatewaySettings()) → exit status
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

import structlog
import uvicorn
from starlette.applications import Starlette

from producer.gateway.app import build
from producer.gateway.connection import KEEP_ALIVE_SECONDS, Connection
from producer.gateway.gateway import Gateway
from producer.gateway.keys import KeysError
from producer.gateway.middleware import MAX_HEADER_BYTES
from producer.gateway.settings import GatewaySettings
from producer.gateway.storing import FilesError
from tokenmill.cli.console import unknown_variables
from tokenmill.cli.logs import configure
from tokenmill.protocol.connection import redact

log = structlog.get_logger()

OK, ERROR, USAGE = 0, 1, 2
"""Exit statuses: after SIGTERM or SIGINT; the server failed; an option or a variable is wrong."""
GRACE_SECONDS: Final = 3.0
"""Time from the end of the drain, in which requests get their last answer, to the end of their tasks."""
SPARE_FILES: Final = 64
"""File descriptors beside those of requests."""
FILES_PER_REQUEST: Final = 2
"""A client's connection, and a connection to Redis or an open file."""


def main(settings: GatewaySettings) -> int:
    """Run the gateway until a signal comes, and return the exit status."""
    configure(settings.log_format, settings.log_level)
    try:
        app = build(settings)
    except KeysError as error:
        return _usage(f"--api-keys: {error}")
    except FilesError as error:
        return _usage(str(error))
    return serve(app)


def serve(app: Starlette) -> int:
    """Serve an application that `app.build` made until a signal comes, and return the exit status."""
    gateway: Gateway = app.state.gateway
    settings = gateway.settings
    _capture_logging()
    for wrong in unknown_variables(os.environ):
        log.warning("variable_ignored", variable=wrong.name, nearest=wrong.nearest)
    try:
        sockets = listen(settings.host, settings.port)
    except OSError as error:
        why = error.strerror or str(error)
        return _usage(f"--host, --port: cannot listen on {settings.host}:{settings.port}: {why}")
    protocol = functools.partial(
        Connection, header_timeout=settings.header_timeout, max_connections=_max_connections(settings)
    )
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.drain_seconds + GRACE_SECONDS,  # type: ignore[arg-type]
    )
    server = Server(config, gateway)
    server.run(sockets)
    log.info("gateway_ended", status=OK if server.started else ERROR)
    return OK if server.started else ERROR


def _usage(message: str) -> int:
    print(message, file=sys.stderr)
    return USAGE


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host.

    Raises:
        OSError: the host is unknown or no address of this machine, or the port is taken.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    for family, address in dict.fromkeys((info[0], info[4]) for info in found):
        made = socket.socket(family, socket.SOCK_STREAM)
        sockets.append(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # `::` accepts IPv4 connections, too
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
        made.bind((address[0], chosen, *address[2:]))
    return sockets


class Server(uvicorn.Server):
    """uvicorn's server, which drains at a signal, and returns afterwards instead of ending by the signal.

    The first SIGTERM or SIGINT stops accepting; requests end by themselves, or after --drain-seconds with an error. The
    second ends them at once, the third without an answer.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and log where."""
        await super().startup(sockets)
        settings = self._gateway.settings
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("gateway_listening", host=host, port=port, redis=redact(settings.redis), queue=settings.queue)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT in the block."""
        loop = asyncio.get_running_loop()
        numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        log.info("signal_received", signal=signal.Signals(number).name)
        self.should_exit = True
        if self._signals == 2:
            self._gateway.deadline.set()
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._force)
        elif self._signals > 2:
            self._force()

    def _force(self) -> None:
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: refuse new requests, wait for those in flight, end them at the deadline."""
        gateway = self._gateway
        gateway.drain.set()
        timer = asyncio.get_running_loop().call_later(gateway.settings.drain_seconds, gateway.deadline.set)
        log.info("draining", requests=len(self.server_state.tasks), seconds=gateway.settings.drain_seconds)
        await super().shutdown(sockets)
        timer.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()


def _max_connections(settings: GatewaySettings) -> int:
    """Raise this process's limit of open files as far as allowed, and return how many connections it can serve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_PER_REQUEST * 2 * settings.max_requests + SPARE_FILES
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, (limit - SPARE_FILES) // FILES_PER_REQUEST)


class _ToStructlog(logging.Handler):
    """Passes records of libraries on to the gateway's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "library", logger=record.name, message=record.getMessage(), exc_info=record.exc_info)


def _capture_logging() -> None:
    """Send warnings of libraries to the gateway's log; of uvicorn only errors, since clients cause its warnings."""
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING, force=True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
