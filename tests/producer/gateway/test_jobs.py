"""`/v1/jobs`: submit, look, wait, follow, cancel; what a tenant sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.producer.gateway.harness import Answer, GatewayProcess, Stack, ask, get, post, stack
from tests.producer.gateway.streams import JOBS, Call
from tests.support import RedisServer, eventually

PROMPT = {"prompt": "Hi", "max_tokens": 4}
TEXT = "80 81 82 83 "


def submit(
    gateway: GatewayProcess, body: Any = None, *, headers: dict[str, Any] | None = None, **fields: Any
) -> Answer:
    return post(f"{gateway.url}{JOBS}", {"body": body or PROMPT, **fields}, **(headers or {}))


def show(gateway: GatewayProcess, job_id: str, query: str = "", **headers: Any) -> Answer:
    return get(f"{gateway.url}{JOBS}/{job_id}{query}", **headers)


def entry_of(made: Stack, job_id: str) -> tuple[str, dict[bytes, bytes]]:
    """The lane of a queued job, and its fields."""
    for lane in ("high", "normal", "low"):
        entries: Any = made.queue.redis.xrange(made.queue.keys.lane(lane))
        for _, fields in entries:
            if fields[b"id"] == job_id.encode():
                return lane, fields
    raise AssertionError(f"{job_id} is in no lane")


@pytest.fixture(scope="module")
def idle(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway with API keys, and no worker: jobs stay in their lanes."""
    with stack(redis_server.url, tmp_path_factory.mktemp("idle")) as made:
        path, made_keys = made.keys_file(acme="", umbrella="", slow="priority=low")
        KEYS.update(made_keys)
        made.gateway(api_keys=str(path))
        yield made


KEYS: dict[str, str] = {}


def bearer(tenant: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


# ── one job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_is_accepted_with_its_id_and_its_address(gateway: GatewayProcess) -> None:
    answer = submit(gateway)
    job_id = answer.json["id"]
    assert answer.status == 202
    assert answer.json == {"id": job_id, "status": "queued"}
    assert answer.headers["location"] == f"{JOBS}/{job_id}"
    assert answer.headers["x-request-id"] == job_id


def test_a_job_has_its_result_when_it_has_ended(gateway: GatewayProcess) -> None:
    job_id = submit(gateway, id="own-id_1.x").json["id"]
    assert job_id == "own-id_1.x"
    answer = show(gateway, job_id, "?wait=30")
    assert answer.json["id"] == job_id
    assert answer.json["status"] == "succeeded"
    assert answer.json["result"]["choices"][0]["text"] == TEXT
    assert answer.json == show(gateway, job_id).json
    assert answer.headers["x-request-id"] == job_id


def test_a_known_id_is_refused(gateway: GatewayProcess) -> None:
    assert submit(gateway, id="twice").status == 202
    for body in (PROMPT, {"prompt": "other"}):
        answer = submit(gateway, body, id="twice")
        assert answer.status == 409
        assert answer.json["error"]["code"] == "job_exists"


@pytest.mark.parametrize("method", ["GET /", "GET /events", "POST /cancel"])
@pytest.mark.parametrize("job_id", ["unknown", "a" * 129, "a%20b", "%F0%9F%98%80", "a:b"])
def test_an_unknown_job_is_not_found(gateway: GatewayProcess, method: str, job_id: str) -> None:
    verb, _, path = method.partition(" /")
    url = f"{gateway.url}{JOBS}/{job_id}" + (f"/{path}" if path else "")
    answer = get(url) if verb == "GET" else post(url, b"")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "not_found"


def test_a_wait_that_is_too_short_shows_the_job_as_it_is(idle: Stack) -> None:
    gateway = idle.first_gateway
    job_id = submit(gateway, headers=bearer("acme")).json["id"]
    answer = show(gateway, job_id, "?wait=0.2", **bearer("acme"))
    assert (answer.status, answer.json) == (200, {"id": job_id, "status": "queued", "result": None})
    delayed = submit(gateway, delay=60, headers=bearer("acme")).json["id"]
    assert show(gateway, delayed, **bearer("acme")).json["status"] == "delayed"


@pytest.mark.parametrize("wait", ["-1", "301", "nan", "inf", "x", "", "1e9"])
def test_a_malformed_wait_is_refused(gateway: GatewayProcess, wait: str) -> None:
    answer = show(gateway, "any", f"?wait={wait}")
    assert answer.status == 400
    assert answer.json["error"]["param"] == "wait"


def test_a_job_that_fails_shows_its_error(gateway: GatewayProcess) -> None:
    job_id = submit(gateway, {"prompt": "x" * 300}).json["id"]
    answer = show(gateway, job_id, "?wait=30").json
    assert answer["status"] == "failed"
    assert answer["result"]["error"]["code"] == "prompt_too_long"


def test_a_cancel_answers_as_the_client_library(idle: Stack, gateway: GatewayProcess) -> None:
    job_id = submit(idle.first_gateway, headers=bearer("acme")).json["id"]
    url = f"{idle.first_gateway.url}{JOBS}/{job_id}/cancel"
    answer = post(url, b"", **bearer("acme"))
    assert (answer.status, answer.json) == (200, {"id": job_id, "status": "DONE"})
    assert post(url, b"", **bearer("acme")).json["status"] == "LATE"
    assert show(idle.first_gateway, job_id, **bearer("acme")).json["status"] == "cancelled"
    running = submit(gateway, {"prompt": "long", "max_tokens": 200}).json["id"]
    eventually(lambda: show(gateway, running).json["status"] == "running")
    assert post(f"{gateway.url}{JOBS}/{running}/cancel", b"").json["status"] == "ASKED"
    assert show(gateway, running, "?wait=30").json["status"] == "cancelled"


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_events_of_a_job_are_those_of_its_stream(shared_stack: Stack, gateway: GatewayProcess) -> None:
    job_id = submit(gateway, {**PROMPT, "logprobs": True, "return_token_ids": True}).json["id"]
    events = list(Call(gateway, f"{JOBS}/{job_id}/events").events())
    entries: Any = shared_stack.queue.redis.xrange(shared_stack.queue.keys.out(job_id))
    assert [event.id for event in events] == [entry.decode() for entry, _ in entries]
    assert [event.name for event in events] == [fields[b"type"].decode() for _, fields in entries]
    start, *tokens, final = [event.json for event in events]
    assert start == {"type": "start", "worker": start["worker"], "attempt": 1, "prompt_tokens": 2}
    assert "".join(token["text"] for token in tokens) == TEXT
    assert [token["token_ids"] for token in tokens] == [[80], [81], [82], [83]]
    assert all(token["logprobs"]["content"] and token["tokens"] == 1 and token["index"] == 0 for token in tokens)
    assert final["status"] == "succeeded"
    assert final["result"] == show(gateway, job_id).json["result"]


@pytest.mark.parametrize("how", ["header", "query"])
def test_events_resume_after_each_last_event_id(gateway: GatewayProcess, how: str) -> None:
    job_id = submit(gateway).json["id"]
    path = f"{JOBS}/{job_id}/events"
    events = list(Call(gateway, path).events())
    for seen, event in enumerate(events[:-1], 1):
        assert event.id is not None
        if how == "header":
            call = Call(gateway, path, last_event_id=event.id)
        else:
            call = Call(gateway, f"{path}?last_event_id={event.id}")
        assert list(call.events()) == events[seen:]
    last = Call(gateway, path, last_event_id=str(events[-1].id))
    assert last.status == 204  # an EventSource does not connect again
    assert last.response.read() == b""


@pytest.mark.parametrize("last", ["x", "1-2-3", "-1", "99999999999999999999-0"])
def test_a_malformed_last_event_id_is_refused(gateway: GatewayProcess, last: str) -> None:
    job_id = submit(gateway).json["id"]
    answer = show(gateway, f"{job_id}/events", last_event_id=last)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "last_event_id"


def test_a_head_request_for_events_does_not_wait_for_them(idle: Stack) -> None:
    job_id = submit(idle.first_gateway, headers=bearer("acme")).json["id"]
    answer = ask("HEAD", f"{idle.first_gateway.url}{JOBS}/{job_id}/events", **bearer("acme"))
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


def test_events_are_followed_while_the_job_runs(gateway: GatewayProcess) -> None:
    job_id = submit(gateway, {"prompt": "Hi", "max_tokens": 100}).json["id"]
    events = list(Call(gateway, f"{JOBS}/{job_id}/events").events())
    assert [event.name for event in (events[0], events[-1])] == ["start", "final"]
    assert len(events) > 3


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("body", {"body": None}),
        ("body", {"body": "text"}),
        ("body", {"body": []}),
        ("bodies", {"bodies": 1}),
        ("prompt", {"prompt": "outside of body"}),
        ("id", {"id": "a b"}),
        ("id", {"id": ""}),
        ("id", {"id": 5}),
        ("priority", {"priority": "urgent"}),
        ("ttl", {"ttl": 0}),
        ("ttl", {"ttl": -1}),
        ("ttl", {"ttl": "5"}),
        ("ttl", {"ttl": True}),
        ("ttl", {"ttl": 1e300}),
        ("delay", {"delay": -1}),
        ("delay", {"delay": 1e300}),
        ("group", {"group": "a:b"}),
        ("tenant", {"tenant": ""}),
        ("callback", {"callback": "ftp://host/x"}),
        ("max_attempts", {"max_attempts": 0}),
        ("max_attempts", {"max_attempts": 1.5}),
        ("temperature", {"body": {"prompt": "x", "temperature": -1}}),
        ("promt", {"body": {"promt": "x"}}),
        ("input", {"body": {"input": "x"}}),
    ],
)
def test_a_wrong_field_is_refused_by_name(gateway: GatewayProcess, param: str, fields: dict[str, Any]) -> None:
    answer = post(f"{gateway.url}{JOBS}", {"body": PROMPT, **fields})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


def test_nulls_mean_absent(gateway: GatewayProcess) -> None:
    names = ("id", "priority", "ttl", "delay", "group", "tenant", "callback", "max_attempts")
    answer = submit(gateway, {**PROMPT, "temperature": None}, **dict.fromkeys(names))
    assert answer.status == 202


def test_an_unknown_model_is_not_found_if_a_worker_lives_and_queued_if_none_does(
    gateway: GatewayProcess, idle: Stack
) -> None:
    answer = submit(gateway, {**PROMPT, "model": "nope"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert submit(gateway, {**PROMPT, "model": "fake"}).status == 202
    assert submit(idle.first_gateway, {**PROMPT, "model": "nope"}, headers=bearer("acme")).status == 202


def test_a_full_queue_and_a_used_up_quota_answer_429(idle: Stack) -> None:
    queue = idle.queue
    assert submit(idle.first_gateway, headers=bearer("acme")).status == 202
    for cap, code in (("max_depth", "queue_full"), ("max_per_tenant", "quota_exceeded")):
        queue.redis.hset(queue.keys.meta, cap, "1")
        answer = submit(idle.first_gateway, headers=bearer("acme"))
        queue.redis.hdel(queue.keys.meta, cap)
        assert (answer.status, answer.json["error"]["code"]) == (429, code)
        assert int(answer.headers["retry-after"]) >= 1


# ── the entry ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_entry_of_a_job_has_its_fields(idle: Stack) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = submit(
        idle.first_gateway,
        id="full",
        ttl=600,
        group="g",
        tenant="acme",
        callback="https://example.com/hook",
        max_attempts=2,
        headers={**bearer("acme"), "traceparent": trace},
    )
    assert answer.status == 202
    lane, fields = entry_of(idle, "full")
    assert lane == "normal"
    assert fields[b"ttl_ms"] == b"600000"
    assert fields[b"group"] == b"g"
    assert fields[b"tenant"] == b"acme"
    assert fields[b"callback"] == b"https://example.com/hook"
    assert fields[b"max_attempts"] == b"2"
    assert fields[b"traceparent"] == trace.encode()


def test_a_malformed_trace_context_is_dropped(idle: Stack) -> None:
    job_id = submit(idle.first_gateway, headers={**bearer("acme"), "traceparent": "nonsense"}).json["id"]
    assert b"traceparent" not in entry_of(idle, job_id)[1]


def test_a_job_goes_into_the_lane_that_it_asks_for_at_most_that_of_its_key(idle: Stack) -> None:
    gateway = idle.first_gateway
    for asked, lane in ((None, "normal"), ("low", "low"), ("normal", "normal"), ("high", "high")):
        job_id = submit(gateway, priority=asked, headers=bearer("acme")).json["id"]
        assert entry_of(idle, job_id)[0] == lane
    job_id = submit(gateway, headers=bearer("slow")).json["id"]
    assert entry_of(idle, job_id)[0] == "low"
    for priority in ("normal", "high"):
        answer = submit(gateway, priority=priority, headers=bearer("slow"))
        assert (answer.status, answer.json["error"]["param"]) == (400, "priority")


def test_without_keys_a_job_may_have_any_lane_and_tenant(gateway: GatewayProcess, shared_stack: Stack) -> None:
    job_id = submit(gateway, priority="high", tenant="anyone").json["id"]
    assert show(gateway, job_id, "?wait=30").json["status"] == "succeeded"
    assert shared_stack.queue.redis.hget(shared_stack.queue.keys.job(job_id), "tenant") == b"anyone"


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fields", [{}, {"delay": 60}])
def test_a_tenant_sees_only_its_own_jobs_also_after_their_end(idle: Stack, fields: dict[str, Any]) -> None:
    gateway = idle.first_gateway
    job_id = submit(gateway, headers=bearer("acme"), **fields).json["id"]
    for _ in range(2):
        assert show(gateway, job_id, **bearer("acme")).status == 200
        assert show(gateway, job_id, **bearer("umbrella")).status == 404
        assert show(gateway, f"{job_id}/events", **bearer("umbrella")).status == 404
        assert show(gateway, job_id, "?wait=5", **bearer("umbrella")).status == 404
        assert post(f"{gateway.url}{JOBS}/{job_id}/cancel", b"", **bearer("umbrella")).status == 404
        post(f"{gateway.url}{JOBS}/{job_id}/cancel", b"", **bearer("acme"))


def test_a_key_submits_for_its_own_tenant_only(idle: Stack) -> None:
    answer = submit(idle.first_gateway, tenant="umbrella", headers=bearer("acme"))
    assert (answer.status, answer.json["error"]["param"]) == (400, "tenant")
    job_id = submit(idle.first_gateway, headers=bearer("acme")).json["id"]
    assert entry_of(idle, job_id)[1][b"tenant"] == b"acme"


def test_the_id_of_another_tenants_job_is_refused_without_its_state(idle: Stack) -> None:
    assert submit(idle.first_gateway, id="taken", headers=bearer("acme")).status == 202
    answer = submit(idle.first_gateway, id="taken", headers=bearer("umbrella"))
    assert answer.status == 409
    assert "queued" not in answer.body.decode()


def test_jobs_need_a_key(idle: Stack) -> None:
    assert submit(idle.first_gateway).status == 401
    assert show(idle.first_gateway, "taken").status == 401
