"""Chat and text completions: what decides the status code, what a stream holds, what is charged."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.producer.gateway.harness import GatewayProcess, post, stack
from tests.producer.gateway.streams import CHAT, JOBS, Call, chat, texts_of
from tests.support import RedisServer, eventually
from tokenmill.protocol.keys import MAX_BODY_BYTES

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
POISON = "AB"
"""A prompt that fails in the engine after its first token."""


def test_a_stream_has_the_text_of_the_whole_answer_and_one_id(gateway: GatewayProcess) -> None:
    whole = post(f"{gateway.url}{CHAT}", chat("equal", 50)).json
    call = Call(gateway, CHAT, chat("equal", 50, stream=True, stream_options={"include_usage": True}))
    *events, done = call.events()
    assert call.header("content-type") == "text/event-stream; charset=utf-8"
    assert call.header("cache-control") == "no-cache"
    assert done.data == "[DONE]"
    assert texts_of(events) == whole["choices"][0]["message"]["content"]
    assert {event.json["id"] for event in events} == {f"chatcmpl-{call.header('x-request-id')}"}
    assert {event.json["model"] for event in events} == {whole["model"]} == {"fake"}
    assert events[-1].json["usage"] == whole["usage"]
    assert all(event.name is None and event.id is None for event in events)


def test_a_stream_of_a_text_completion_has_all_choices(gateway: GatewayProcess) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "n": 3, "stream": True}
    *events, done = Call(gateway, COMPLETIONS, body).events()
    assert done.data == "[DONE]"
    choices = [choice for event in events for choice in event.json["choices"]]
    joined = {i: "".join(one["text"] for one in choices if one["index"] == i) for i in range(3)}
    whole = post(f"{gateway.url}{COMPLETIONS}", {**body, "stream": False}).json
    assert joined == {choice["index"]: choice["text"] for choice in whole["choices"]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (chat("x" * 300), 400, "messages", "context_length_exceeded"),
        (chat(temperature=9), 400, "temperature", "invalid_request"),
        (chat(unknown=1), 400, "unknown", "invalid_request"),
        (chat(id="x"), 400, "id", "invalid_request"),
        (chat(tenant="x"), 400, "tenant", "invalid_request"),
        (chat(model="nope"), 404, "model", "model_not_found"),
        ({"model": "fake"}, 400, "messages", "invalid_request"),
    ],
)
def test_what_fails_before_any_text_is_an_http_error_for_streams_too(
    gateway: GatewayProcess, body: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    answer = post(f"{gateway.url}{CHAT}", {**body, "stream": stream})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)


def test_a_failure_after_the_first_text_is_the_last_event_of_a_stream(gateway: GatewayProcess) -> None:
    body = {"prompt": POISON, "max_tokens": 5}
    assert post(f"{gateway.url}{COMPLETIONS}", body).status == 500
    *events, error = Call(gateway, COMPLETIONS, {**body, "stream": True}).events()
    assert "".join(event.json["choices"][0]["text"] for event in events)
    assert error.json["error"]["type"] == "server_error"


def test_a_cancel_of_the_job_ends_a_stream_with_an_error(redis_server: RedisServer, tmp_path: Any) -> None:
    with stack(redis_server.url, tmp_path) as made:
        gateway = made.gateway()
        made.worker(FAKE_STEP="0.05")
        call = Call(gateway, CHAT, chat(max_tokens=200, stream=True))
        stream = call.events()
        assert next(stream)
        post(f"{gateway.url}{JOBS}/{call.header('x-request-id')}/cancel", b"")
        assert list(stream)[-1].json["error"]["code"] == "cancelled"


@pytest.mark.parametrize("stream", [True, False])
def test_without_a_worker_a_request_gets_503_and_leaves_nothing_in_the_queue(
    redis_server: RedisServer, tmp_path: Any, stream: bool
) -> None:
    with stack(redis_server.url, tmp_path) as made:
        gateway = made.gateway(worker_timeout="0.5")
        answer = post(f"{gateway.url}{CHAT}", chat(stream=stream))
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_worker")
        assert int(answer.headers["retry-after"]) >= 1
        assert sum(made.queue.redis.xlen(lane) for lane in made.queue.keys.lanes) == 0


@pytest.mark.parametrize(
    ("more", "status"), [(0, (400, "context_length_exceeded")), (1, (413, "too_large"))], ids=["at", "above"]
)
def test_a_body_may_have_exactly_the_maximum_size(gateway: GatewayProcess, more: int, status: tuple[int, str]) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "prompt": ""}
    body["prompt"] = "x" * (MAX_BODY_BYTES - len(orjson.dumps(body)) + more)
    answer = post(f"{gateway.url}{COMPLETIONS}", orjson.dumps(body))
    assert (answer.status, answer.json["error"]["code"]) == status


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 413), ("/nowhere", 404), ("/v1/models", 405)])
def test_a_client_that_reads_only_after_it_has_sent_its_whole_body_gets_the_refusal(
    gateway: GatewayProcess, path: str, status: int
) -> None:
    assert {post(gateway.url + path, b" " * (3 << 20)).status for _ in range(10)} == {status}


def test_embeddings_are_refused_as_a_worker_that_generates_would(gateway: GatewayProcess) -> None:
    answer = post(f"{gateway.url}{EMBEDDINGS}", {"model": "fake", "input": "text"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "input")


def test_jobs_of_a_chat_have_the_callers_tenant_trace_and_lane(redis_server: RedisServer, tmp_path: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with stack(redis_server.url, tmp_path) as made:
        path, keys = made.keys_file(acme="priority=low")
        gateway = made.gateway(api_keys=str(path))
        made.worker()
        made.queue.redis.hset(made.queue.keys.meta, "paused", "1")
        headers: dict[str, Any] = {"authorization": f"Bearer {keys['acme']}", "traceparent": trace}
        call = Call(gateway, CHAT, chat(), **headers)
        entries: Any = eventually(lambda: made.queue.redis.xrange(made.queue.keys.lane("low")))
        fields = entries[0][1]
        call.close()
        assert fields[b"tenant"] == b"acme"
        assert fields[b"traceparent"] == trace.encode()
        assert int(fields[b"ttl_ms"]) > 600_000
        assert b"Hi" not in gateway.log.encode()


def test_a_key_pays_for_what_its_requests_used(redis_server: RedisServer, tmp_path: Any) -> None:
    with stack(redis_server.url, tmp_path) as made:
        path, keys = made.keys_file(few="rpm=2", small="tpm=1300")
        gateway = made.gateway(api_keys=str(path))
        made.worker()
        few: dict[str, Any] = {"authorization": f"Bearer {keys['few']}"}
        small: dict[str, Any] = {"authorization": f"Bearer {keys['small']}"}
        url = f"{gateway.url}{CHAT}"
        assert [post(url, chat(), **few).status for _ in range(3)] == [200, 200, 429]
        # The estimate of 1005 tokens leaves no room for a second request; the 256 tokens that fit the model do.
        statuses = [post(url, chat(max_tokens=1000), **small).status]
        eventually(lambda: post(url, chat(max_tokens=1000), **small).status == 200)
        statuses.append(post(url, chat(max_tokens=1000), **small).status)
        assert statuses == [200, 429]


def test_a_request_waits_for_the_first_worker_of_a_queue(redis_server: RedisServer, tmp_path: Any) -> None:
    with stack(redis_server.url, tmp_path) as made:
        gateway = made.gateway(worker_timeout="60")
        call = Call(gateway, CHAT, chat())
        made.worker()
        assert call.status == 200
