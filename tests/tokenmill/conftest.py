"""Fixtures: a queue for each test, on fakeredis and on a real server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from tests.strict import strict_scripts
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys

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
