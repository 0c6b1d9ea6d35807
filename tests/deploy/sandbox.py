"""Run a process in its own file system with bubblewrap, as a container engine would.

It sees `/usr` of this machine, read-only, and what is mounted for it, at the paths where a container would have it. It
has an environment of its own, a process id space, no capabilities and no way to new privileges; the network is this
machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.support import eventually

BWRAP = shutil.which("bwrap")


def new_root(folder: Path) -> Path:
    """Make a folder that can be the `/` of a box."""
    (folder / "tmp").mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    return folder


@dataclass(frozen=True)
class Box:
    """The file system of a process: what it can read and write."""

    root: Path
    """The folder that is its `/`."""
    mounts: tuple[tuple[Path, str, bool], ...] = ()
    """(Source on this machine, path in the box, writable)."""
    tmpfs: tuple[str, ...] = ()
    read_only: bool = True
    uid: int = 0
    hostname: str = "box"
    environ: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    init: bool = True
    """Whether the process runs under a small init, as with Docker's `--init`."""

    def command(self, argv: Sequence[str], *options: str) -> list[str]:
        """Return the command line that runs `argv` in the box."""
        if BWRAP is None:
            raise RuntimeError("bubblewrap is not installed")
        line = [
            BWRAP,
            "--unshare-user",
            "--uid",
            str(self.uid),
            "--gid",
            str(self.uid),
            "--unshare-pid",
            "--unshare-ipc",
        ]
        line += [
            "--unshare-uts",
            "--hostname",
            self.hostname,
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ]
        line += ["--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        line += ["--ro-bind", "/sys", "/sys"]
        for target in self.tmpfs:
            line += ["--tmpfs", target]
        for source, target, writable in self.mounts:
            line += ["--bind" if writable else "--ro-bind", str(source), target]
        line += ["--remount-ro", "/"] if self.read_only else []
        line += ["--clearenv", "--chdir", self.folder]
        for name, value in self.environ.items():
            line += ["--setenv", name, value]
        line += [] if self.init else ["--as-pid-1"]
        return [*line, *options, "--", *argv]

    def run(self, argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run `argv` to its end; both outputs together are in `stdout`."""
        return subprocess.run(
            self.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, argv: Sequence[str], log: IO[bytes]) -> Boxed:
        """Start `argv`; its outputs go to `log`."""
        with _pipe() as (readable, writable):
            popen = subprocess.Popen(
                self.command(argv, "--info-fd", str(writable)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writable],
            )
            os.close(writable)
            with os.fdopen(os.dup(readable)) as info:
                told = json.loads(info.read() or "{}")
        return Boxed(popen, told.get("child-pid"), self.init)


@dataclass
class Boxed:
    """A process that was started in a box."""

    popen: subprocess.Popen[bytes]
    outer: int | None
    """The first process of its process id space; None: it did not start."""
    init: bool

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        if self.popen.poll() is not None or self.outer is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._inner(self.outer) if self.init else self.outer, number)

    def wait(self, timeout: float) -> int:
        """Wait for the end; return the exit status, 128 + n after signal n."""
        return self.popen.wait(timeout)

    def _inner(self, outer: int) -> int:
        children = Path(f"/proc/{outer}/task/{outer}/children")
        return int(eventually(lambda: children.read_text().split() if self.popen.poll() is None else ["0"])[0]) or outer


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    readable, writable = os.pipe()
    try:
        yield readable, writable
    finally:
        os.close(readable)
        with contextlib.suppress(OSError):
            os.close(writable)
