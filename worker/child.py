"""A `tokenmill worker` as a child process: for the demo, the benchmark and tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO


class WorkerEnded(RuntimeError):
    """The worker is gone though nobody stopped it; the message has its exit status and the end of its log."""


@dataclass
class WorkerProcess:
    """The process and what it logs."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def check(self) -> None:
        """Look whether it lives.

        Raises:
            WorkerEnded: it does not.
        """
        status = self.process.poll()
        if status is not None:
            raise WorkerEnded(f"the worker ended with status {status}:\n{self.last_words()}")

    def last_words(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM, then SIGKILL after `timeout` seconds. Returns the exit status, negative for a signal."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def worker_process(*options: str, environ: Mapping[str, str] | None = None) -> Iterator[WorkerProcess]:
    """Run `tokenmill worker` with these options for the length of the block; what is left of it then is stopped.

    It has a session of its own, so that Ctrl-C on a terminal reaches the parent alone, which then stops it in order.
    """
    command = [sys.executable, "-m", "worker.cli", *options]
    with tempfile.NamedTemporaryFile(prefix="tokenmill-worker-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        worker = WorkerProcess(process, log)
        try:
            yield worker
        finally:
            worker.stop()
