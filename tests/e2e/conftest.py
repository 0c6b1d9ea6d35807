"""Fixtures: a queue for each test, and worker processes that end with it."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Process, Start
from tests.support import RedisServer
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    yield from queue_on(redis_url)


def queue_on(url: str) -> Iterator[Queue]:
    client = command_client(url)
    yield Queue(client, url, Keys(f"test-{secrets.token_hex(6)}"))
    client.close()


@pytest.fixture
def own(own_redis: RedisServer) -> Iterator[Queue]:
    yield from queue_on(own_redis.url)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers; what still lives at the end is killed."""
    processes: list[Process] = []

    def one(queue: Queue, **options: str) -> Process:
        processes.append(Process(queue.url, queue.keys.queue, tmp_path, **options))
        return processes[-1]

    yield one
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGCONT)
            process.popen.kill()
            process.wait()
