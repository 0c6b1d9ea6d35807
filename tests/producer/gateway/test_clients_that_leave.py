"""A client that goes away or waits too long cancels its job; other clients and other jobs keep theirs."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.producer.gateway.harness import HOST, GatewayProcess, Stack, get, post, stack
from tests.producer.gateway.streams import CHAT, JOBS, Call, chat, metric
from tests.support import RedisServer, eventually

LONG = 240
"""Tokens of a job that takes twelve seconds."""


@pytest.fixture(scope="module")
def slow(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway, and a worker that takes 50 ms for a token."""
    with stack(redis_server.url, tmp_path_factory.mktemp("slow")) as made:
        made.gateway(wait=False)
        made.worker(FAKE_STEP="0.05")
        made.first_gateway.wait_until_it_answers()
        yield made


@pytest.fixture
def paused(slow: Stack) -> Iterator[Stack]:
    """The same while the queue is paused: jobs stay in their lanes."""
    slow.queue.redis.hset(slow.queue.keys.meta, "paused", "1")
    yield slow
    slow.queue.redis.hdel(slow.queue.keys.meta, "paused")


def jobs_of(made: Stack) -> list[str]:
    """Ids of all jobs without a result."""
    ids: Any = made.queue.redis.zrange(made.queue.keys.open, 0, -1)
    return [raw.decode() for raw in ids]


def only_job(made: Stack) -> str:
    return eventually(lambda: jobs_of(made))[0]


def running(made: Stack, job_id: str) -> bool:
    return bool(made.queue.redis.hget(made.queue.keys.job(job_id), "state") == b"running")


def result_of(gateway: GatewayProcess, job_id: str) -> dict[str, Any]:
    return dict(get(f"{gateway.url}{JOBS}/{job_id}?wait=60").json["result"])


def check_cancelled(made: Stack, job_id: str, reason: str = "client disconnected") -> None:
    result = result_of(made.first_gateway, job_id)
    assert (result["status"], result["cancel_reason"]) == ("cancelled", reason)
    used = result["usage"]["completion_tokens"] or 0
    assert used < LONG
    assert jobs_of(made) == []


def test_a_client_that_goes_away_while_streaming_cancels_its_job(slow: Stack) -> None:
    call = Call(slow.first_gateway, CHAT, chat(max_tokens=LONG, stream=True))
    events = call.events()
    assert [next(events) for _ in range(3)]
    job_id = call.header("x-request-id")
    assert job_id is not None
    call.close()
    check_cancelled(slow, job_id)


def test_a_client_that_goes_away_before_the_answer_cancels_its_job(slow: Stack) -> None:
    call = Call(slow.first_gateway, CHAT, chat(max_tokens=LONG))
    job_id = only_job(slow)
    eventually(lambda: running(slow, job_id))
    call.close()
    check_cancelled(slow, job_id)


@pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
@pytest.mark.parametrize("behind", [b"\r\n", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_client_that_goes_away_cancels_its_job_even_if_it_sent_bytes_that_nothing_reads(
    slow: Stack, behind: bytes, half: bool
) -> None:
    gateway, body = slow.first_gateway, json.dumps(chat(max_tokens=LONG)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((HOST, gateway.port)) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        job_id = only_job(slow)
        eventually(lambda: running(slow, job_id))
        sock.sendall(behind)
        if half:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
        check_cancelled(slow, job_id)
        eventually(lambda: metric(gateway, "requests_in_flight") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_while_its_job_is_queued_cancels_it(paused: Stack, stream: bool) -> None:
    call = Call(paused.first_gateway, CHAT, chat(max_tokens=LONG, stream=stream))
    job_id = only_job(paused)
    call.close()
    check_cancelled(paused, job_id)


def test_a_client_that_goes_away_from_a_job_of_the_queue_leaves_it_alone(slow: Stack) -> None:
    gateway = slow.first_gateway
    job_id = post(f"{gateway.url}{JOBS}", {"body": {"prompt": "Hi", "max_tokens": 40}}).json["id"]
    events = Call(gateway, f"{JOBS}/{job_id}/events")
    assert next(events.events()).name == "start"
    waits = Call(gateway, f"{JOBS}/{job_id}?wait=60")
    events.close()
    waits.close()
    assert result_of(gateway, job_id)["status"] == "succeeded"


def test_a_client_that_goes_away_while_it_waits_for_a_worker_leaves_nothing_in_the_queue(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with stack(redis_server.url, tmp_path_factory.mktemp("idle")) as made:
        gateway = made.gateway(worker_timeout="30")
        call = Call(gateway, CHAT, chat())
        eventually(lambda: metric(gateway, "requests_in_flight") == 1)
        call.close()
        eventually(lambda: metric(gateway, "requests_in_flight") == 0)
        made.worker()
        assert post(f"{gateway.url}{CHAT}", chat()).status == 200
        assert sum(made.queue.redis.xlen(lane) for lane in made.queue.keys.lanes) == 0
        assert '"status": 499' in gateway.log


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_times_out_gets_504_and_its_job_is_cancelled(paused: Stack, stream: bool) -> None:
    impatient = paused.gateway(request_timeout="0.5")
    answer = post(f"{impatient.url}{CHAT}", chat(max_tokens=LONG, stream=stream))
    assert answer.status == 504
    assert answer.json["error"]["code"] == "timeout"
    check_cancelled(paused, answer.headers["x-request-id"], "request timed out")
    impatient.kill()


def test_a_stream_may_take_longer_than_the_time_out_of_a_request(slow: Stack) -> None:
    impatient = slow.gateway(request_timeout="1")
    call = Call(impatient, CHAT, chat(max_tokens=40, stream=True))
    events = list(call.events())
    assert events[-1].data == "[DONE]"
    assert events[-2].json["choices"][0]["finish_reason"] == "length"
    impatient.kill()


def test_a_job_that_two_clients_wait_for_is_cancelled_when_both_have_gone(slow: Stack) -> None:
    gateway, body = slow.first_gateway, chat("two", max_tokens=LONG, stream=True)
    first = Call(gateway, CHAT, body, idempotency_key="two")
    second = Call(gateway, CHAT, body, idempotency_key="two")
    read = [next(call.events()) for call in (first, second)]
    assert read[0] == read[1]
    job_id = first.header("x-request-id")
    assert job_id is not None
    assert job_id == second.header("x-request-id")
    first.close()
    events = second.events()
    assert len([next(events) for _ in range(20)]) == 20
    assert running(slow, job_id)
    second.close()
    check_cancelled(slow, job_id)


def test_cancels_by_clients_that_went_away_are_counted(slow: Stack) -> None:
    gateway = slow.first_gateway
    before = metric(gateway, "cancelled_by_disconnect_total")
    call = Call(gateway, CHAT, chat(max_tokens=LONG, stream=True))
    assert next(call.events())
    assert metric(gateway, "streams_open") == 1
    call.close()
    eventually(lambda: metric(gateway, "cancelled_by_disconnect_total") == before + 1)
    eventually(lambda: metric(gateway, "streams_open") == 0)
    eventually(lambda: not jobs_of(slow))
