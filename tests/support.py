"""Helpers for all tests: polling with a deadline, commands that must succeed, a real redis-server."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import redis

T = TypeVar("T")

REDIS_SERVER = shutil.which("redis-server")


def eventually(probe: Callable[[], T], timeout: float = 10.0, interval: float = 0.01) -> T:
    """Call `probe` until it returns a true value, and return this value.

    Raises:
        AssertionError: `probe` returned no true value within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{probe} was still {value!r} after {timeout} s")
        time.sleep(interval)


def output_of(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout: float = 150,
) -> str:
    """Run a command to its end and return what it wrote to stdout.

    Raises:
        AssertionError: its exit status is not 0, or it runs longer than `timeout` seconds. The message has its stdout
            and stderr, which the errors of `subprocess` leave out.
    """
    line = [str(part) for part in command]
    try:
        done = subprocess.run(
            line, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        outputs = [(part or b"").decode(errors="replace") for part in (error.stdout, error.stderr)]
        raise AssertionError(_report(line, f"ran longer than {timeout} s", *outputs)) from None
    if done.returncode != 0:
        raise AssertionError(_report(line, f"ended with {done.returncode}", done.stdout, done.stderr))
    return done.stdout


def _report(command: Sequence[str], end: str, stdout: str, stderr: str) -> str:
    return f"{shlex.join(command)}\n{end}\n--- stdout ---\n{stdout}\n--- stderr ---\n{stderr}"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class RedisServer:
    """A redis-server process with an append-only file in `folder`; it can be killed and started again there."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, socket_timeout=10)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.launch()
        eventually(self._answers, timeout=20)

    def launch(self) -> None:
        """Start the server without waiting."""
        if REDIS_SERVER is None:
            raise RuntimeError("redis-server is not installed")
        command = [REDIS_SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec", *self.options]
        with open(self.folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError), self.client() as client:
            return bool(client.ping())
        return False

    def stop(self) -> None:
        """Stop the server by SIGTERM: it writes its file and ends."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None

    def kill(self) -> None:
        """Kill the server by SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A real server for the length of the block, on a free port."""
    server = RedisServer(folder, free_port(), options=options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
