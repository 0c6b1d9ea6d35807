"""Clients are built with our own time-outs, protocol and retries, whatever redis-py's defaults or the URL say."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support import running_redis
from tests.tokenmill.mini import Queue
from tokenmill.protocol.connection import async_client, blocking_client, command_client, redact

ODD = "redis://127.0.0.1:1/0?socket_timeout=1&protocol=3&decode_responses=yes"


@pytest.mark.parametrize("block_ms", [100, 5000, 60_000])
def test_a_blocking_client_waits_longer_than_its_block_and_never_retries(block_ms: int) -> None:
    for client in (blocking_client(ODD, block_ms), async_client(ODD, block_ms)):
        settings = client.connection_pool.connection_kwargs
        assert settings["socket_timeout"] >= block_ms / 1000 + 1
        assert settings["retry"].get_retries() == 0
        assert (settings["protocol"], settings["decode_responses"]) == (2, False)


def test_a_command_client_has_finite_timeouts_and_retries() -> None:
    for client in (command_client(ODD), async_client(ODD)):
        settings = client.connection_pool.connection_kwargs
        assert 1 < settings["socket_timeout"] < 60
        assert 0 < settings["socket_connect_timeout"] < 60
        assert 0 < settings["retry"].get_retries() <= 5
        assert settings["protocol"] == 2
    assert command_client(ODD, retries=0).connection_pool.connection_kwargs["retry"].get_retries() == 0


def test_a_blocking_read_without_entries_ends_at_its_time_without_error(queue: Queue) -> None:
    client = blocking_client(queue.url, 6000)
    begin = time.monotonic()
    assert not client.xread({queue.keys.out("nobody"): "0"}, block=5500)
    assert 5.3 < time.monotonic() - begin < 9
    client.close()


def test_a_redacted_url_contains_no_password() -> None:
    assert redact("redis://user:secret@host:6379/0?password=secret") == "redis://user:***@host:6379/0"
    assert redact("redis://:secret@host") == "redis://:***@host"
    assert redact("redis://host:1/2?x=secret") == "redis://host:1/2"
    assert redact("unix:///tmp/redis.sock") == "unix:///tmp/redis.sock"


@pytest.mark.redis_server
def test_every_client_works_over_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with running_redis(tmp_path, "--unixsocket", str(socket)):
        url = f"unix://{socket}?db=1"
        for client in (command_client(url), blocking_client(url, 100)):
            with client:
                assert client.ping()
        assert asyncio.run(_ping(url)) == [True, True]


async def _ping(url: str) -> list[bool]:
    replies = []
    for client in (async_client(url), async_client(url, 100)):
        async with client:
            replies.append(bool(await client.ping()))
    return replies
