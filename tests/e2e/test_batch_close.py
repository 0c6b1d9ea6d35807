"""A batch that is closed while its run, the close, its workers and Redis are killed: every request has one line."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.process import Process
from tests.e2e.test_batch import QUICK, check_texts, mixed
from tests.support import RedisServer
from tests.tokenmill.batch.files import check_whole, read, write

pytestmark = pytest.mark.redis_server

COUNT = 1000


class Closing:
    """A batch on disk, and the processes that work on it; each may be killed at any time."""

    def __init__(self, folder: Path, server: RedisServer, rng: random.Random) -> None:
        self.folder, self.server, self.rng = folder, server, rng
        self.requests = mixed(rng, COUNT)
        self.input = write(folder / "in.jsonl", self.requests)
        self.outputs = folder / "out.jsonl", folder / "err.jsonl"
        self.worker = self._worker()
        self.call: subprocess.Popen[bytes] | None = None

    def _worker(self) -> subprocess.Popen[bytes]:
        return Process(self.server.url, "q", self.folder, **QUICK).popen

    def _start(self, *command: str) -> None:
        with (self.folder / "calls.log").open("ab") as log:
            self.call = subprocess.Popen([sys.executable, "-m", *command], stderr=log)

    def start_run(self) -> None:
        output, errors = map(str, self.outputs)
        command = ["tokenmill.cli.main", "batch", "run", str(self.input), "-o", output, "--errors", errors]
        self._start(*command, "--redis", self.server.url, "--queue", "q")

    def start_close(self) -> None:
        files = map(str, (self.input, *self.outputs))
        self._start("tests.tokenmill.batch.closer", self.server.url, "q", *files)

    def kill_call(self) -> None:
        if self.call is not None:
            self.call.kill()
            self.call.wait()

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.worker = self._worker()

    def kill_redis(self) -> None:
        self.server.kill()
        self.server.start()

    def sleep(self, most: float) -> None:
        """Wait for a random time: any moment will do."""
        time.sleep(self.rng.random() * most)

    def end(self) -> None:
        """Let a last close run to its end."""
        self.kill_call()
        self.start_close()
        assert self.call is not None
        assert self.call.wait(120) == 0, (self.folder / "calls.log").read_text()

    def stop(self) -> None:
        for process in (self.worker, self.call):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def suffer(closing: Closing, strikes: int) -> None:
    rng = closing.rng
    closing.start_run()
    closing.sleep(4.0)
    for _ in range(strikes):
        strike: Callable[[], None] = rng.choice((closing.kill_call, closing.kill_worker, closing.kill_redis))
        strike()
        if closing.call is None or closing.call.poll() is not None:
            rng.choice((closing.start_close, closing.start_close, closing.start_run))()
        closing.sleep(2.0)
    closing.end()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_every_request_of_a_closed_batch_has_one_line_after_kill_9_of_any_process(
    tmp_path: Path, own_redis: RedisServer, seed: int
) -> None:
    closing = Closing(tmp_path, own_redis, random.Random(seed))
    try:
        suffer(closing, strikes=5)
        before = [path.read_bytes() for path in closing.outputs]
        check_whole([one["custom_id"] for one in closing.requests], *closing.outputs)
        closing.end()
        assert [path.read_bytes() for path in closing.outputs] == before
    finally:
        closing.stop()


def cancelled(closing: Closing) -> int:
    return sum(line["error"]["code"] == "batch_cancelled" for line in read(closing.outputs[1]))


def test_a_batch_that_is_closed_in_its_middle_keeps_the_right_texts_of_what_was_done(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    closing = Closing(tmp_path, own_redis, random.Random(0))
    try:
        closing.start_run()
        while not read_count(closing.outputs[0]):
            time.sleep(0.01)
        closing.end()
        check_whole([one["custom_id"] for one in closing.requests], *closing.outputs)
        assert 0 < cancelled(closing) < COUNT
        errors = closing.outputs[1]
        own = [line for line in errors.read_bytes().splitlines(keepends=True) if b'"batch_cancelled"' not in line]
        errors.write_bytes(b"".join(own))
        check_texts(closing)  # type: ignore[arg-type]
    finally:
        closing.stop()


def read_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
