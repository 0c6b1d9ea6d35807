"""Every error class of the official `openai` package, raised by the gateway's answers, sync and async."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.producer.gateway.faces import Face
from tests.producer.gateway.harness import GatewayProcess, Stack, get, stack
from tests.support import RedisServer, eventually, free_port

pytestmark = [pytest.mark.redis_server, pytest.mark.timeout(300)]
ASK: list[Any] = [{"role": "user", "content": "Name a river."}]
KINDS = ["sync", "async"]


@pytest.fixture(params=KINDS)
def face(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Face:
    return Face(request.param, gateway)


def chat(face: Face, **given: Any) -> Any:
    return face(lambda c: c.chat.completions.create(**{"model": "fake", "messages": ASK, "max_tokens": 3, **given}))


def fails(kind: type[Exception], face: Face, **given: Any) -> Any:
    with pytest.raises(kind) as raised:
        chat(face, **given)
    return raised.value


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"n": 1000}, "n"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 3, "logit_bias": {"5": 1000}}, "logit_bias"),
    ],
)
def test_a_wrong_request_is_a_bad_request_that_names_the_key(face: Face, given: dict[str, Any], param: str) -> None:
    error = fails(openai.BadRequestError, face, **given)
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert error.param.partition(".")[0] == param
    assert param in error.message


def test_a_wrong_request_for_a_stream_is_a_bad_request_too(face: Face) -> None:
    assert fails(openai.BadRequestError, face, temperature=9, stream=True).param == "temperature"


def test_a_prompt_that_does_not_fit_is_a_bad_request_with_and_without_a_stream(face: Face) -> None:
    long: Any = [{"role": "user", "content": "x" * 600}]
    for stream in (False, True):
        assert "tokens" in fails(openai.BadRequestError, face, messages=long, stream=stream).message


def test_embeddings_are_refused_as_a_worker_refuses_them(face: Face) -> None:
    with pytest.raises(openai.BadRequestError, match="input"):
        face(lambda c: c.embeddings.create(model="fake", input="text"))


def test_a_model_that_no_live_worker_serves_is_not_found(face: Face) -> None:
    error = fails(openai.NotFoundError, face, model="nope")
    assert (error.status_code, error.code, error.type) == (404, "model_not_found", "invalid_request_error")
    assert "nope" in error.message


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.files.retrieve("file-nope"),
        lambda c: c.files.content("file-nope"),
        lambda c: c.files.delete("file-nope"),
        lambda c: c.batches.retrieve("batch_nope"),
        lambda c: c.batches.cancel("batch_nope"),
        lambda c: c.get("/jobs/nope", cast_to=object),
        lambda c: c.get("/nope", cast_to=object),
    ],
)
def test_an_unknown_id_or_path_is_not_found(face: Face, call: Any) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        face(call)
    assert raised.value.type == "invalid_request_error"


def test_an_idempotency_key_used_for_another_request_is_a_conflict(face: Face) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    chat(face, extra_headers=headers)
    error = fails(openai.ConflictError, face, extra_headers=headers, max_tokens=4)
    assert (error.status_code, error.code) == (409, "idempotency_key_reused")


def test_a_known_id_of_a_job_is_a_conflict(face: Face) -> None:
    job = {"id": secrets.token_hex(8), "body": {"prompt": "x", "max_tokens": 2}}
    made = face(lambda c: c.post("/jobs", body=job, cast_to=object))
    assert made == {"id": job["id"], "status": "queued"}
    with pytest.raises(openai.ConflictError) as raised:
        face(lambda c: c.post("/jobs", body=job, cast_to=object))
    assert raised.value.code == "job_exists"


def test_the_packages_time_out_raises_its_class_and_cancels_the_job(gateway: GatewayProcess, face: Face) -> None:
    hasty = face.of(gateway, timeout=0.7)
    before = cancelled(gateway)
    assert isinstance(fails(openai.APITimeoutError, hasty, max_tokens=230), openai.APIConnectionError)
    eventually(lambda: cancelled(gateway) > before, 20, 0.05)


def cancelled(gateway: GatewayProcess) -> float:
    """The number of jobs that the gateway has cancelled because their clients went away."""
    text = get(f"{gateway.url}/metrics").body.decode()
    lines = [line for line in text.splitlines() if "disconnect" in line and not line.startswith("#")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if "_created" not in line)


def test_a_port_where_nothing_listens_is_a_connection_error(face: Face, tmp_path: Path) -> None:
    class Nothing:
        url = f"http://127.0.0.1:{free_port()}"

    nowhere: Any = Nothing()
    fails(openai.APIConnectionError, face.of(nowhere))


@pytest.fixture(scope="module")
def keyed(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, GatewayProcess, dict[str, str]]]:
    """A gateway with keys: tenants `calm` and `other` without limits, two `hasty` ones with two requests a minute."""
    with stack(redis_server.url, tmp_path_factory.mktemp("keyed")) as made:
        path, keys = made.keys_file(calm="", other="", hasty_sync="rpm=2", hasty_async="rpm=2")
        gateway = made.gateway(wait=False, api_keys=str(path), max_body_bytes="20000")
        made.worker(FAKE_STEP="0.02")
        yield made, gateway.wait_until_it_answers(), keys


Keyed = tuple[Stack, GatewayProcess, dict[str, str]]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_rates_and_sizes_have_errors_of_their_own(keyed: Keyed, kind: str) -> None:
    _, gateway, keys = keyed
    wrong = fails(openai.AuthenticationError, Face(kind, gateway, "sk-wrong"))
    assert (wrong.status_code, wrong.code) == (401, "invalid_api_key")
    assert "sk-wrong" not in str(wrong)
    assert "sk-wrong" not in gateway.log

    hasty = Face(kind, gateway, keys[f"hasty_{kind}"])
    for _ in range(2):
        chat(hasty)
    late = fails(openai.RateLimitError, hasty)
    assert (late.status_code, late.code, late.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 0 < float(late.response.headers["retry-after"]) <= 60

    calm = Face(kind, gateway, keys["calm"])
    large: Any = [{"role": "user", "content": "x" * 30_000}]
    assert fails(openai.APIStatusError, calm, messages=large).status_code == 413
    assert chat(calm).choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tenant_sees_only_its_own_jobs_files_and_batches(keyed: Keyed, kind: str) -> None:
    _, gateway, keys = keyed
    calm, other = (Face(kind, gateway, keys[name]) for name in ("calm", "other"))
    job = chat(calm)._request_id
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "x"}}\n'
    file = calm(lambda c: c.files.create(file=("in.jsonl", line), purpose="batch"))
    assert calm(lambda c: c.get(f"/jobs/{job}", cast_to=object))["status"] == "succeeded"
    assert other.items(lambda c: c.files.list()) == []
    for path in (f"/jobs/{job}", f"/files/{file.id}"):
        with pytest.raises(openai.NotFoundError):
            other(lambda c, path=path: c.get(path, cast_to=object))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_worker_and_without_redis_there_are_server_errors(
    own_stack: Stack, own_redis: RedisServer, kind: str
) -> None:
    gateway = own_stack.gateway(worker_timeout="0.5")
    face = Face(kind, gateway)
    error = fails(openai.InternalServerError, face)
    assert (error.status_code, error.code, error.type) == (503, "no_worker", "server_error")
    assert float(error.response.headers["retry-after"]) > 0
    own_redis.kill()
    eventually(lambda: get(f"{gateway.url}/readyz").status == 503, 20)
    error = fails(openai.InternalServerError, face)
    assert (error.status_code, error.code) == (503, "redis_unavailable")
    assert float(error.response.headers["retry-after"]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_takes_too_long_is_a_504_and_its_job_is_cancelled(keyed: Keyed, kind: str) -> None:
    gateway = keyed[0].gateway(request_timeout="1")
    error = fails(openai.InternalServerError, Face(kind, gateway), max_tokens=230)
    assert (error.status_code, error.code) == (504, "timeout")
    assert get(f"{gateway.url}/v1/jobs/{error.request_id}?wait=20").json["status"] == "cancelled"
    gateway.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gateway_that_dies_in_a_stream_is_a_connection_error(keyed: Keyed, kind: str) -> None:
    gateway = keyed[0].gateway()

    def kill_at_the_third(items: list[Any]) -> bool:
        if len(items) == 3:
            gateway.kill()
        return False

    with pytest.raises(openai.APIConnectionError):
        Face(kind, gateway).items(
            lambda c: c.chat.completions.create(model="fake", messages=ASK, max_tokens=200, stream=True),
            kill_at_the_third,
        )
