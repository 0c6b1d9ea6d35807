"""The models that live workers serve: the routes of models, and the check before a job is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from producer.gateway.gateway import Gateway
from producer.gateway.workers import LiveWorkers
from tests.producer.gateway.asgi import served
from tests.tokenmill.mini import Queue
from tokenmill import AsyncClient, WaitTimeout
from tokenmill.openai.errors import ApiError

T = TypeVar("T")


def live(queue: Queue, name: str, **fields: str) -> None:
    queue.scripts(name).ensure_consumer()
    queue.redis.hset(queue.keys.worker(name), mapping={"status": "ready"} | fields)  # type: ignore[arg-type]


def run(queue: Queue, work: Callable[[LiveWorkers], Awaitable[T]], worker_timeout: float = 0.3) -> T:
    async def main() -> T:
        async with AsyncClient(queue.url, queue.keys.queue) as client:
            return await work(LiveWorkers(client, worker_timeout))

    return asyncio.run(main())


def require(queue: Queue, model: str | None, *, wait: bool = True) -> None:
    run(queue, lambda workers: workers.require(model, wait=wait))


def code(queue: Queue, model: str | None, *, wait: bool = True) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as error:
        require(queue, model, wait=wait)
    return error.value.status, error.value.code


def test_a_served_model_and_any_model_are_accepted(queue: Queue) -> None:
    live(queue, "a:1:x", model="tiny,org/big")
    for model in (None, "tiny", "org/big"):
        require(queue, model)


def test_a_model_that_no_live_worker_serves_is_unknown(queue: Queue) -> None:
    live(queue, "a:1:x", model="tiny")
    live(queue, "b:1:x", status="starting")
    for model in ("big", "", "tiny,", "TINY", "x" * 100_000, "tiny\nüber"):
        assert code(queue, model) == (404, "model_not_found")
        assert code(queue, model, wait=False) == (404, "model_not_found")


def test_the_model_of_a_worker_is_its_first_name_and_of_an_unknown_worker_that_of_another(queue: Queue) -> None:
    assert run(queue, lambda workers: workers.model_of("a:1:x")) == ""
    live(queue, "a:1:x", model="tiny,also")
    live(queue, "b:1:x", model="big")
    live(queue, "c:1:x", status="starting")
    assert run(queue, lambda workers: workers.model_of("b:1:x")) == "big"
    for name in ("a:1:x", "c:1:x", "gone:1:x"):
        assert run(queue, lambda workers, name=name: workers.model_of(name)) == "tiny"  # type: ignore[misc]


def test_the_error_names_the_served_models_and_is_short(queue: Queue) -> None:
    live(queue, "a:1:x", model="tiny")
    with pytest.raises(ApiError, match="served: tiny") as error:
        require(queue, "x" * 100_000)
    assert len(str(error.value)) < 500
    assert error.value.param == "model"


@pytest.mark.parametrize("status", [None, "starting", "broken"])
def test_without_a_worker_that_serves_a_request_waits_and_a_job_does_not(queue: Queue, status: str | None) -> None:
    if status == "broken":
        live(queue, "a:1:x", model="tiny", status=status)
    elif status is not None:
        live(queue, "a:1:x", status=status)
    assert code(queue, "tiny") == (503, "no_worker")
    assert code(queue, None) == (503, "no_worker")
    require(queue, "tiny", wait=False)
    require(queue, None, wait=False)


def test_a_request_goes_on_once_a_worker_comes(queue: Queue) -> None:
    async def work(workers: LiveWorkers) -> None:
        waiting = [asyncio.create_task(workers.require(model)) for model in ("tiny", None, "big")]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        live(queue, "a:1:x", model="tiny")
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert done[:2] == [None, None]
        assert isinstance(done[2], ApiError)
        assert done[2].status == 404

    run(queue, work, worker_timeout=30)


def test_many_requests_share_one_look_at_redis(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    live(queue, "a:1:x", model="tiny")

    async def work(workers: LiveWorkers) -> int:
        asked, ask = 0, workers._client.workers

        async def count(timeout: float | None = None) -> Any:
            nonlocal asked
            asked += 1
            return await ask(timeout)

        monkeypatch.setattr(workers._client, "workers", count)
        await asyncio.gather(*[workers.require("tiny") for _ in range(200)])
        return asked

    assert run(queue, work) == 1


def test_a_request_that_is_cancelled_while_it_asks_redis_harms_no_other(queue: Queue) -> None:
    live(queue, "a:1:x", model="tiny")

    async def work(workers: LiveWorkers) -> None:
        first = asyncio.create_task(workers.require("tiny"))
        others = [asyncio.create_task(workers.require("tiny")) for _ in range(20)]
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*others) == [None] * 20

    run(queue, work)


def test_while_redis_hangs_many_requests_fail_together_and_not_one_after_the_other(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(workers: LiveWorkers) -> list[Any]:
        asked: list[float | None] = []

        async def hang(timeout: float | None = None) -> Any:
            asked.append(timeout)
            await asyncio.sleep(0.1)
            raise WaitTimeout("no answer")

        monkeypatch.setattr(workers._client, "workers", hang)
        failed = await asyncio.gather(*[workers.require("tiny") for _ in range(200)], return_exceptions=True)
        assert {type(error) for error in failed} == {WaitTimeout}
        return asked

    assert len(run(queue, work)) == 1


def answers(queue: Queue, work: Callable[[Any, Gateway], Awaitable[T]]) -> T:
    async def main() -> T:
        async with served(queue) as (client, gateway):
            return await work(client, gateway)

    return asyncio.run(main())


def test_the_models_are_those_of_all_live_workers(queue: Queue) -> None:
    live(queue, "a:1:x", model="tiny,org/big")
    live(queue, "b:1:x", model="tiny", status="draining")
    live(queue, "c:1:x", model="gone", status="broken")

    async def work(client: Any, gateway: Gateway) -> None:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["org/big", "tiny"]
        one = await client.get("/v1/models/org/big")
        assert one.json() == {"id": "org/big", "object": "model", "created": 0, "owned_by": "tokenmill"}
        assert listed["data"][0] == one.json()
        unknown = await client.get("/v1/models/gone")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")

    answers(queue, work)


def test_a_queue_without_workers_has_no_models(queue: Queue) -> None:
    async def work(client: Any, gateway: Gateway) -> None:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
        assert (await client.get("/readyz")).status_code == 503

    answers(queue, work)


def test_while_redis_is_away_models_get_503_at_once(queue: Queue) -> None:
    async def work(client: Any, gateway: Gateway) -> None:
        gateway.redis.up = False
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_unavailable")
        assert answer.headers["Retry-After"]

    answers(queue, work)
