"""An embedded Redis: fakeredis' TCP server in a process of its own, for the demo and for quick tests."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

_SERVE = """
import sys, threading
from fakeredis import TcpFakeServer
server = TcpFakeServer(("127.0.0.1", 0), server_type="redis", server_version=(7, 0))
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
sys.stdin.read()  # until the parent closes it, or dies
"""


class EmbeddedRedisError(RuntimeError):
    """The embedded server did not start."""


@contextlib.contextmanager
def embedded_redis() -> Iterator[str]:
    """Run the server for the length of the block; yields its URL once it listens. It ends with this process.

    Raises:
        EmbeddedRedisError: the server did not start, perhaps because fakeredis[lua] is not installed.
    """
    if importlib.util.find_spec("fakeredis") is None:
        raise EmbeddedRedisError(
            "the embedded Redis needs fakeredis: in a clone of tokenmill, pip install '.[worker,demo]'; "
            "or name a server with --redis"
        )
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C on a terminal is for the parent, which stops its worker first
        )
        try:
            yield f"redis://127.0.0.1:{_port(process, errors)}/0"
        finally:
            _end(process)


def _port(process: subprocess.Popen[str], errors: IO[str]) -> int:
    line = process.stdout.readline().strip() if process.stdout else ""
    if not line:
        process.wait()
        errors.seek(0)
        raise EmbeddedRedisError(f"the embedded Redis did not start: {errors.read().strip()}")
    return int(line)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
