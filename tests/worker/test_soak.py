"""Many small jobs of every kind: memory and every book come back to where they were, and an idle worker is quiet."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from producer.protocol.connection import command_client
from producer.protocol.keys import Keys
from tests.chaos.jobs import LIMITS, make_task
from tests.engine.stub import expect_idle, make_engine
from tests.support import RedisServer, eventually
from tests.worker.harness import Inside, Queue

WINDOW = 60
TTL = 2
"""Seconds that results live, so that Redis' memory can be told to be flat."""


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of lines kept by pytest would look like a leak."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Soak:
    """Feeds a worker and takes measure whenever all is done."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queue = Queue(command_client(server.url), server.url, Keys("soak"))
        self.engine, self.runner = make_engine(**LIMITS)
        self.worker = Inside(
            self.queue,
            self.engine,  # type: ignore[arg-type]
            result_ttl_seconds=str(TTL),
            stream_ttl_seconds=str(TTL),
            cancel_poll_ms="5",
            http_port="0",
        ).start()
        self.sent = 0
        """Since the last rest."""
        self.memory: list[tuple[int, int]] = []
        """At each rest: bytes of this process, bytes of Redis."""

    @property
    def group(self) -> str:
        """Of the jobs since the last rest: they are counted in its hash before that expires."""
        return f"round-{len(self.memory)}"

    def feed(self, count: int) -> None:
        """`count` jobs, a bounded number at a time; one in ten is nonsense, one in five is cancelled."""
        for _ in range(count):
            if self.queue.depth() >= WINDOW:
                eventually(lambda: self.queue.depth() < WINDOW // 2, 60)
            self.sent += 1
            if self.rng.random() < 0.1:
                self.queue.add(self.rng.choice([b"{", b'{"prompt":7}', b'{"prompt":[999]}']), group=self.group)
                continue
            task = make_task(self.rng, self.rng.getrandbits(32))
            fields = {**task.fields, "group": self.group}
            self.queue.add(task.body, task.lane, task.id, **fields)
            if task.cancel_after is not None:
                self.queue.client.set(self.queue.keys.cancel(task.id), "soak", ex=TTL)
            self.runner.plans.clear()

    def rest(self) -> None:
        """Everything is done, expired and given back."""
        keys = self.queue.keys
        eventually(lambda: self.queue.depth() == 0, 60)
        self.worker.at_rest()
        expect_idle(self.engine)
        assert self.worker.worker.telemetry.live.backlog() == 0
        counts = {k.decode(): int(v) for k, v in self.queue.client.hgetall(keys.group(self.group)).items()}
        assert counts.pop("total") == sum(counts.values()) == self.sent
        assert {"succeeded", "failed", "cancelled"} <= set(counts) <= {"succeeded", "failed", "cancelled", "expired"}
        self.sent = 0
        kept = {key.rpartition(b":")[2] for key in eventually(self._few_keys, 30)}
        self.runner.plans.clear()
        gc.collect()
        self.memory.append((resident(), int(self.queue.client.info("memory")["used_memory"])))
        assert len(kept) <= 12, kept

    def _few_keys(self) -> list[bytes] | None:
        """What is left once results and streams have expired: lanes, meta, group, quota, this worker."""
        keys = self.queue.client.keys(f"{self.queue.keys.root}*")
        return keys if len(keys) <= 12 else None


def soak(server: RedisServer, jobs: int, rounds: int, slack: int) -> Soak:
    run = Soak(server, seed=5)
    try:
        for _ in range(rounds):
            run.feed(jobs // rounds)
            run.rest()
    finally:
        run.worker.stop()
    # The first round fills pools and caches; from then on nothing may grow.
    ours, redis = zip(*run.memory[1:], strict=True)
    assert max(ours) - ours[0] < slack, run.memory
    assert max(redis) - redis[0] < 1 << 20, run.memory
    return run


@pytest.mark.redis_server
def test_memory_and_books_are_flat_over_hundreds_of_jobs(own_redis: RedisServer, quiet: None) -> None:
    soak(own_redis, jobs=600, rounds=3, slack=16 << 20)


@pytest.mark.redis_server
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_memory_and_books_are_flat_over_twenty_thousand(own_redis: RedisServer, quiet: None) -> None:
    soak(own_redis, jobs=20_000, rounds=10, slack=24 << 20)


@pytest.mark.redis_server
@pytest.mark.slow
def test_an_idle_worker_is_silent_for_twice_its_longest_socket_timeout(own_redis: RedisServer) -> None:
    queue = Queue(command_client(own_redis.url), own_redis.url, Keys("idle"))
    with structlog.testing.capture_logs() as logs:
        worker = Inside(queue, block_ms="5000").start()
        time.sleep(25)
        assert not worker.worker._contact.errors
        worker.stop()
    assert [entry for entry in logs if entry["log_level"] not in ("info", "debug")] == []
