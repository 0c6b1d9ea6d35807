"""Many small jobs of every kind: memory and the sizes of all containers stay flat, and an idle worker logs nothing."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from tests.chaos.jobs import Task, make_task
from tests.engine.stub import expect_idle
from tests.models.tiny import build
from tests.support import RedisServer, eventually
from tests.worker import container_sizes
from tests.worker.harness import Inside, Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Status

WINDOW = 60
"""Maximum number of jobs in the queue at once."""
TTL = 2
"""Seconds that results are kept, few enough for Redis' memory to become flat."""


@pytest.fixture
def quiet() -> Iterator[None]:
    """Disable the log: thousands of lines kept by pytest would look like a leak."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Soak:
    """Feeds a worker, and measures whenever all jobs have ended."""

    def __init__(self, server: RedisServer, model: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queue = Queue(command_client(server.url), server.url, Keys("soak"))
        self.engine, loaded = build_engine(
            ModelOptions(str(model), device="cpu", dtype="float32", max_model_len=96),
            EngineConfig(max_num_seqs=16, max_num_batched_tokens=64),
            CacheOptions(num_blocks=32, swap_bytes=1 << 18),  # small: there is preemption and swapping
        )
        self.worker = Inside(
            self.queue,
            self.engine,  # type: ignore[arg-type]
            result_ttl_seconds=str(TTL),
            stream_ttl_seconds=str(TTL),
            cancel_poll_ms="5",
            http_port="0",
        )
        self.worker.model = loaded  # type: ignore[assignment]
        self.worker.start()
        self.sent = 0
        self.sizes: list[Counter[str]] = []
        """Sizes of the containers of worker and engine, at each rest."""
        self.memory: list[tuple[int, int]] = []
        """Bytes of this process and of Redis, at each rest."""

    def feed(self, count: int, seconds: float) -> None:
        """Submit `count` jobs over `seconds`, a bounded number at a time; a tenth is invalid, a fifth is cancelled."""
        began = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + seconds * number / count - time.monotonic()))  # the pace of the load
            if self.queue.depth() >= WINDOW:
                eventually(lambda: self.queue.depth() < WINDOW // 2, 60)
            self.sent += 1
            if self.rng.random() < 0.1:
                self.queue.add(self.rng.choice([b"{", b'{"prompt":7}', b'{"prompt":[999]}']), group="soak")
                continue
            task = self._task()
            self.queue.add(task.body, task.lane, task.id, **{**task.fields, "group": "soak"})
            if task.cancel_after is not None:
                self.queue.client.set(self.queue.keys.cancel(task.id), "soak", ex=TTL)

    def _task(self) -> Task:
        task = make_task(self.rng, self.rng.getrandbits(32))
        dice = self.rng.random()
        if dice < 0.1:
            task.params.update(logprobs=True, top_logprobs=2)
        elif dice < 0.15:
            task.params["structured_outputs"] = {"choice": self.rng.sample(["red", "green", "blue", "black"], 3)}
        return task

    def rest(self) -> None:
        """Wait until all jobs have ended and all keys have expired."""
        eventually(lambda: self.queue.depth() == 0, 60)
        self.worker.at_rest()
        expect_idle(self.engine)
        assert self.worker.worker.telemetry.live.backlog() == 0
        eventually(lambda: sum(self.ended()) == self.sent)
        kept = {key.rpartition(b":")[2] for key in eventually(self._few_keys, 30)}
        gc.collect()
        self._check_gauges()
        self.sizes.append(container_sizes.of(self.worker.worker))
        self.memory.append((resident(), int(self.queue.client.info("memory")["used_memory"])))
        assert len(kept) <= 12, kept

    def _check_gauges(self) -> None:
        shown = self._metrics()
        for name in (*(f"num_requests_{state}" for state in ("waiting", "running", "swapped")), "jobs_held"):
            assert shown[f"tokenmill_{name}"] == 0, name
        assert shown["tokenmill_publish_backlog"] == shown["tokenmill_kv_cache_usage_perc"] == 0
        assert shown['tokenmill_kv_blocks{state="used"}'] == 0

    def ended(self) -> list[float]:
        """Return status → number of results written."""
        shown = self._metrics()
        return [shown[f'tokenmill_jobs_ended_total{{status="{status}"}}'] for status in Status]

    def _metrics(self) -> dict[str, float]:
        text = self.worker.worker.telemetry.text().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def _few_keys(self) -> list[bytes] | None:
        """Return the keys that are left once results and streams have expired."""
        keys = self.queue.client.keys(f"{self.queue.keys.root}*")
        return keys if len(keys) <= 12 else None


def soak(server: RedisServer, model: Path, jobs: int, rounds: int, slack: int, seconds: float = 0) -> None:
    run = Soak(server, model, seed=5)
    try:
        for _ in range(rounds):
            run.feed(jobs // rounds, seconds / rounds)
            run.rest()
            print(f"{run.sent} jobs, bytes here and in Redis: {run.memory[-1]}", flush=True)
    finally:
        run.worker.stop()
    assert all(run.ended())
    # The first round fills pools and caches; from then on nothing may grow.
    ours, redis = zip(*run.memory[1:], strict=True)
    assert max(ours) - ours[0] < slack, run.memory
    assert max(redis) - redis[0] < 1 << 20, run.memory
    early, last = run.sizes[: (rounds + 1) // 2], run.sizes[-1]
    grown = {
        path: (known, last[path]) for path in last if last[path] > (known := max(b[path] for b in early)) * 1.1 + 100
    }
    assert not grown


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.mark.redis_server
def test_memory_and_container_sizes_are_flat_over_hundreds_of_jobs(
    own_redis: RedisServer, model: Path, quiet: None
) -> None:
    soak(own_redis, model, jobs=600, rounds=3, slack=16 << 20)


@pytest.mark.redis_server
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_memory_and_container_sizes_are_flat_over_twenty_thousand_jobs(
    own_redis: RedisServer, model: Path, quiet: None
) -> None:
    soak(own_redis, model, jobs=20_000, rounds=10, slack=24 << 20, seconds=1200)


@pytest.mark.redis_server
@pytest.mark.slow
def test_an_idle_worker_logs_no_warning_for_twice_its_longest_socket_timeout(own_redis: RedisServer) -> None:
    queue = Queue(command_client(own_redis.url), own_redis.url, Keys("idle"))
    with structlog.testing.capture_logs() as logs:
        worker = Inside(queue, block_ms="5000").start()
        time.sleep(25)
        assert not worker.worker._contact.errors
        worker.stop()
    assert [entry for entry in logs if entry["log_level"] not in ("info", "debug")] == []
