"""The processes behind the HTTP API (gateway, worker with a fake engine, clerk), which tests kill and restart."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.e2e.process import Process
from tests.producer.rqprocess import RqProcess
from tests.support import eventually, free_port
from tests.tokenmill.mini import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from tokenmill.queue.workers import read_workers

START_S = 60.0
"""Limit for the start of a process on a loaded machine."""
HOST = "127.0.0.1"


class Killable:
    """A process that tests kill."""

    popen: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Kill the process if it still runs, even if it is stopped by SIGSTOP."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.kill()


class GatewayProcess(Killable):
    """A `tokenmill gateway` process; its log is kept. Options are settings by their Python names."""

    def __init__(self, url: str, queue: str, folder: Path, *, port: int | None = None, **options: str) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log_file = folder / f"gateway-{secrets.token_hex(4)}.log"
        settings = {"redis": url, "queue": queue, "port": str(self.port), "log_format": "json", **options}
        given = {f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "tokenmill", "gateway"]
        with self.log_file.open("wb") as out:
            self.popen = subprocess.Popen(command, env={**os.environ, **given}, stdout=out, stderr=out)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def rss(self) -> int:
        """Resident memory in bytes."""
        lines = Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    @property
    def cpu_seconds(self) -> float:
        """CPU time of user and system so far."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until_it_answers(self) -> GatewayProcess:
        """Wait for `GET /healthz`.

        Raises:
            AssertionError: the process ended, or does not answer; the message has its log.
        """

        def answers() -> bool:
            assert self.popen.poll() is None, f"the gateway ended with {self.popen.returncode}:\n{self.log}"
            return get(f"{self.url}/healthz")[0] == 200

        eventually(answers, START_S, 0.05)
        return self

    def terminate(self) -> None:
        self.popen.terminate()

    def stop(self, timeout: float = 40) -> int:
        """Send SIGTERM and return the exit status."""
        self.terminate()
        return self.popen.wait(timeout)


class FakeWorker(Process, Killable):
    """A worker process with a fake engine: a token is a number and a space, computed from the prompt's bytes.

    Options are settings; `FAKE_STEP` is the length of a step in seconds, `FAKE_KILL` a prompt that kills the process.
    The model is called `fake`.
    """


class Clerk(RqProcess):
    """An `rq worker` of the clerk's class on one RQ queue, with short intervals, so that it notices soon."""

    OPTIONS = ("--worker-class", "tests.producer.gateway.hasty.HastyClerk", "--with-scheduler")
    HURRY = ("--maintenance-interval", "1", "--worker-ttl", "16", "--job-monitoring-interval", "1")

    def __init__(self, queue: Queue, name: str, folder: Path, files: Path, **environ: str) -> None:
        given = {"TOKENMILL_FILES": str(files), **environ}
        super().__init__(queue, [name], folder, *self.OPTIONS, *self.HURRY, **given)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()


@dataclass
class Stack:
    """A queue with its processes. `close` ends those that still live."""

    url: str
    folder: Path
    queue: Queue = field(init=False)
    batch_queue: str = field(default_factory=lambda: f"clerk-{secrets.token_hex(4)}")
    processes: list[GatewayProcess | FakeWorker | Clerk] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = Keys(f"http-{secrets.token_hex(6)}")
        self.queue = Queue(self.url, command_client(self.url), keys)
        self.files = self.folder / "files"
        self.files.mkdir(exist_ok=True)

    def gateway(self, *, wait: bool = True, port: int | None = None, **options: str) -> GatewayProcess:
        """Start a gateway on the stack's folder of files; `port`: that of a gateway that was stopped."""
        settings = {"files": str(self.files), "batch_queue": self.batch_queue, **options}
        made = GatewayProcess(self.url, self.queue.keys.queue, self.folder, port=port, **settings)
        self.processes.append(made)
        return made.wait_until_it_answers() if wait else made

    @property
    def first_gateway(self) -> GatewayProcess:
        return next(one for one in self.processes if isinstance(one, GatewayProcess))

    def worker(self, *, wait: bool = True, **options: str) -> FakeWorker:
        """Start a worker; with `wait`, return when it is listed among the queue's workers."""
        before = self._workers()
        made = FakeWorker(self.url, self.queue.keys.queue, self.folder, **options)
        self.processes.append(made)
        if wait:
            eventually(lambda: self._workers() - before, START_S, 0.05)
        return made

    def clerk(self, **environ: str) -> Clerk:
        made = Clerk(self.queue, self.batch_queue, self.folder, self.files, **environ)
        self.processes.append(made)
        return made

    def keys_file(self, **tenants: str) -> tuple[Path, dict[str, str]]:
        """Write a file of keys, one for each tenant; return its path, and tenant → key.

        Args:
            tenants: name → the options of its line, as `rpm=5 priority=low`.
        """
        keys = {tenant: f"sk-{tenant}-{secrets.token_hex(8)}" for tenant in tenants}
        path = self.folder / f"keys-{secrets.token_hex(4)}"
        lines = [
            f"{hashlib.sha256(key.encode()).hexdigest()} {tenant} {tenants[tenant]}" for tenant, key in keys.items()
        ]
        path.write_text("# keys of a test\n" + "\n".join(line.strip() for line in lines) + "\n")
        return path, keys

    def _workers(self) -> set[str]:
        return {one.name for one in read_workers(self.queue.redis, self.queue.keys)}

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.queue.redis.close()


@contextmanager
def stack(url: str, folder: Path) -> Iterator[Stack]:
    """A queue of its own on the Redis server at `url`, without processes yet."""
    made = Stack(url, folder)
    try:
        yield made
    finally:
        made.close()


def openai_options(gateway: GatewayProcess, key: str = "none", **options: Any) -> dict[str, Any]:
    """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI` for a gateway; no retries, so that each error is seen."""
    return {"base_url": f"{gateway.url}/v1", "api_key": key, "max_retries": 0, "timeout": 60, **options}


def client_of(gateway: GatewayProcess, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**openai_options(gateway, key, **options))


def async_client_of(gateway: GatewayProcess, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**openai_options(gateway, key, **options))


@dataclass
class Answer:
    """An HTTP answer. It unpacks into status and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def __iter__(self) -> Iterator[Any]:
        yield self.status
        yield self.body

    def __getitem__(self, index: int) -> Any:
        return (self.status, self.body)[index]


def ask(method: str, url: str, body: Any = None, *, timeout: float = 60, **headers: str) -> Answer:
    """Send a request as curl would, and return the answer of any status.

    Args:
        body: bytes as they are, anything else as JSON.
        headers: `_` stands for `-`.
        timeout: seconds.
    """
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if raw is not None:
        given.setdefault("content-type", "application/json")
    request = urllib.request.Request(url, raw, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def get(url: str, *, timeout: float = 60, **headers: str) -> Answer:
    """GET a URL; status 0 if nothing listens there."""
    try:
        return ask("GET", url, timeout=timeout, **headers)
    except (urllib.error.URLError, ConnectionError):
        return Answer(0, {}, b"")


def post(url: str, body: Any, *, timeout: float = 60, **headers: str) -> Answer:
    return ask("POST", url, body, timeout=timeout, **headers)
