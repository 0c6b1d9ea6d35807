"""Streams and waits while workers and Redis die and the gateway shuts down."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.producer.gateway.harness import GatewayProcess, Stack, get, post
from tests.producer.gateway.streams import CHAT, JOBS, Call, chat, texts_of
from tests.support import RedisServer, eventually

TOKENS = 60
"""Tokens of a job that takes three seconds on a worker that takes 50 ms for each."""
STEP = "0.05"


def expected(gateway: GatewayProcess, text: str) -> str:
    """The whole text of a chat, without a stream."""
    answer = post(f"{gateway.url}{CHAT}", chat(text, TOKENS))
    assert answer.status == 200
    return str(answer.json["choices"][0]["message"]["content"])


def test_a_stream_goes_on_seamlessly_on_another_worker_when_its_own_is_killed(own_stack: Stack) -> None:
    gateway, first = own_stack.gateway(), own_stack.worker(FAKE_STEP=STEP)
    call = Call(gateway, CHAT, chat("same", TOKENS, stream=True))
    stream = call.events()
    events = [next(stream) for _ in range(8)]
    first.kill()
    own_stack.worker(FAKE_STEP="0.005")
    events += stream
    assert events[-1].data == "[DONE]"
    assert texts_of(events) == expected(gateway, "same")


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": 7}], ids=["none", "null", "given"])
def test_a_sampled_stream_goes_on_with_the_same_text_on_another_worker(own_stack: Stack, seed: dict[str, Any]) -> None:
    gateway, first = own_stack.gateway(), own_stack.worker(FAKE_STEP=STEP, FAKE_DRAW="1")
    call = Call(gateway, CHAT, chat("drawn", TOKENS, n=2, temperature=1, stream=True, **seed))
    stream = call.events()
    events = [next(stream) for _ in range(8)]
    first.kill()
    own_stack.worker(FAKE_STEP="0.005", FAKE_DRAW="1")
    events += stream
    assert events[-1].data == "[DONE]"
    job = get(f"{gateway.url}{JOBS}/{call.header('x-request-id')}").json
    assert job["result"]["attempt"] == 2
    assert texts_of(events) == job["result"]["choices"][0]["text"]


def test_sampled_requests_without_a_seed_differ(own_stack: Stack) -> None:
    gateway = own_stack.gateway()
    own_stack.worker(FAKE_DRAW="1")

    def answers(**params: Any) -> set[str]:
        made = [post(f"{gateway.url}{CHAT}", chat("equal", **params)).json for _ in range(8)]
        return {one["choices"][0]["message"]["content"] for one in made}

    assert len(answers(temperature=1)) > 1
    assert len(answers(temperature=1, seed=5)) == len(answers(temperature=0)) == 1


def test_a_stream_ends_with_an_error_where_the_text_of_another_worker_differs(own_stack: Stack) -> None:
    gateway, first = own_stack.gateway(), own_stack.worker(FAKE_STEP=STEP)
    call = Call(gateway, CHAT, chat("other", TOKENS, stream=True))
    stream = call.events()
    events = [next(stream) for _ in range(8)]
    job_id = call.header("x-request-id")
    first.kill()
    own_stack.worker(FAKE_STEP=STEP, FAKE_SHIFT="1")
    events += stream
    assert events[-1].json["error"]["code"] == "text_restarted"
    sent = texts_of(events)
    assert sent
    job = get(f"{gateway.url}{JOBS}/{job_id}?wait=30").json
    assert job["status"] == "cancelled"
    assert not job["result"]["choices"][0]["text"].startswith(sent)


def test_streams_and_waits_outlive_a_restart_of_redis(own_stack: Stack, own_redis: RedisServer) -> None:
    gateway = own_stack.gateway()
    own_stack.worker(FAKE_STEP=STEP)
    text = expected(gateway, "redis")
    call, waiting = Call(gateway, CHAT, chat("redis", TOKENS, stream=True)), Call(gateway, CHAT, chat("redis", TOKENS))
    stream = call.events()
    events = [next(stream) for _ in range(8)]
    own_redis.kill()
    answer = eventually(lambda: refused(gateway))
    assert answer.json["error"]["code"] == "redis_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    own_redis.start()
    events += stream
    assert events[-1].data == "[DONE]"
    assert texts_of(events) == text
    assert waiting.status == 200
    assert waiting.json["choices"][0]["message"]["content"] == text


def refused(gateway: GatewayProcess) -> Any:
    """The answer 503 to a request; None for another answer."""
    answer = post(f"{gateway.url}{CHAT}", chat())
    return answer if answer.status == 503 else None


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("POST", JOBS), ("GET", f"{JOBS}/x"), ("GET", f"{JOBS}/x/events"), ("POST", f"{JOBS}/x/cancel")],
)
def test_every_request_gets_503_while_redis_does_not_answer(
    own_stack: Stack, own_redis: RedisServer, method: str, path: str
) -> None:
    gateway = own_stack.gateway()
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    body = {"body": {"prompt": "Hi"}} if path == JOBS else chat()
    for _ in range(3):  # before and after the gateway notices
        answer = post(f"{gateway.url}{path}", body) if method == "POST" else get(f"{gateway.url}{path}")
        assert answer.status == 503
        assert answer.json["error"]["code"] == "redis_unavailable"
        assert "retry-after" in answer.headers
    own_redis.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("command", ["evalsha", "get"])
def test_a_redis_that_denies_a_command_gives_503_and_an_error_in_the_log(own_stack: Stack, command: str) -> None:
    gateway = own_stack.gateway()
    server: Any = own_stack.queue.redis
    server.execute_command("ACL", "SETUSER", "default", f"-{command}")
    answers = [
        post(f"{gateway.url}{JOBS}", {"body": {"prompt": "Hi"}}),
        get(f"{gateway.url}{JOBS}/x"),
        get(f"{gateway.url}/v1/models"),
    ]
    server.execute_command("ACL", "SETUSER", "default", f"+{command}")
    refused = [answer for answer in answers if answer.status >= 400 and answer.json["error"]["code"] != "not_found"]
    assert refused
    for answer in refused:
        assert (answer.status, answer.json["error"]["code"]) == (503, "redis_unavailable")
        assert "retry-after" in answer.headers
    assert "redis_refuses" in gateway.log
    assert "Traceback" not in gateway.log


def test_a_drain_lets_streams_and_waits_end_by_themselves(own_stack: Stack) -> None:
    gateway = own_stack.gateway(drain_seconds="30")
    own_stack.worker(FAKE_STEP=STEP)
    call, waiting = Call(gateway, CHAT, chat(max_tokens=TOKENS, stream=True)), Call(gateway, CHAT, chat("w", TOKENS))
    stream = call.events()
    events = [next(stream) for _ in range(3)]
    gateway.terminate()
    events += stream
    assert events[-1].data == "[DONE]"
    assert events[-2].json["choices"][0]["finish_reason"] == "length"
    assert waiting.status == 200
    assert gateway.popen.wait(40) == 0


def test_the_end_of_a_drain_leaves_the_jobs_in_the_queue(own_stack: Stack) -> None:
    gateway, other = own_stack.gateway(drain_seconds="0.3"), own_stack.gateway()
    own_stack.worker(FAKE_STEP=STEP)
    call, waiting = Call(gateway, CHAT, chat(max_tokens=TOKENS, stream=True)), Call(gateway, CHAT, chat("w", TOKENS))
    stream = call.events()
    events = [next(stream) for _ in range(3)]
    gateway.terminate()
    events += stream
    assert events[-1].json["error"]["code"] == "shutting_down"
    assert (waiting.status, waiting.header("retry-after")) == (503, "1")
    assert waiting.json["error"]["code"] == "shutting_down"
    assert gateway.popen.wait(40) == 0
    for one in (call, waiting):
        job = get(f"{other.url}{JOBS}/{one.header('x-request-id')}?wait=30").json
        assert job["status"] == "succeeded"
        assert job["result"]["usage"]["completion_tokens"] == TOKENS


def test_a_job_that_redis_loses_ends_its_stream_and_its_wait(own_stack: Stack) -> None:
    gateway = own_stack.gateway()
    worker = own_stack.worker(FAKE_STEP=STEP)
    call, waiting = Call(gateway, CHAT, chat(max_tokens=TOKENS, stream=True)), Call(gateway, CHAT, chat("w", TOKENS))
    stream = call.events()
    events = [next(stream) for _ in range(3)]
    worker.kill()
    own_stack.queue.redis.flushall()
    events += stream
    assert events[-1].json["error"]["code"] == "job_lost"
    assert waiting.status == 503
    assert waiting.json["error"]["code"] == "job_lost"
