"""A `tokenmill worker` as a child process: for the demo, the benchmark and tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_RUN = (
    "import sys; from tokenmill.cli.packages import prefer_ours; prefer_ours(); "
    "from worker.demo.child import die_with; die_with(int(sys.argv.pop(1))); "
    "from worker.cli import run; run()"
)
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def die_with(parent: int) -> None:
    """Make the kernel send this process SIGTERM when its parent ends; called first in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended already
        raise SystemExit(1)


class WorkerEnded(RuntimeError):
    """The worker ended by itself; the message has its exit status and the end of its log."""


@dataclass
class WorkerProcess:
    """A running worker and its log."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def check(self) -> None:
        """Check that the worker runs.

        Raises:
            WorkerEnded: the worker has ended.
        """
        status = self.process.poll()
        if status is not None:
            raise WorkerEnded(f"the worker ended with status {status}:\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 30) -> int:
        """Send SIGTERM, and after `timeout` seconds SIGKILL; return the exit status, negative for a signal."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def worker_process(*options: str, environ: Mapping[str, str] | None = None) -> Iterator[WorkerProcess]:
    """Run `tokenmill worker` with these options for the length of the block, then stop it.

    The worker has a session of its own, so that Ctrl-C on a terminal reaches only the parent, which then stops the
    worker in order. The worker ends with its parent even if that is killed. Call this on the main thread, since the
    kernel watches the thread that forked.
    """
    command = [sys.executable, "-c", _RUN, str(os.getpid()), *options]
    with tempfile.NamedTemporaryFile(prefix="tokenmill-worker-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        worker = WorkerProcess(process, log)
        try:
            yield worker
        finally:
            worker.stop()
