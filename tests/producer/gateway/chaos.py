"""`python -m tests.producer.gateway.chaos --seed 1 --seeds 10`: a batch over HTTP while everything behind it is killed.

A batch of `--lines` requests is uploaded, started, polled and read by plain HTTP, as a user's script does. Meanwhile
the gateway, the clerk, its work horse, workers and Redis (with its append-only file) are killed by SIGKILL at random
times, and started again a moment later, as a supervisor does. The batch goes from state to state without a step back;
at the end each line has exactly one answer, the right one, in exactly two files.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.producer.gateway.harness import Answer, FakeWorker, Stack, ask, stack
from tests.support import RedisServer, running_redis
from tests.worker.fakes import text_of

STATES = ("validating", "in_progress", "finalizing", "completed")
MOMENTS = ("created_at", "in_progress_at", "finalizing_at", "completed_at")
NUM_WORKERS = 2
SPARED = 0.8
"""Share of the kills that spare a process that is still starting."""
WRONG_EVERY = 25
"""Each line whose number is a multiple of it is refused by the worker."""


@dataclass
class Chaos:
    """One run over one batch."""

    made: Stack
    server: RedisServer
    seed: int
    lines: int
    pause: float = 1.2
    """Maximum seconds between two kills."""
    max_kills: int = 60
    kills: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.stop = threading.Event()
        self.gateway = self.made.gateway(wait=False)
        self.clerk = self.made.clerk(TOKENMILL_LOG_LEVEL="info")
        self.workers = [self._worker() for _ in range(NUM_WORKERS)]
        self.gateway.wait_until_it_answers()

    def _worker(self) -> FakeWorker:
        return self.made.worker(wait=False, FAKE_STEP="0.02", max_num_seqs="8", max_attempts="1000")

    # ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def strike(self) -> None:
        """Kill processes at random, and start them again, until `stop` is set."""
        deeds = [self._kill_gateway, self._kill_clerk, self._kill_horse, self._kill_worker, self._kill_redis]
        first = self.rng.sample(deeds, len(deeds))  # so that a run with few kills has each kind, too
        try:
            while not self.stop.wait(self.rng.uniform(0.1, self.pause)):
                if self.kills.total() < self.max_kills:
                    (deed,) = first[:1] or self.rng.choices(deeds, weights=[3, 2, 2, 4, 1])
                    if deed():
                        first = first[1:]
                        self.kills[deed.__name__.removeprefix("_kill_")] += 1
                self._tend()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self.failures.append(error)

    def _away(self) -> None:
        """Wait a moment, as a supervisor does before it starts a process again."""
        time.sleep(self.rng.uniform(0, 1))

    def _spares(self, log: str) -> bool:
        """Return whether a process that still starts, by its log, is spared: a slow machine must do some work, too."""
        return not log and self.rng.random() < SPARED

    def _kill_gateway(self) -> bool:
        if self._spares(self.gateway.log):
            return False
        self.gateway.kill()
        self._away()
        self._start_gateway()
        return True

    def _kill_clerk(self) -> bool:
        if self._spares(self.clerk.log):
            return False
        self.clerk.kill()
        self._away()
        self.clerk = self.made.clerk()
        return True

    def _kill_horse(self) -> bool:
        if self.clerk.horse is None:
            return False
        with suppress(AssertionError, ProcessLookupError):  # its job ended meanwhile
            self.clerk.kill_horse()
        return True

    def _kill_worker(self) -> bool:
        index = self.rng.randrange(NUM_WORKERS)
        if self._spares(self.workers[index].log):
            return False
        self.workers[index].kill()
        self._away()
        self.workers[index] = self._worker()
        return True

    def _kill_redis(self) -> bool:
        self.server.kill()
        self._away()
        self.server.start()
        return True

    def _start_gateway(self) -> None:
        self.gateway = self.made.gateway(wait=False, port=self.gateway.port)

    def _tend(self) -> None:
        """Start processes that have ended by themselves, as a supervisor does; none ends with a fault of its own."""
        for index, worker in enumerate(self.workers):
            if worker.popen.poll() is not None:
                assert worker.popen.returncode == 0, worker.log[-4000:]
                self.workers[index] = self._worker()
        if self.gateway.popen.poll() is not None:
            assert self.gateway.popen.returncode == 0, self.gateway.log[-4000:]
            self._start_gateway()
        if self.clerk.popen.poll() is not None:  # RQ's command ends with an error if Redis is away at its start
            self.clerk = self.made.clerk()

    # ── the user ──────────────────────────────────────────────────────────────────────────────────────────────────

    def patiently(self, send: Callable[[], Answer], timeout: float = 120) -> Answer:
        """Repeat a request while the gateway or Redis is away, and return its answer.

        Raises:
            AssertionError: the answer is a fault that a repetition does not mend, or none comes in time.
        """
        deadline, last = time.monotonic() + timeout, "no answer"
        while time.monotonic() < deadline:
            if self.failures:
                raise self.failures[0]
            try:
                answer = send()
            except OSError as error:
                last = repr(error)
            else:
                if answer.status == 200:
                    return answer
                last = f"{answer.status} {answer.body[:500]!r}"
                assert answer.status == 503, last
                assert "retry-after" in answer.headers
            time.sleep(0.1)
        raise AssertionError(f"no answer in {timeout} s; the last was {last}")

    def get(self, path: str) -> Answer:
        return self.patiently(lambda: ask("GET", f"{self.gateway.url}/v1/{path}", timeout=20))

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.patiently(lambda: ask("POST", f"{self.gateway.url}/v1/{path}", body, timeout=20, **headers))

    def run(self, timeout: float = 600) -> None:
        """Run the batch amid kills, then check its files."""
        striker = threading.Thread(target=self.strike)
        striker.start()
        try:
            batch = self.follow(self.create(), timeout)
        finally:
            self.stop.set()
            striker.join()
        if self.failures:
            raise self.failures[0]
        self.check(self.get(f"batches/{batch['id']}").json)

    def create(self) -> dict[str, Any]:
        """Upload the file and create the batch; a request whose answer was lost is repeated."""
        file = self.post("files", multipart(self.input()), content_type=f"multipart/form-data; boundary={BOUNDARY}")
        given = {"input_file_id": file.json["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = self.post("batches", given, idempotency_key=f"batch-{self.seed}").json
        assert [one["id"] for one in self.get("batches").json["data"]] == [batch["id"]]
        return dict(batch)

    def follow(self, batch: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Poll the batch until it is completed; check that its state, its counts and its times never go back."""
        deadline, before = time.monotonic() + timeout, batch
        while batch["status"] != STATES[-1]:
            assert time.monotonic() < deadline, f"{batch}\n{self.clerk.log[-3000:]}"
            time.sleep(0.2)
            batch = self.get(f"batches/{batch['id']}").json
            assert batch["status"] in STATES, batch
            assert place(batch) >= place(before), f"the batch went back from {before} to {batch}"
            assert all(before[name] in (None, batch[name]) for name in MOMENTS), f"{before} became {batch}"
            before = batch
        return batch

    def input(self) -> bytes:
        """The file of the batch."""
        rows = []
        for number in range(self.lines):
            body: dict[str, Any] = {"model": "fake", "prompt": f"line {number}", "max_tokens": 1 + number % 30}
            if number % WRONG_EVERY == 0:
                body["prompt"] = "too long" * 100
            rows.append({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body})
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def check(self, batch: dict[str, Any]) -> None:
        """Check that each line has exactly one answer, the right one."""
        wrong = {f"{n}" for n in range(0, self.lines, WRONG_EVERY)}
        right = {f"{n}" for n in range(self.lines)} - wrong
        moments = [batch[name] for name in MOMENTS]
        assert moments == sorted(moments), batch
        assert batch["request_counts"] == {"total": self.lines, "completed": len(right), "failed": len(wrong)}, batch
        output, errors = self.rows(batch["output_file_id"]), self.rows(batch["error_file_id"])
        assert sorted(row["custom_id"] for row in output) == sorted(right)
        assert sorted(row["custom_id"] for row in errors) == sorted(wrong)
        assert len({row["id"] for row in [*output, *errors]}) == self.lines
        assert {row["error"]["code"] for row in errors} == {"context_length_exceeded"}
        files = {file["id"] for file in self.get("files?purpose=batch_output").json["data"]}
        assert files == {batch["output_file_id"], batch["error_file_id"]}
        for row in output:
            number = int(row["custom_id"])
            (choice,) = row["response"]["body"]["choices"]
            assert choice["text"] == text_of(list(f"line {number}".encode()), 0, 1 + number % 30), row
        assert batch["usage"]["output_tokens"] == sum(1 + int(number) % 30 for number in right)

    def rows(self, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.get(f"files/{file}/content").body.splitlines()]


def place(batch: dict[str, Any]) -> tuple[int, int]:
    """How far a batch is: its state, and how many of its requests are done."""
    counts = batch["request_counts"]
    return STATES.index(batch["status"]), counts["completed"] + counts["failed"]


BOUNDARY = "boundary-of-chaos"


def multipart(content: bytes) -> bytes:
    """Encode a file and its purpose as a form."""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    head += 'content-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


@contextmanager
def chaos(folder: Path, seed: int, lines: int, **options: Any) -> Iterator[Chaos]:
    """Set a run up; with `appendfsync always`, so that even a killed Redis keeps all confirmed writes."""
    with running_redis(folder, "--appendfsync", "always") as server, stack(server.url, folder) as made:
        yield Chaos(made, server, seed, lines, **options)


def main() -> None:
    """Run seeds one after the other; end with the first that breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="First seed.")
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds.")
    parser.add_argument("--lines", type=int, default=500, help="Requests of the batch.")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended
    for seed in range(given.seed, given.seed + given.seeds):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, chaos(Path(folder), seed, given.lines) as run:
            run.run()
            seconds = time.monotonic() - begun
            print(f"seed {seed}: {given.lines} lines in {seconds:.0f} s, kills {dict(run.kills)}: all kept", flush=True)


if __name__ == "__main__":
    main()
