"""Runs a workload through Redis: a real server, a real worker process, and this process as the producer."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import redis
from prometheus_client.parser import text_string_to_metric_families

from bench.measure import Run
from bench.workloads import Item
from tests.support import eventually, free_port, running_redis
from tokenmill.protocol.connection import blocking_client, command_client
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result, Status
from worker.demo.child import WorkerProcess, worker_process

QUEUE = "bench"
POLL_SECONDS = 0.1
"""Seconds between two polls of the length of the lane: precise enough for a run of 30 s, and negligible load."""


class BenchError(RuntimeError):
    """A run that is not valid; the message says why."""


@dataclass
class Stack:
    """A Redis server and a worker that has finished its first job."""

    client: redis.Redis
    reader: redis.Redis
    worker: WorkerProcess
    keys: Keys
    port: int
    """Port of the worker's metrics."""

    def run(self, items: list[Item], salt: str, readers: bool) -> Run:
        """Enqueue all items at once and wait for the last result.

        Args:
            items: the workload.
            salt: the cache salt; different in each round, so that no round finds cached prefixes of an earlier round.
            readers: read the token events of all jobs while they are published.

        Raises:
            BenchError: a job failed or has no result, or the time limit passed.
        """
        ids = [uuid.uuid4().hex for _ in items]
        before = self._cpu()
        start = time.monotonic()
        self._enqueue(ids, items, salt)
        arrivals = self._read(ids) if readers else {}
        self._wait(max(600.0, 2.0 * len(items)))
        seconds = time.monotonic() - start
        results = [self._result(job, item) for job, item in zip(ids, items, strict=True)]
        run = Run(
            name="through Redis",
            requests=len(items),
            prompt_tokens=sum(len(item.prompt) for item in items),
            output_tokens=sum(item.output_tokens for item in items),
            seconds=seconds,
        )
        run.cpu = {name: spent - before[name] for name, spent in self._cpu().items()}
        if readers:
            _add_times_of_events(run, start, arrivals)
        else:
            _add_times_of_results(run, results)
        return run

    def answers(self) -> bool:
        """Return whether the worker serves its metrics."""
        self.worker.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def _cpu(self) -> dict[str, float]:
        """Return process → CPU seconds so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        threads = {
            sample.labels["thread"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "tokenmill_thread_cpu_seconds_total"
        }
        server: dict[str, Any] = self.client.info("cpu")
        model = threads.pop("engine") + threads.pop("other")
        return {
            "engine and OpenMP": model,
            "the worker's other threads": sum(threads.values()),
            "Redis": server["used_cpu_user"] + server["used_cpu_sys"],
            "producer and reader": time.process_time(),
        }

    def _enqueue(self, ids: list[str], items: list[Item], salt: str) -> None:
        pipe = self.client.pipeline(transaction=False)
        for job, item in zip(ids, items, strict=True):
            body = {
                "prompt": item.prompt,
                "max_tokens": item.output_tokens,
                "min_tokens": item.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "cache_salt": salt,
            }
            pipe.xadd(self.keys.lane("normal"), {"id": job, "body": orjson.dumps(body)})
        pipe.execute()

    def _wait(self, timeout: float) -> None:
        """Wait until the lane is empty, so that every job has its result.

        Args:
            timeout: seconds.
        """
        deadline = time.monotonic() + timeout
        while self.client.xlen(self.keys.lane("normal")):
            self.worker.check()
            if time.monotonic() > deadline:
                raise BenchError(f"jobs are still in the queue after {timeout:.0f} s:\n{self.worker.log_tail()}")
            time.sleep(POLL_SECONDS)

    def _read(self, ids: list[str]) -> dict[str, list[tuple[float, int]]]:
        """Read the events of all jobs up to `final`; return stream → (time, number of tokens) of each event."""
        last: dict[Any, Any] = {self.keys.out(job).encode(): b"0" for job in ids}
        seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
        while last:
            self.worker.check()
            replies: Any = self.reader.xread(dict(last), block=1000)
            for stream, entries in replies or ():
                now = time.monotonic()
                last[stream] = entries[-1][0]
                for _, fields in entries:
                    if fields[b"type"] == b"token":
                        seen[stream.decode()].append((now, int(fields[b"tokens"])))
                    elif fields[b"type"] == b"final":
                        del last[stream]
        return seen

    def _result(self, job: str, item: Item) -> Result:
        raw = self.client.get(self.keys.result(job))
        if raw is None:
            raise BenchError(f"job {job} left the queue without a result")
        result = Result.from_json(raw)
        if result.status is not Status.SUCCEEDED or result.usage.completion_tokens != item.output_tokens:
            raise BenchError(f"job {job}: expected {item.output_tokens} tokens, but the result is {result}")
        return result


def _add_times_of_events(run: Run, start: float, arrivals: dict[str, list[tuple[float, int]]]) -> None:
    """Add to `run` the times at which this process received token events."""
    for events in arrivals.values():
        run.first_token.append(events[0][0] - start)
        for (before, _), (now, count) in itertools.pairwise(events):
            run.inter_token += [(now - before) / count] * count
    run.note = ", as read from the streams"


def _add_times_of_results(run: Run, results: list[Result]) -> None:
    """Add to `run` the times that the worker wrote into the results."""
    run.gaps = "mean"
    for result in results:
        first, total = result.timings.first_token_ms, result.timings.total_ms
        if first is None or total is None:
            raise BenchError(f"the result of job {result.id} has no timings")
        run.first_token.append(first / 1000)
        tokens = result.usage.completion_tokens or 0
        if tokens > 1:
            run.inter_token.append((total - first) / 1000 / (tokens - 1))
    run.note = ", as the worker measured it"


@contextlib.contextmanager
def stack(options: list[str]) -> Iterator[Stack]:
    """Run a Redis server with an append-only file and a worker with these options, while the context is open."""
    with contextlib.ExitStack() as exits:
        folder = exits.enter_context(TemporaryDirectory(prefix="tokenmill-bench-"))
        server = exits.enter_context(running_redis(Path(folder)))
        port = free_port()
        address = ("--redis", server.url, "--queue", QUEUE, "--http-port", str(port))
        worker = exits.enter_context(worker_process(*address, *options))
        client = exits.enter_context(command_client(server.url))
        reader = exits.enter_context(blocking_client(server.url, block_ms=1000))
        made = Stack(client, reader, worker, Keys(QUEUE), port)
        eventually(made.answers, timeout=120)
        made.run([Item((7,) * 20, 4)], "warm-up", readers=False)
        yield made
