"""Real `rq worker` processes, and RQ's view of their jobs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import rq
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.support import eventually
from tests.tokenmill.mini import Queue


class RqProcess:
    """An `rq worker` of JSON; its log is kept."""

    def __init__(self, queue: Queue, names: list[str], folder: Path, *options: str, **environ: str) -> None:
        self.name = f"rq-{secrets.token_hex(4)}"
        self.log_file = folder / f"{self.name}.log"
        command = [sys.executable, "-m", "rq.cli", "worker", "--url", queue.url, "--serializer", "json"]
        given = {"TOKENMILL_REDIS": queue.url, "TOKENMILL_QUEUE": queue.keys.queue, "PYTHONWARNINGS": "ignore"}
        with self.log_file.open("wb") as out:
            self.popen = subprocess.Popen(
                [*command, "--name", self.name, *options, *names], env={**os.environ, **given, **environ},
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def horse(self) -> int | None:
        """The process id of the work horse, while there is one."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        horses = [int(pid) for pid in children if os.getpgid(int(pid)) == int(pid)]
        return horses[0] if horses else None

    def kill_horse(self) -> None:
        os.kill(eventually(lambda: self.horse), signal.SIGKILL)

    def end_time(self) -> None:
        """Let the `job_timeout` of the job under way run out now: RQ's alarm rings in the work horse."""
        os.kill(eventually(lambda: self.horse), signal.SIGALRM)

    def kill(self) -> None:
        """SIGKILL of the worker, its scheduler and its horse, as when their container goes."""
        horse = self.horse
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if horse is not None:
            with suppress(ProcessLookupError):  # its job ended meanwhile
                os.kill(horse, signal.SIGKILL)

    def stop(self, timeout: float = 20) -> int:
        self.popen.terminate()
        return self.popen.wait(timeout)


class Rq:
    """One queue of RQ, and the workers that were started for it."""

    def __init__(self, queue: Queue, folder: Path, name: str | None = None) -> None:
        self.queue, self._folder = queue, folder
        self.redis = Redis.from_url(queue.url)
        self.jobs = rq.Queue(name or f"rq{secrets.token_hex(4)}", connection=self.redis, serializer=JSONSerializer)
        self._processes: list[RqProcess] = []

    def worker(self, *options: str, **environ: str) -> RqProcess:
        self._processes.append(RqProcess(self.queue, [self.jobs.name], self._folder, *options, **environ))
        return self._processes[-1]

    def enqueue(self, function: str, *, retry: rq.Retry | None = None, **kwargs: Any) -> Job:
        return self.jobs.enqueue(f"producer.jobs.{function}", kwargs=kwargs, retry=retry)

    def status(self, job: Job) -> str:
        return str(job.get_status(refresh=True).value)

    def ends(self, job: Job, status: str, timeout: float = 20) -> Job:
        eventually(lambda: self.status(job) == status, timeout, 0.05)
        job.refresh()
        return job

    def close(self) -> None:
        for process in self._processes:
            if process.popen.poll() is None:
                process.kill()
        self.redis.close()


@contextmanager
def rq_on(queue: Queue, folder: Path, name: str | None = None) -> Iterator[Rq]:
    found = Rq(queue, folder, name)
    try:
        yield found
    finally:
        found.close()
