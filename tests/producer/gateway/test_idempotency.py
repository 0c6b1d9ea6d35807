"""`Idempotency-Key`: the same POST again is the same job; another POST with the same key is refused."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from producer.gateway.gateway import Gateway
from producer.gateway.submit import UNKNOWN
from tests.producer.gateway.asgi import served
from tests.producer.gateway.harness import Answer, GatewayProcess, Stack, get, post, stack
from tests.producer.gateway.streams import CHAT, JOBS, Call, chat, metric, texts_of
from tests.support import RedisServer, eventually
from tests.tokenmill.mini import Queue
from tokenmill.client.patience import WaitTimeout
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys

BODY = {"body": {"prompt": "Hi", "max_tokens": 4}}


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def repeated(gateway: GatewayProcess, path: str, body: Any, key: str, **headers: Any) -> Answer:
    return post(f"{gateway.url}{path}", body, idempotency_key=key, **headers)


def error_code(answer: Answer) -> str:
    return str(answer.json["error"]["code"])


# ── the same request ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_post_of_a_job_is_the_same_job_also_after_its_end(gateway: GatewayProcess, key: str) -> None:
    first = repeated(gateway, JOBS, BODY, key)
    assert first.status == 202
    again = repeated(gateway, JOBS, BODY, key)
    get(f"{gateway.url}{JOBS}/{first.json['id']}?wait=30")
    afterwards = repeated(gateway, JOBS, BODY, key)
    for answer in (again, afterwards):
        assert (answer.status, answer.json) == (202, first.json)
        assert answer.headers["location"] == first.headers["location"]
        assert answer.headers["x-request-id"] == first.json["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_answer_comes_again_without_a_second_job(gateway: GatewayProcess, key: str, stream: bool) -> None:
    body = chat("again", stream=stream)
    first = repeated(gateway, CHAT, body, key)
    begun = int(time.time())
    eventually(lambda: time.time() >= begun + 1)
    again = repeated(gateway, CHAT, body, key)
    assert (first.status, first.body) == (200, again.body)
    assert again.headers["x-request-id"] == first.headers["x-request-id"]


def test_the_same_answer_comes_again_when_no_worker_serves_the_model_any_more(own_stack: Stack, key: str) -> None:
    gateway, worker = own_stack.gateway(worker_timeout="0.5"), own_stack.worker()
    first = repeated(gateway, CHAT, chat("again", model="fake"), key)
    job = repeated(gateway, JOBS, {"body": {**BODY["body"], "model": "fake"}}, key + "j")
    get(f"{gateway.url}{JOBS}/{job.json['id']}?wait=30")
    worker.stop()
    queue = own_stack.queue
    queue.scripts("other").ensure_consumer()
    queue.redis.hset(queue.keys.worker("other"), mapping={"status": "ready", "model": "other"})
    eventually(lambda: [one["id"] for one in get(f"{gateway.url}/v1/models").json["data"]] == ["other"])
    assert repeated(gateway, CHAT, chat("again", model="fake"), key).body == first.body
    assert repeated(gateway, JOBS, {"body": {**BODY["body"], "model": "fake"}}, key + "j").json == job.json
    for path, body in ((CHAT, chat("new", model="fake")), (JOBS, {"body": {**BODY["body"], "model": "fake"}})):
        assert [repeated(gateway, path, body, f"{key}-new").status for _ in range(2)] == [404, 404]


def test_the_same_stream_comes_again_from_its_beginning(gateway: GatewayProcess, key: str) -> None:
    calls = [Call(gateway, CHAT, chat("stream", 60, stream=True), idempotency_key=key) for _ in range(2)]
    streams = [list(call.events()) for call in calls]
    calls.append(Call(gateway, CHAT, chat("stream", 60, stream=True), idempotency_key=key))
    streams.append(list(calls[2].events()))
    assert len({call.header("x-request-id") for call in calls}) == 1
    assert {stream[-1].data for stream in streams} == {"[DONE]"}
    assert len({texts_of(stream) for stream in streams}) == 1


def test_many_equal_posts_at_once_are_one_job(shared_stack: Stack, gateway: GatewayProcess, key: str) -> None:
    calls = [Call(gateway, CHAT, chat("many"), idempotency_key=key) for _ in range(20)]
    calls += [Call(shared_stack.gateway(), CHAT, chat("many"), idempotency_key=key)]
    assert {call.status for call in calls} == {200}
    assert len({call.header("x-request-id") for call in calls}) == 1


def test_a_failed_job_fails_again_without_a_second_job(gateway: GatewayProcess, key: str) -> None:
    body = chat("x" * 300)
    answers = [repeated(gateway, CHAT, body, key) for _ in range(2)]
    assert [answer.status for answer in answers] == [400, 400]
    assert {error_code(answer) for answer in answers} == {"context_length_exceeded"}


def test_the_order_of_the_keys_of_a_body_does_not_matter(gateway: GatewayProcess, key: str) -> None:
    assert repeated(gateway, JOBS, {"body": {"prompt": "Hi", "max_tokens": 4}}, key).status == 202
    assert repeated(gateway, JOBS, {"body": {"max_tokens": 4, "prompt": "Hi"}}, key).status == 202


# ── another request ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("path", "body"), [(JOBS, {"body": {"prompt": "Ho"}}), (CHAT, chat())])
def test_another_request_with_a_used_key_is_refused(gateway: GatewayProcess, key: str, path: str, body: Any) -> None:
    assert repeated(gateway, JOBS, BODY, key).status == 202
    answer = repeated(gateway, path, body, key)
    assert (answer.status, error_code(answer)) == (409, "idempotency_key_reused")
    assert repeated(gateway, JOBS, BODY, key).status == 202


def test_the_idempotency_key_of_a_refused_request_may_be_used_again(
    shared_stack: Stack, gateway: GatewayProcess, key: str
) -> None:
    redis, meta = shared_stack.queue.redis, shared_stack.queue.keys.meta
    assert repeated(gateway, CHAT, chat(temperature=-1), key).status == 400
    assert repeated(gateway, CHAT, chat(model="nope"), key).status == 404
    redis.hset(meta, "max_depth", "0")
    redis.hset(meta, "max_per_tenant", "0")
    try:
        for path, body in ((JOBS, {**BODY, "tenant": "t"}), (CHAT, chat("full"))):
            eventually(lambda path=path, body=body: repeated(gateway, path, body, key).status == 429)  # type: ignore[misc]
    finally:
        redis.hdel(meta, "max_depth", "max_per_tenant")
    assert repeated(gateway, JOBS, BODY, key).status == 202


def test_a_request_that_is_refused_beside_an_equal_one_leaves_the_key_to_the_job_of_that_one(
    redis_server: RedisServer,
) -> None:
    queue = Queue(redis_server.url, command_client(redis_server.url), Keys(f"beside-{secrets.token_hex(6)}"))

    async def test() -> None:
        async with served(queue) as (client, gateway):
            rates: Any = gateway.rates
            admit, reached, refuse = rates.admit, asyncio.Event(), asyncio.Event()

            async def refused(*_: Any) -> Any:
                rates.admit = admit
                reached.set()
                await refuse.wait()
                raise ApiError(429, "a rate is reached")

            rates.admit = refused
            first = asyncio.create_task(client.post(JOBS, json=BODY, headers={"idempotency-key": "k"}))
            await reached.wait()
            made = await client.post(JOBS, json=BODY, headers={"idempotency-key": "k"})
            refuse.set()
            assert ((await first).status_code, made.status_code) == (429, 202)
            again = await client.post(JOBS, json=BODY, headers={"idempotency-key": "k"})
            assert (again.status_code, again.json()) == (202, made.json())

    asyncio.run(test())
    queue.redis.close()


@pytest.mark.parametrize("key", ["", " ", "x" * 256])
def test_a_malformed_key_is_refused(gateway: GatewayProcess, key: str) -> None:
    assert repeated(gateway, JOBS, BODY, key).status == 400


def test_a_key_together_with_an_id_repeats_that_job_and_takes_no_foreign_one(gateway: GatewayProcess, key: str) -> None:
    body = {**BODY, "id": f"own-{key}"}
    assert [repeated(gateway, JOBS, body, key).json["id"] for _ in range(2)] == [f"own-{key}"] * 2
    taken = repeated(gateway, JOBS, body, f"{key}-other")
    assert taken.status == 409
    assert repeated(gateway, JOBS, body, f"{key}-other").status == 409
    assert repeated(gateway, JOBS, BODY, f"{key}-other").status == 202


def test_a_key_whose_job_outlives_its_fingerprint_is_refused(shared_stack: Stack, gateway: GatewayProcess) -> None:
    key = secrets.token_hex(8)
    job_id = repeated(gateway, JOBS, BODY, key).json["id"]
    shared_stack.queue.redis.delete(shared_stack.queue.keys.idempotency(job_id))
    for _ in range(2):
        assert error_code(repeated(gateway, JOBS, BODY, key)) == "idempotency_key_reused"


def test_the_same_key_of_two_tenants_is_two_jobs(redis_server: RedisServer, tmp_path_factory: Any, key: str) -> None:
    with stack(redis_server.url, tmp_path_factory.mktemp("tenants")) as made:
        path, keys = made.keys_file(acme="", umbrella="")
        gateway = made.gateway(api_keys=str(path))
        answers = [repeated(gateway, JOBS, BODY, key, authorization=f"Bearer {one}") for one in keys.values()]
        assert [answer.status for answer in answers] == [202, 202]
        assert answers[0].json["id"] != answers[1].json["id"]
        assert key not in gateway.log


# ── requests without an answer ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def slow(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(redis_server.url, tmp_path_factory.mktemp("slow")) as made:
        made.gateway(wait=False, request_timeout="2")
        made.worker(FAKE_STEP="0.05")
        made.first_gateway.wait_until_it_answers()
        yield made


def test_a_request_whose_client_went_away_gets_a_new_job_under_the_same_key(slow: Stack, key: str) -> None:
    gateway, body = slow.first_gateway, chat("left", 30, stream=True)
    ids = []
    for _ in range(2):
        call = Call(gateway, CHAT, body, idempotency_key=key)
        assert next(call.events())
        ids.append(call.header("x-request-id"))
        call.close()
        eventually(lambda job_id=ids[-1]: get(f"{gateway.url}{JOBS}/{job_id}").json["status"] == "cancelled")  # type: ignore[misc]
    last = Call(gateway, CHAT, body, idempotency_key=key)
    assert list(last.events())[-1].data == "[DONE]"
    ids.append(last.header("x-request-id"))
    assert ids[1:] == [f"{ids[0]}.g2", f"{ids[0]}.g3"]
    again = Call(gateway, CHAT, body, idempotency_key=key)
    assert list(again.events())[-1].data == "[DONE]"
    assert again.header("x-request-id") == ids[2]


def test_a_client_that_comes_back_at_once_is_not_answered_with_the_cancel_of_its_first_try(
    slow: Stack, key: str
) -> None:
    gateway, body = slow.first_gateway, chat("back", 20, stream=True)
    for _ in range(5):
        call = Call(gateway, CHAT, body, idempotency_key=key)
        assert next(call.events())
        call.close()
    last = Call(gateway, CHAT, body, idempotency_key=key)
    assert last.status == 200
    assert list(last.events())[-1].data == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_another_gateway_cancels_for_its_own_client_gets_a_new_job(
    slow: Stack, key: str, stream: bool
) -> None:
    gateway, other, body = slow.first_gateway, slow.gateway(), chat("moved", 20, stream=stream)
    slow.queue.redis.hset(slow.queue.keys.meta, "paused", "1")
    first = Call(gateway, CHAT, body, idempotency_key=key)
    eventually(lambda: slow.queue.redis.zcard(slow.queue.keys.open) == 1)
    second = Call(other, CHAT, body, idempotency_key=key)
    eventually(lambda: metric(other, "requests_in_flight") == 1)
    ids: Any = slow.queue.redis.zrange(slow.queue.keys.open, 0, -1)
    job_id = ids[0].decode()
    first.close()
    eventually(lambda: slow.queue.redis.exists(slow.queue.keys.result(job_id)))
    slow.queue.redis.hdel(slow.queue.keys.meta, "paused")
    assert second.status == 200
    assert str(second.header("x-request-id")).endswith(".g2")
    assert b"length" in second.response.read()
    other.kill()


@pytest.mark.parametrize("params", [{}, {"temperature": 1, "n": 2, "logprobs": True}], ids=["greedy", "sampled"])
def test_a_stream_goes_on_in_a_new_job_when_another_gateway_cancels_its_job_in_mid_text(
    own_stack: Stack, key: str, params: dict[str, Any]
) -> None:
    gateway, other, body = own_stack.gateway(), own_stack.gateway(), chat("moved", 40, stream=True, **params)
    own_stack.worker(FAKE_STEP="0.03", FAKE_DRAW="1")
    first = Call(gateway, CHAT, body, idempotency_key=key)
    second = Call(other, CHAT, body, idempotency_key=key)
    streams = [call.events() for call in (first, second)]
    events = [[next(stream) for _ in range(8)] for stream in streams]
    job_id = first.header("x-request-id")
    assert job_id == second.header("x-request-id")
    first.close()
    seen = [*events[1], *streams[1]]
    assert seen[-1].data == "[DONE]"
    assert get(f"{other.url}{JOBS}/{job_id}").json["status"] == "cancelled"
    renewed = get(f"{other.url}{JOBS}/{job_id}.g2").json
    assert renewed["status"] == "succeeded"
    assert texts_of(seen) == renewed["result"]["choices"][0]["text"]
    assert {event.json["id"] for event in seen[:-1]} == {f"chatcmpl-{job_id}"}


def test_a_request_that_timed_out_gets_a_new_job_under_the_same_key(slow: Stack, key: str) -> None:
    gateway, body = slow.first_gateway, chat("late", 200)
    answers = [repeated(gateway, CHAT, body, key) for _ in range(2)]
    assert [answer.status for answer in answers] == [504, 504]
    assert answers[1].headers["x-request-id"] == f"{answers[0].headers['x-request-id']}.g2"


# ── a submit without an answer ────────────────────────────────────────────────────────────────────────────────────────


async def lose_answers(gateway: Gateway) -> None:
    """Let every submit be carried out and raise as if Redis had not answered."""
    submit_entry: Any = gateway.client.submit_entry

    async def submit(*args: Any, **options: Any) -> Any:
        await submit_entry(*args, **options)
        raise WaitTimeout("no answer")

    gateway.client.submit_entry = submit  # type: ignore[method-assign]
    gateway.workers.require = _any_model  # type: ignore[method-assign]
    gateway.workers.models = _models  # type: ignore[method-assign]


async def _any_model(*_: Any, **__: Any) -> None: ...


async def _models() -> list[str]:
    return ["fake"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "kept"),
    [
        (CHAT, chat(), {}, False),
        (CHAT, chat(stream=True), {}, False),
        (JOBS, BODY, {}, False),
        (CHAT, chat(), {"idempotency-key": "k"}, True),
        (JOBS, BODY, {"idempotency-key": "k"}, True),
        (JOBS, {**BODY, "id": "own"}, {}, True),
    ],
)
def test_a_job_whose_submit_had_no_answer_is_cancelled_unless_its_client_can_find_it_again(
    redis_server: RedisServer, path: str, body: Any, headers: dict[str, str], kept: bool
) -> None:
    queue = Queue(redis_server.url, command_client(redis_server.url), Keys(f"lost-{secrets.token_hex(6)}"))

    async def test() -> None:
        async with served(queue) as (client, gateway):
            await lose_answers(gateway)
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "redis_unavailable"
            assert "retry-after" in answer.headers

    asyncio.run(test())
    results = list(queue.redis.scan_iter(queue.keys.result("*")))
    assert len(results) == (0 if kept else 1)
    assert queue.redis.zcard(queue.keys.open) == (1 if kept else 0)
    if results:
        raw = queue.redis.get(results[0])
        assert raw is not None
        assert UNKNOWN.encode() in bytes(raw)  # type: ignore[arg-type]
    queue.redis.close()
