"""`tokenmill demo` as a newcomer runs it: a process of its own, no terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import RedisServer, eventually

pytestmark = pytest.mark.model

DEMO = [sys.executable, "-m", "tokenmill.cli.main", "demo"]


def children(pid: int) -> list[int]:
    """Process ids of the living children of a process, at any depth."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def check_demo(output: str, status: int) -> None:
    """Eleven texts, one cancelled with part of its text, all blocks back, exit 0."""
    assert status == 0, output
    table = output[output.index("first token") :]
    assert len(re.findall(r"^\w+ +succeeded +\d+ +\d+ ms", table, re.MULTILINE)) == 11, output
    (cancelled,) = re.findall(r"^endless +cancelled +(\d+) +\d+ ms", table, re.MULTILINE)
    assert 0 < int(cancelled) < 1500, "it was cancelled while it ran"
    free, total = re.findall(r"KV blocks free: (\d+) of (\d+)", output)[0]
    assert free == total != "0", output
    assert re.search(r"\d+ tokens/s", output)


def test_the_demo_answers_a_dozen_prompts_and_gives_all_blocks_back() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=150, check=False)
    check_demo(done.stdout, done.returncode)
    assert "Paris" in done.stdout
    for state in ("queued", "running"):
        assert len(re.findall(rf"^ +[0-9.]+s +\w+ +{state}$", done.stdout, re.MULTILINE)) == 12


def test_the_demo_runs_on_a_real_server_and_leaves_no_job_there(redis_server: RedisServer) -> None:
    done = subprocess.run(
        [*DEMO, "--redis", redis_server.url], capture_output=True, text=True, timeout=150, check=False
    )
    check_demo(done.stdout, done.returncode)
    with redis_server.client() as client:
        lanes = [key for key in client.keys("tokenmill:{demo-*}:jobs:*") if client.type(key) == b"stream"]
        assert not any(client.xlen(lane) for lane in lanes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(number: signal.Signals) -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        eventually(lambda: len(children(demo.pid)) >= 2, timeout=30)
        started = children(demo.pid)
        demo.send_signal(number)
        assert demo.wait(timeout=60) == 130
        eventually(lambda: not any(alive(pid) for pid in started), timeout=10)
    finally:
        demo.kill()
        demo.communicate()


def test_a_killed_demo_takes_its_processes_along() -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.DEVNULL)
    try:
        started = eventually(lambda: found if len(found := children(demo.pid)) >= 2 else [], timeout=30)
    finally:
        demo.kill()
        demo.wait()
    eventually(lambda: not any(alive(pid) for pid in started), timeout=30)


def test_a_demo_whose_worker_cannot_start_says_why() -> None:
    done = subprocess.run([*DEMO, "--model", "/nowhere"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "the worker ended with status" in done.stdout
