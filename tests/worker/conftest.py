"""A queue of its own for each test, on fakeredis' TCP server and on a real one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.strict import strict_scripts
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.demo.embedded import embedded_redis

__all__ = ["strict_scripts"]


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with embedded_redis() as url:
        yield url


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.redis_server)])
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    url = request.getfixturevalue("embedded_url" if request.param == "fake" else "redis_server")
    url = url if isinstance(url, str) else url.url
    client = command_client(url)
    yield Queue(client, url, Keys(f"test-{secrets.token_hex(6)}"))
    client.close()
