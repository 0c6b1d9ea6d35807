"""A worker process with a fake engine; it is started with options, and its log is kept."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LEASE = "1"


class Process:
    """A worker process with a fake engine; its log is kept."""

    def __init__(self, url: str, queue: str, log: Path, **options: str) -> None:
        settings = {"redis": url, "queue": queue, "lease_seconds": LEASE, "log_format": "json", "block_ms": "100"}
        given = {f"TOKENMILL_{name.upper()}": value for name, value in {**settings, **options}.items()}
        environ = {**os.environ, **given, **{k: v for k, v in options.items() if k.startswith("FAKE_")}}
        self.log_file = log / f"worker-{secrets.token_hex(4)}.log"
        with self.log_file.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.fake_process"], env=environ, stdout=out, stderr=out
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait(self, timeout: float = 20) -> int:
        return self.popen.wait(timeout)

    def stop(self) -> int:
        self.popen.terminate()
        return self.wait()


Start = Callable[..., Process]
