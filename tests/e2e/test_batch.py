"""Batch files through real workers that are killed, as is the command: every request gets its one right line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import Process
from tests.support import eventually
from tests.tokenmill.batch.files import CHAT, check_whole, read, request, write
from tests.worker.fakes import POISON, text_of
from tests.worker.harness import Queue

pytestmark = pytest.mark.redis_server

QUICK = {"max_num_seqs": "64", "max_waiting": "256", "max_attempts": "100"}


class Batch:
    """A file, the process that runs it, and a worker; either may be killed at any time."""

    def __init__(self, folder: Path, queue: Queue, requests: list[dict[str, Any]], worker: Callable[[], Any]) -> None:
        self.folder, self.queue, self.requests = folder, queue, requests
        self.input = write(folder / "in.jsonl", requests)
        self.outputs = folder / "out.jsonl", folder / "err.jsonl"
        self._start_worker = worker
        self.worker = worker()
        self.run: subprocess.Popen[bytes] | None = None
        self.killed = 0
        """How often the run was killed before its end."""

    def start(self) -> subprocess.Popen[bytes]:
        output, errors = self.outputs
        command = [sys.executable, "-m", "tokenmill.cli.main", "batch", "run", str(self.input), "-o", str(output)]
        command += ["--errors", str(errors), "--redis", self.queue.url, "--queue", self.queue.keys.queue]
        with (self.folder / "run.log").open("ab") as log:
            self.run = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self.run

    @property
    def written(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.outputs if path.exists())

    @property
    def ended(self) -> bool:
        return self.run is None or self.run.poll() is not None

    def suffer(self, rng: random.Random, strikes: int) -> None:
        """Kill the run or the worker after random numbers of lines, also before the first line; then let it end."""
        self.start()
        places = sorted(rng.choice((0, rng.randrange(len(self.requests)))) for _ in range(strikes))
        for place in places:
            eventually(lambda place=place: self.written >= place or self.ended, 60, 0.001)  # type: ignore[misc]
            time.sleep(rng.random() * 0.05)  # waits for nothing: any moment will do
            if rng.random() < 0.5:
                self._kill_run()
                self.start()
            else:
                self.worker.kill()
                self.worker.wait()
                self.worker = self._start_worker()
        assert self.run is not None
        assert self.run.wait(170) in (0, 1), (self.folder / "run.log").read_text()

    def _kill_run(self) -> None:
        assert self.run is not None
        self.run.kill()
        self.killed += self.run.wait() == -signal.SIGKILL

    def close(self) -> None:
        for process in (self.worker, self.run):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def mixed(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Chats over a few system prompts, some of which are refused or fail."""
    made = []
    for number in range(count):
        system = {"role": "system", "content": f"rule {rng.randrange(5)}"}
        body: dict[str, Any] = {"messages": [system, {"role": "user", "content": f"q{number}"}]}
        body["max_tokens"] = rng.randrange(1, 5)
        odd = rng.random()
        if odd < 0.02:
            body["stream"] = True
        elif odd < 0.04:
            body["temperature"] = 9
        elif odd < 0.1:
            body["n"] = 2
        made.append(request(f"id-{number}", url=CHAT, **{"model": "fake", **body}))
    return made


def check_texts(batch: Batch) -> None:
    """Check that each response has the text of the fake engine for its prompt, and that only refused bodies failed."""
    asked = {one["custom_id"]: one["body"] for one in batch.requests}
    output, errors = batch.outputs
    for line in read(output):
        body = asked[line["custom_id"]]
        prompt = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"]).encode()
        assert POISON not in prompt
        choices = line["response"]["body"]["choices"]
        expected = [text_of(prompt, index, body["max_tokens"]) for index in range(body.get("n", 1))]
        assert [choice["message"]["content"] for choice in choices] == expected
    for line in read(errors):
        assert {"stream", "temperature"} & asked[line["custom_id"]].keys(), line


def suffer(tmp_path: Path, queue: Queue, seed: int, count: int, strikes: int) -> None:
    rng = random.Random(seed)
    requests = mixed(rng, count)
    batch = Batch(tmp_path, queue, requests, lambda: Process(queue.url, queue.keys.queue, tmp_path, **QUICK).popen)
    try:
        batch.suffer(rng, strikes)
        check_whole([one["custom_id"] for one in requests], *batch.outputs)
        check_texts(batch)
        assert batch.killed
        assert (queue.depth(), queue.pending()) == (0, 0)
    finally:
        batch.close()


def test_a_batch_survives_kill_9_of_every_process(tmp_path: Path, own: Queue) -> None:
    suffer(tmp_path, own, seed=1, count=1500, strikes=5)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_long_batch_survives_kill_9_of_every_process(tmp_path: Path, own: Queue, seed: int) -> None:
    suffer(tmp_path, own, seed, count=5000, strikes=12)


def test_bodies_of_any_size_are_answered_and_stop_no_other_request(tmp_path: Path, own: Queue) -> None:
    large = {"large": 2_000_000, "larger": 20_000_000, "small": 10}
    requests = [request(name, "x" * size, model="fake", max_tokens=2) for name, size in large.items()]
    batch = Batch(tmp_path, own, requests, lambda: Process(own.url, own.keys.queue, tmp_path).popen)
    try:
        assert batch.start().wait(60) == 1
        check_whole(large, *batch.outputs)
        codes = {line["custom_id"]: line["response"]["status_code"] for line in read(batch.outputs[1])}
        assert codes == {"large": 413, "larger": 413}
    finally:
        batch.close()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_a_batch_on_the_real_model_survives_kill_9_of_every_process(tmp_path: Path, own: Queue, seed: int) -> None:
    """Greedy texts do not depend on what ran beside them or before a kill."""
    rng = random.Random(seed)
    systems = [f"You are assistant number {number}, and you answer in one short sentence." for number in range(4)]
    requests = []
    for number in range(500):
        messages = [
            {"role": "system", "content": systems[rng.randrange(4)]},
            {"role": "user", "content": f"What is {rng.randrange(10)} + {rng.randrange(10)}?"},
        ]
        requests.append(request(f"id-{number}", url=CHAT, messages=messages, model=None, temperature=0, max_tokens=6))

    def worker() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tokenmill.cli.main", "worker", "--model", "smollm2-135m", "--redis", own.url]
        command += ["--queue", own.keys.queue, "--kv-cache-memory", "256MiB", "--lease-seconds", "2"]
        with (tmp_path / "worker.log").open("ab") as log:
            return subprocess.Popen(command, stderr=log)

    batch = Batch(tmp_path, own, requests, worker)
    try:
        batch.suffer(rng, 6)
        check_whole([one["custom_id"] for one in requests], *batch.outputs)
        lines = {line["custom_id"]: line["response"]["body"] for line in read(batch.outputs[0])}
        assert len(lines) == 500
        texts: dict[str, set[str]] = {}
        for one in requests:
            text = lines[one["custom_id"]]["choices"][0]["message"]["content"]
            texts.setdefault(str(one["body"]["messages"]), set()).add(text)
        assert all(len(equal) == 1 for equal in texts.values())
        assert len(texts) < 400
        cached = sum(body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in lines.values())
        assert cached > 0
    finally:
        batch.close()
