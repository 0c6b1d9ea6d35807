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
    """Have this process get SIGTERM when its parent is gone, however that ended; called first thing in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone already
        raise SystemExit(1)


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

    It has a session of its own, so that Ctrl-C on a terminal reaches the parent alone, which then stops it in order. A
    parent that is killed takes it along. Call it on the main thread: the kernel watches the thread that forked.
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
