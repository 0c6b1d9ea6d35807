"""Row 11: one small call of the kernels under compute-sanitizer's memcheck and racecheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from bench.gpu_check.table import Line, Setup, Skip, check

_ERROR = 86
"""Exit status of compute-sanitizer when it found an error."""
_PLACES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def sanitizer(setup: Setup) -> Iterator[Line]:
    """Yield what each tool finds in one small call; in the reduced form the call runs without a tool."""
    for tool in ("memcheck", "racecheck"):
        yield check(tool, partial(_run, setup, tool))


def _run(setup: Setup, tool: str) -> str:
    found = next((path for path in map(shutil.which, _PLACES) if path), None)
    command = [sys.executable, "-m", "bench.gpu_check.small"]
    if setup.reduced:
        command, found = [*command, "--cpu"], "none"
    elif found is None:
        raise Skip("compute-sanitizer is not installed")
    else:
        command = [found, "--tool", tool, "--error-exitcode", str(_ERROR), *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limit = setup.seconds / 2 - 1
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise Skip(f"{found} did not end within {limit:.0f} s") from late
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    summary = next((line for line in said if "SUMMARY" in line), said[-1] if said else "")
    if done.returncode == _ERROR:
        raise ValueError(summary)
    if "not supported" in done.stdout or "Error: " in summary:
        raise Skip(summary)
    if done.returncode:
        raise ValueError(f"exit status {done.returncode}: {' '.join(said[-3:])}")
    return f"{found}: {summary}"
