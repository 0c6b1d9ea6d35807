"""Fixtures: a queue for each test, on fakeredis and on a real server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.strict import strict_scripts
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys

__all__ = ["strict_scripts"]


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    client = command_client(redis_url)
    yield Queue(client, redis_url, Keys(f"test-{secrets.token_hex(6)}"))
    client.close()
