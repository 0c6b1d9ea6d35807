"""A batch of any size runs in bounded memory, of the run and of Redis."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import eventually
from tests.worker.harness import Queue

pytestmark = pytest.mark.redis_server

LINES = int(os.environ.get("TOKENMILL_TEST_BATCH_LINES", "1000000"))


@contextmanager
def stub(queue: Queue) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.tokenmill.batch.stub", queue.url, queue.keys.queue]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(10) == 0


def resident(pid: int) -> int:
    """Bytes of a process in memory; 0 where it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def generate(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(
                f'{{"custom_id":"request-{number}","method":"POST","url":"/v1/chat/completions","body":{{"model":"m",'
                f'"messages":[{{"role":"system","content":"rule {number % 1000}"}},'
                f'{{"role":"user","content":"{number}"}}],"max_tokens":4}}}}\n'
            )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_lines_run_in_flat_memory(tmp_path: Path, own: Queue) -> None:
    generate(tmp_path / "in.jsonl", LINES)
    output = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "tokenmill.cli.main",
        "batch",
        "run",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(output),
    ]
    command += ["--redis", own.url, "--queue", own.keys.queue]
    seen: list[tuple[int, int, int]] = []
    begun = time.monotonic()
    with stub(own):
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        first = eventually(lambda: output.exists() and output.stat().st_size and time.monotonic(), 300)

        def ended() -> bool:
            memory = int(own.client.info("memory")["used_memory"])
            seen.append((output.stat().st_size, resident(run.pid), memory))
            return run.poll() is not None

        eventually(ended, 3500, 0.5)
        end = time.monotonic()
    assert run.returncode == 0
    with output.open("rb") as file:
        numbers = sorted(int(line.split(b'"request-', 1)[1].split(b'"', 1)[0]) for line in file)
    assert numbers == list(range(LINES))
    seen = [one for one in seen if one[1]]
    early = seen[len(seen) // 10]
    most, redis = max(one[1] for one in seen), max(one[2] for one in seen)
    print(
        f"{LINES} lines: checked in {first - begun:.1f} s, {LINES / (end - first):.0f} lines/s, RSS {early[1] >> 20} "
        f"MiB early and {most >> 20} MiB at most, Redis {redis >> 20} MiB at most"
    )
    assert most < early[1] + (24 << 20)
    assert most < 160 << 20
    assert redis < 64 << 20
