"""A queue of its own for each test, on both servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from producer.client import Client
from producer.protocol.connection import command_client
from producer.protocol.keys import Keys
from tests.producer.mini import MiniWorker, Queue
from tests.strict import strict_scripts

__all__ = ["strict_scripts"]


@pytest.fixture
def queue(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Queue]:
    client = command_client(redis_url)
    real = request.node.callspec.params["redis_url"] == "real"
    yield Queue(redis_url, client, Keys(f"q{secrets.token_hex(6)}"), real)
    client.close()


@pytest.fixture
def server(queue: Queue) -> redis.Redis:
    return queue.redis


@pytest.fixture
def client(queue: Queue) -> Iterator[Client]:
    with Client(queue.url, queue.keys.queue, block_ms=300) as made:
        yield made


@pytest.fixture
def worker(queue: Queue) -> Iterator[MiniWorker]:
    made = MiniWorker(queue)
    made.start()
    yield made
    made.stop()
