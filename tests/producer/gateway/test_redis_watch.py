"""Redis counts as away when it does not answer, however busy the gateway is."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from producer.gateway.redis_watch import RedisWatch
from tests.support import RedisServer

pytestmark = pytest.mark.redis_server


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[RedisWatch]:
    watch = RedisWatch(url)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.1)
    try:
        yield watch
    finally:
        task.cancel()
        watch.close()


def test_a_busy_event_loop_does_not_make_redis_away(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with watching(redis_server.url) as watch:
            for _ in range(4):
                async with watch.limit():
                    time.sleep(1.2)
                    await asyncio.sleep(0)
                assert watch.up

    asyncio.run(main())


@pytest.mark.parametrize("freeze", [False, True], ids=["killed", "frozen"])
def test_what_waits_for_redis_ends_when_redis_goes_away_and_what_comes_later_at_once(
    own_redis: RedisServer, freeze: bool
) -> None:
    async def main() -> None:
        async with watching(own_redis.url) as watch:
            process = own_redis.process
            assert process is not None
            process.send_signal(signal.SIGSTOP) if freeze else own_redis.kill()
            with pytest.raises(TimeoutError):
                async with watch.limit():
                    await asyncio.Event().wait()
            assert not watch.up
            with pytest.raises(TimeoutError):
                async with watch.limit():
                    raise AssertionError("the block began")
            process.send_signal(signal.SIGCONT) if freeze else own_redis.start()
            while not watch.up:
                await asyncio.sleep(0.1)
            async with watch.limit():
                pass

    asyncio.run(main())
