"""Fixtures: the processes of a gateway, for one test or for those of a file, and clients of the `openai` package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.producer.gateway.harness import GatewayProcess, Stack, async_client_of, client_of, stack
from tests.producer.gateway.sockets import Served
from tests.support import RedisServer


@pytest.fixture
def own_stack(own_redis: RedisServer, tmp_path: Path) -> Iterator[Stack]:
    """A Redis server and a queue for one test, which may kill anything; it starts what it needs."""
    with stack(own_redis.url, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_stack(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway, a worker and a clerk that all tests of a file share."""
    with stack(redis_server.url, tmp_path_factory.mktemp("stack")) as made:
        made.clerk()
        made.gateway(wait=False)
        made.worker(FAKE_STEP="0.02", max_num_seqs="16")
        made.first_gateway.wait_until_it_answers()
        yield made


@pytest.fixture
def gateway(shared_stack: Stack) -> GatewayProcess:
    return shared_stack.first_gateway


@pytest.fixture
def openai_client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def async_openai_client(gateway: GatewayProcess) -> openai.AsyncOpenAI:
    """Use it within one `asyncio.run`."""
    return async_client_of(gateway)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway with small limits that all tests of a file share."""
    made = Served(tmp_path_factory.mktemp("served"), header_timeout="2", body_timeout="2", max_body_bytes="64KiB")
    yield made.wait()
    made.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    """Starts gateways for one test; arguments as those of `Served`."""
    made: list[Served] = []

    def start(**options: Any) -> Served:
        made.append(Served(tmp_path, **options))
        return made[-1].wait()

    yield start
    for one in made:
        one.close()
