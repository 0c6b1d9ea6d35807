"""Clients are built with our own time-outs, protocol and retries, whatever redis-py's defaults or the URL say."""

from __future__ import annotations

import time

import pytest

from tests.tokenmill.mini import Queue
from tokenmill.protocol.connection import async_client, blocking_client, command_client, redact

ODD = "redis://127.0.0.1:1/0?socket_timeout=1&protocol=3&decode_responses=yes"


@pytest.mark.parametrize("block_ms", [100, 5000, 60_000])
def test_a_blocking_client_outwaits_its_block_and_never_retries(block_ms: int) -> None:
    for client in (blocking_client(ODD, block_ms), async_client(ODD, block_ms)):
        settings = client.connection_pool.connection_kwargs
        assert settings["socket_timeout"] >= block_ms / 1000 + 1
        assert settings["retry"].get_retries() == 0
        assert (settings["protocol"], settings["decode_responses"]) == (2, False)


def test_a_command_client_has_finite_patience() -> None:
    for client in (command_client(ODD), async_client(ODD)):
        settings = client.connection_pool.connection_kwargs
        assert 1 < settings["socket_timeout"] < 60
        assert 0 < settings["socket_connect_timeout"] < 60
        assert 0 < settings["retry"].get_retries() <= 5
        assert settings["protocol"] == 2
    assert command_client(ODD, retries=0).connection_pool.connection_kwargs["retry"].get_retries() == 0


def test_an_idle_blocking_read_ends_quietly_at_its_time(queue: Queue) -> None:
    client = blocking_client(queue.url, 6000)
    begin = time.monotonic()
    assert not client.xread({queue.keys.out("nobody"): "0"}, block=5500)
    assert 5.3 < time.monotonic() - begin < 9
    client.close()


def test_a_logged_url_holds_no_secret() -> None:
    assert redact("redis://user:secret@host:6379/0?password=secret") == "redis://user:***@host:6379/0"
    assert redact("redis://:secret@host") == "redis://:***@host"
    assert redact("redis://host:1/2?x=secret") == "redis://host:1/2"
    assert redact("unix:///tmp/redis.sock") == "unix:///tmp/redis.sock"
