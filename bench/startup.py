"""Measures the CPU time of a worker until it is ready, and that of importing torch."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support import eventually, running_redis
from worker.demo.child import WorkerProcess, worker_process


def report(model: str, rounds: int) -> float:
    """Measure both in turn, print user + system seconds, and return the ratio of the medians."""
    torch, worker = [], []
    with TemporaryDirectory() as folder, running_redis(Path(folder)) as server:
        for number in range(rounds):
            torch.append(_import_torch())
            with worker_process("--model", model, "--redis", server.url) as process:
                worker.append(_until_ready(process))
            print(f"round {number}: import torch {torch[-1]:.2f} s, worker ready {worker[-1]:.2f} s of CPU", flush=True)
    ratio = statistics.median(worker) / statistics.median(torch)
    print(f"worker ready / import torch = {ratio:.2f}")
    return ratio


def _import_torch() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _until_ready(worker: WorkerProcess) -> float:
    def ready() -> bool:
        worker.check()
        return b"worker_ready" in Path(worker.log.name).read_bytes()

    eventually(ready, timeout=300)
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])  # proc(5): utime and stime, counted from the end of the name
    return (user + system) / os.sysconf("SC_CLK_TCK")
