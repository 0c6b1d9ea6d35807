"""What ends a wait, and when a job that lost its clients is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from producer.gateway.inflight import Claim, End, InFlight, Interrupted
from tokenmill.client.handles import AsyncJob


class Client:
    """The ASGI channel of a client that stays until `leave`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent_rest = False

    async def receive(self) -> dict[str, Any]:
        if not self.sent_rest:
            self.sent_rest = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Job:
    """Records the cancels of a job; `answer` lets them end."""

    def __init__(self) -> None:
        self.id = "a"
        self.reasons: list[str] = []
        self.answer = asyncio.Event()

    async def cancel(self, reason: str, **_: Any) -> Any:
        self.reasons.append(reason)
        await self.answer.wait()
        return End.GONE  # has a `value`, as a reply


def as_job(job: Job) -> AsyncJob:
    made: Any = job
    return made  # type: ignore[no-any-return]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_a_wait_is_interrupted_when_its_client_goes_away() -> None:
    async def test() -> None:
        client = Client()
        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        with pytest.raises(Interrupted) as caught:
            async with InFlight(asyncio.Event()).watch(client.receive):
                await asyncio.Event().wait()
        assert caught.value.end is End.GONE

    run(test())


def test_all_waits_are_interrupted_at_the_deadline_of_a_shutdown_and_later_waits_at_once() -> None:
    async def test() -> None:
        deadline = asyncio.Event()
        inflight = InFlight(deadline)

        async def wait() -> End:
            try:
                async with inflight.watch(Client().receive):
                    await asyncio.Event().wait()
            except Interrupted as interrupted:
                return interrupted.end
            raise AssertionError("not interrupted")

        waits = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0.01)
        deadline.set()
        assert await asyncio.gather(*waits, wait()) == [End.CLOSING] * 4
        await inflight.close()

    run(test())


def test_a_wait_that_ends_first_is_not_interrupted_and_its_own_time_out_passes_through() -> None:
    async def test() -> None:
        inflight, client = InFlight(asyncio.Event()), Client()
        async with inflight.watch(client.receive) as watch:
            pass
        watch.end(End.GONE)  # too late
        with pytest.raises(TimeoutError):
            async with inflight.watch(Client().receive):
                raise TimeoutError
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(test())


def test_a_wait_is_interrupted_though_a_library_swallows_the_first_cancel() -> None:
    async def test() -> None:
        client = Client()
        client.gone.set()

        async def swallow() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        with pytest.raises(Interrupted):
            async with InFlight(asyncio.Event()).watch(client.receive):
                await swallow()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(test())


def test_a_wait_ends_after_its_time_out() -> None:
    async def test() -> None:
        with pytest.raises(Interrupted) as caught:
            async with InFlight(asyncio.Event()).watch(Client().receive, 0.01):
                await asyncio.Event().wait()
        assert caught.value.end is End.TIMED_OUT

    run(test())


def test_a_cancel_of_the_task_is_not_taken_for_an_interruption() -> None:
    async def test() -> None:
        async def wait() -> None:
            async with InFlight(asyncio.Event()).watch(Client().receive):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test())


def test_a_job_is_cancelled_only_when_its_last_client_goes_away() -> None:
    async def test() -> None:
        inflight, job = InFlight(asyncio.Event()), Job()
        job.answer.set()
        first, second = await inflight.claim("a"), await inflight.claim("a")
        assert not first.abandon(as_job(job), "client disconnected", 5)
        assert not first.abandon(as_job(job), "client disconnected", 5)
        assert second.abandon(as_job(job), "client disconnected", 5)
        await inflight.close()
        assert job.reasons == ["client disconnected"]

    run(test())


def test_a_client_that_has_its_answer_leaves_the_job_alone() -> None:
    async def test() -> None:
        inflight, job = InFlight(asyncio.Event()), Job()
        claim = await inflight.claim("a")
        claim.release()
        assert not claim.abandon(as_job(job), "client disconnected", 5)
        await inflight.close()
        assert job.reasons == []

    run(test())


def test_a_new_client_of_a_job_waits_for_the_cancel_of_the_job_that_is_under_way() -> None:
    async def test() -> None:
        inflight, job = InFlight(asyncio.Event()), Job()
        (await inflight.claim("a")).abandon(as_job(job), "client disconnected", 5)
        joining: asyncio.Task[Claim] = asyncio.create_task(inflight.claim("a"))
        await asyncio.sleep(0.05)
        assert not joining.done()
        job.answer.set()
        (await joining).release()
        assert not inflight._claims

    run(test())


def test_a_client_that_goes_away_while_it_waits_for_a_cancel_leaves_no_claim() -> None:
    async def test() -> None:
        inflight, job = InFlight(asyncio.Event()), Job()
        (await inflight.claim("a")).abandon(as_job(job), "client disconnected", 5)
        joining = asyncio.create_task(inflight.claim("a"))
        await asyncio.sleep(0.01)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert not inflight._claims
        job.answer.set()
        await inflight.close()

    run(test())
