"""The asyncio client behaves as the synchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from producer import AsyncClient, CancelReply, FinalEvent, JobError, JobExists, QueueFull, StartEvent, Status
from tests.support import eventually
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.client.core import entry_of


def run(queue: Queue, scene: Callable[[AsyncClient], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def client() -> AsyncIterator[AsyncClient]:
        async with AsyncClient(queue.url, queue.keys.queue, block_ms=300) as made:
            yield made

    async def main() -> None:
        async with client() as made:
            await asyncio.wait_for(scene(made), 60)

    asyncio.run(main())


def test_submit_stream_text_result(queue: Queue, worker: MiniWorker) -> None:
    async def scene(client: AsyncClient) -> None:
        job = await client.submit("one two", max_tokens=4)
        events = [event async for event in job.stream(timeout=10)]
        assert isinstance(events[0], StartEvent)
        assert isinstance(events[-1], FinalEvent)
        assert [piece async for piece in job.text(timeout=5)] == ["one ", "two "]
        assert (await job.result(timeout=5)).text == "one two "
        assert [event async for event in job.stream(from_id=events[1].id, timeout=5)] == events[2:]

    run(queue, scene)


def test_cancel_delay_refusals_and_deadlines(queue: Queue) -> None:
    async def scene(client: AsyncClient) -> None:
        job = await client.submit("one", id="mine")
        with pytest.raises(JobExists):
            await client.submit("one", id="mine")
        with pytest.raises(JobExists):
            await client.submit_entry(entry_of({"prompt": "one"}, id="mine"), "low", timeout=5)
        assert await job.cancel() is CancelReply.DONE
        assert (await job.result(timeout=5)).status is Status.CANCELLED
        later = await client.submit("one", delay=60)
        assert await later.cancel() is CancelReply.DONE
        with pytest.raises(JobError):
            await client.submit("one", n=0)
        with pytest.raises(ValueError, match="from_id"):
            client.job("unknown").stream(from_id="x")
        with pytest.raises(TimeoutError):
            await client.job("unknown").result(timeout=0.2)
        await client.redis.hset(client.keys.meta, "max_depth", "0")
        with pytest.raises(QueueFull):
            await client.submit("one")

    run(queue, scene)


def test_map_in_order_as_completed_and_left_early(queue: Queue, worker: MiniWorker) -> None:
    async def scene(client: AsyncClient) -> None:
        prompts = [f"w{n}" for n in range(20)]
        assert [r.text async for r in client.map(prompts, window=3, timeout=20)] == [f"{p} " for p in prompts]
        done = {r.text async for r in client.map(prompts, ordered=False, timeout=20)}
        assert done == {f"{p} " for p in prompts}
        async with aclosing(client.map(["x", "HOLD", "HOLD"], window=3, timeout=20)) as results:
            assert (await anext(results)).text == "x "

    run(queue, scene)
    eventually(lambda: queue.depth() == 0)


def test_a_cancelled_wait_leaves_the_client_usable(queue: Queue, worker: MiniWorker) -> None:
    async def scene(client: AsyncClient) -> None:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.job("unknown").result(), 0.05)
        job = await client.submit("one")
        assert (await job.result(timeout=10)).text == "one "

    run(queue, scene)
