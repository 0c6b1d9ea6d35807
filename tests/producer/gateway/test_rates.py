"""Requests and tokens a minute: what is admitted, on fakeredis and on a real server."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import redis

from producer.gateway import rates
from producer.gateway.keys import Caller
from producer.gateway.rates import Charge, Rates, estimate, used
from tests.tokenmill.mini import Queue
from tokenmill import AsyncClient
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.rates import Charged, Wait, charge_call, charge_reply, give_back_call
from tokenmill.protocol.result import Result, Status, Usage

T = TypeVar("T")
SLOTS_PER_SECOND = 4


def run(queue: Queue, work: Callable[[Rates], Awaitable[T]]) -> T:
    async def main() -> T:
        async with AsyncClient(queue.url, queue.keys.queue) as client:
            return await work(Rates(client))

    return asyncio.run(main())


def charge(queue: Queue, requests: int = 1, tokens: int = 0, **limits: int) -> Charged | Wait:
    call = charge_call(queue.keys, "k", requests, tokens, limits.get("rpm"), limits.get("tpm"))
    return charge_reply(Runner(queue.redis).run(*call))


def later(queue: Queue, seconds: float) -> None:
    """Move all charges of the key into the past, as if `seconds` had gone by on Redis' clock."""
    key, by = queue.keys.rate("k"), round(seconds * SLOTS_PER_SECOND)
    held = queue.hash(key)
    queue.redis.delete(key)
    moved = {f"{name[0]}{int(name[1:]) - by}": value for name, value in held.items() if name[1:].isdigit()}
    moved |= {name: held[name] for name in ("requests", "tokens") if name in held}
    if held:
        moved["oldest"] = str(int(held["oldest"]) - by)
        queue.redis.hset(key, mapping=moved)  # type: ignore[arg-type]


def refusal(error: pytest.ExceptionInfo[ApiError]) -> tuple[Any, ...]:
    return error.value.status, error.value.code, error.value.type


def test_a_key_has_its_number_of_requests_a_minute_and_then_waits(queue: Queue) -> None:
    assert [type(charge(queue, rpm=3)) for _ in range(5)] == [Charged, Charged, Charged, Wait, Wait]
    refused = charge(queue, rpm=3)
    assert isinstance(refused, Wait)
    assert refused.limit == "rpm"
    assert 50 < refused.seconds <= 60.25
    later(queue, 45)
    assert isinstance(charge(queue, rpm=3), Wait)
    later(queue, 16)
    assert [type(charge(queue, rpm=3)) for _ in range(4)] == [Charged, Charged, Charged, Wait]


def test_a_refused_request_fits_after_the_wait_and_not_a_second_earlier(queue: Queue) -> None:
    charge(queue, rpm=2)
    later(queue, 20)
    charge(queue, rpm=2)
    refused = charge(queue, rpm=2)
    assert isinstance(refused, Wait)
    later(queue, refused.seconds - 6)
    assert isinstance(charge(queue, rpm=2), Wait)
    later(queue, 6.25)
    assert isinstance(charge(queue, rpm=2), Charged)
    assert isinstance(charge(queue, rpm=2), Wait)


def test_tokens_are_limited_like_requests(queue: Queue) -> None:
    assert isinstance(charge(queue, tokens=60, tpm=100), Charged)
    refused = charge(queue, tokens=41, tpm=100)
    assert isinstance(refused, Wait)
    assert refused.limit == "tpm"
    assert isinstance(charge(queue, tokens=40, tpm=100), Charged)
    later(queue, 61)
    assert isinstance(charge(queue, tokens=100, tpm=100), Charged)


def test_a_request_of_more_tokens_than_the_limit_is_admitted_after_a_minute_without_tokens(queue: Queue) -> None:
    assert isinstance(charge(queue, tokens=1, tpm=100), Charged)
    refused = charge(queue, tokens=500, tpm=100)
    assert isinstance(refused, Wait)
    later(queue, refused.seconds + 0.25)
    assert isinstance(charge(queue, tokens=500, tpm=100), Charged)
    assert isinstance(charge(queue, tokens=1, tpm=100), Wait)


def test_tokens_that_are_given_back_can_be_used_again_but_never_twice(queue: Queue) -> None:
    first = charge(queue, tokens=100, tpm=100)
    assert isinstance(first, Charged)
    assert isinstance(charge(queue, tokens=50, tpm=100), Wait)
    for _ in range(3):
        Runner(queue.redis).run(*give_back_call(queue.keys, "k", first.slot, 90))
    assert queue.hash(queue.keys.rate("k"))["tokens"] == "0"
    charge(queue, tokens=100, tpm=100)
    Runner(queue.redis).run(*give_back_call(queue.keys, "k", first.slot - 500, 90))
    assert queue.hash(queue.keys.rate("k"))["tokens"] == "100"


def test_the_sums_are_those_of_the_last_minute_whatever_is_charged(queue: Queue) -> None:
    dice, rpm, tpm = random.Random(5), 6, 300
    admitted: list[list[float]] = []
    for _ in range(150):
        gone = dice.choice([0, 0, 0.25, 3, 20, 59, 61, 200])
        later(queue, gone)
        admitted = [[age + gone, tokens] for age, tokens in admitted]
        tokens = dice.randrange(0, 200)
        reply = charge(queue, tokens=tokens, rpm=rpm, tpm=tpm)
        if isinstance(reply, Charged):
            admitted.append([0, tokens])
            if dice.random() < 0.3:
                back = dice.randrange(0, tokens + 1)
                Runner(queue.redis).run(*give_back_call(queue.keys, "k", reply.slot, back))
                admitted[-1][1] -= back
        window = [tokens for age, tokens in admitted if age < 55]
        assert len(window) <= rpm
        assert sum(window) <= tpm
        held = queue.hash(queue.keys.rate("k"))
        for kind, total in (("r", "requests"), ("t", "tokens")):
            parts = [int(value) for name, value in held.items() if name[0] == kind and name[1:].isdigit()]
            assert sum(parts) == int(held[total])
            assert min(parts, default=0) >= 0


def test_a_key_that_is_not_used_leaves_nothing_in_redis(queue: Queue) -> None:
    charge(queue, rpm=1)
    assert 0 < queue.redis.ttl(queue.keys.rate("k")) <= 62


def test_a_clock_of_redis_that_is_set_back_a_little_delays_a_key_only_that_much(queue: Queue) -> None:
    charge(queue, rpm=2)
    later(queue, 20)
    charge(queue, rpm=2)
    later(queue, -10)
    refused = charge(queue, rpm=2)
    assert isinstance(refused, Wait)
    assert 40 < refused.seconds <= 60.25
    later(queue, refused.seconds + 0.25)
    assert isinstance(charge(queue, rpm=2), Charged)
    assert isinstance(charge(queue, rpm=2), Wait)
    later(queue, 30)
    assert isinstance(charge(queue, rpm=2), Charged)


@pytest.mark.parametrize("seconds", [61, 3600, 10**7])
def test_charges_of_a_later_time_than_that_of_redis_are_forgotten(queue: Queue, seconds: float) -> None:
    charge(queue, rpm=1)
    later(queue, -seconds)
    assert isinstance(charge(queue, rpm=1), Charged)
    assert isinstance(charge(queue, rpm=1), Wait)


def test_a_clock_of_redis_that_is_set_forward_starts_a_new_minute(queue: Queue) -> None:
    for _ in range(3):
        charge(queue, tokens=5, rpm=3, tpm=100)
    later(queue, 10**7)
    assert [type(charge(queue, rpm=3)) for _ in range(4)] == [Charged, Charged, Charged, Wait]


def test_a_foreign_value_under_the_key_is_replaced(queue: Queue) -> None:
    queue.redis.set(queue.keys.rate("k"), "x")
    assert isinstance(charge(queue, rpm=1), Charged)
    assert isinstance(charge(queue, rpm=1), Wait)


def test_the_answer_is_429_with_a_time_that_clients_obey(queue: Queue) -> None:
    caller = Caller("t", rpm=1, tpm=10, key="k")

    async def work(limits: Rates) -> None:
        await limits.admit(caller, 1)
        for _ in range(2):  # the second refusal needs no Redis
            with pytest.raises(ApiError) as error:
                await limits.admit(caller, 1)
            assert refusal(error) == (429, "rate_limit_exceeded", "rate_limit_error")
            assert 50 < int(error.value.headers["Retry-After"]) <= 60
        with pytest.raises(ApiError, match="10 tokens a minute"):
            await limits.admit(Caller("t", tpm=10, key="k"), 100)

    run(queue, work)


def test_a_client_that_repeats_refused_requests_at_once_does_not_reach_redis(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, tokens = Caller("t", rpm=1, key="r"), Caller("t", tpm=100, key="k")

    async def work(limits: Rates) -> None:
        calls, ask = 0, limits._runner.run

        async def count(*call: Any) -> Any:
            nonlocal calls
            calls += 1
            return await ask(*call)

        monkeypatch.setattr(limits._runner, "run", count)
        first = await limits.admit(tokens, 90)
        await limits.admit(requests, 1)
        frozen = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: frozen)
        for _ in range(20):
            for caller in (requests, tokens):
                with pytest.raises(ApiError):
                    await limits.admit(caller, 50)
        assert calls == 4
        await limits.admit(tokens, 10)
        await limits.settle(first, 0)
        frozen += 1
        await limits.admit(tokens, 50)
        with pytest.raises(ApiError):
            await limits.admit(requests, 1)
        assert calls == 7

    run(queue, work)


def test_a_larger_limit_is_in_force_at_once(queue: Queue) -> None:
    async def work(limits: Rates) -> None:
        await limits.admit(Caller("t", rpm=1, key="k"), 0)
        with pytest.raises(ApiError):
            await limits.admit(Caller("t", rpm=1, key="k"), 0)
        await limits.admit(Caller("t", rpm=2, key="k"), 0)
        await limits.admit(Caller("t", key="k"), 0)

    run(queue, work)


def test_each_key_has_a_rate_of_its_own_even_of_one_tenant(queue: Queue) -> None:
    async def work(limits: Rates) -> None:
        await limits.admit(Caller("t", rpm=1, key="a"), 0)
        await limits.admit(Caller("t", rpm=1, key="b"), 0)
        with pytest.raises(ApiError):
            await limits.admit(Caller("t", rpm=1, key="a"), 0)

    run(queue, work)


def test_a_clock_of_the_gateway_that_jumps_admits_no_further_requests(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, real = Caller("t", rpm=2, key="k"), time.time

    async def work(limits: Rates) -> None:
        admitted = 0
        for jump in (0, 3600, -3600, 61, 10**8):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            limits._refused.clear()
            try:
                await limits.admit(caller, 0)
                admitted += 1
            except ApiError:
                pass
        assert admitted == 2

    run(queue, work)


def test_settling_replaces_the_estimate_by_what_was_used(queue: Queue) -> None:
    caller = Caller("t", tpm=1000, key="k")

    async def work(limits: Rates) -> None:
        low = await limits.admit(caller, 900)
        await limits.settle(low, 100)
        high = await limits.admit(caller, 200)
        await limits.settle(high, 500)
        await limits.settle(Charge(Caller("t", key="k"), 5, None), 500)

    run(queue, work)
    assert queue.hash(queue.keys.rate("k"))["tokens"] == "600"


def test_a_caller_without_limits_costs_redis_nothing(queue: Queue) -> None:
    async def work(limits: Rates) -> Charge:
        made = await limits.admit(Caller(None), 5)
        await limits.settle(made, 50)
        return made

    assert run(queue, work) == Charge(Caller(None), 5, None)
    assert not list(queue.redis.scan_iter(match=queue.keys.rate("*")))


def test_while_redis_is_away_settling_is_logged_and_raises_nothing() -> None:
    async def work() -> None:
        async with AsyncClient("redis://127.0.0.1:1/0") as client:
            limits = Rates(client)
            await limits.settle(Charge(Caller("t", tpm=5, key="k"), 5, 1), 50)
            with pytest.raises(redis.ConnectionError):
                await limits.admit(Caller("t", tpm=5, key="k"), 5)

    asyncio.run(work())


GATEWAY = """
import asyncio, sys, time
from producer.gateway.keys import Caller
from producer.gateway.rates import Rates
from tokenmill import AsyncClient
from tokenmill.openai.errors import ApiError

async def main(url, queue, at):
    async with AsyncClient(url, queue) as client:
        rates, admitted = Rates(client), 0
        async def hammer():
            nonlocal admitted
            for _ in range(40):
                try:
                    await rates.admit(Caller("t", rpm=57, tpm=10000, key="k"), 10)
                    admitted += 1
                except ApiError:
                    rates._refused.clear()
        await client.redis.ping()
        await client.redis.blpop(at, timeout=30)
        await asyncio.gather(*[hammer() for _ in range(5)])
        print(admitted)

asyncio.run(main(*sys.argv[1:]))
"""


def test_four_gateways_together_admit_exactly_the_number_of_a_key(queue: Queue) -> None:
    if not queue.real:
        return  # fakeredis is too slow for processes that compete
    start = queue.keys.rate("start")
    command = [sys.executable, "-c", GATEWAY, queue.url, queue.keys.queue, start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    while queue.redis.info("clients")["blocked_clients"] < 4:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    queue.redis.rpush(start, *range(4))
    counts = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(counts) == 57
    assert queue.hash(queue.keys.rate("k"))["requests"] == "57"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 40, "max_tokens": 5}, 15),
        ({"prompt": "é" * 20, "max_tokens": 5, "n": 3}, 25),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": ["abcd", "abcd"], "max_tokens": 2}, 4),
        ({"input": [[1, 2], [3]]}, 3),
        ({"messages": [{"role": "user", "content": "x" * 400}], "max_completion_tokens": 10, "max_tokens": 99}, 115),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}]}, 107),
        ({"prompt": "", "max_tokens": None, "n": None}, 0),
        ({"prompt": 5.5, "max_tokens": "many", "n": True}, 0),
        ({}, 0),
    ],
)
def test_the_estimate_counts_prompt_and_limit_of_each_choice(body: dict[str, Any], tokens: int) -> None:
    assert estimate(body) == pytest.approx(tokens, abs=1)


def test_the_used_tokens_are_those_of_the_usage() -> None:
    result = Result(id="a", status=Status.SUCCEEDED, usage=Usage(5, 7, 2))
    assert used(result) == 12
    assert used(Result(id="a", status=Status.FAILED)) == 0
    assert used(Result(id="a", status=Status.FAILED, usage=Usage(5, None, None))) == 5


def test_a_longer_retry_after_than_clients_obey_is_not_sent(queue: Queue) -> None:
    error = rates._exceeded(Caller("t", rpm=1), Wait(60.2, "rpm"))
    assert error.headers["Retry-After"] == "60"
