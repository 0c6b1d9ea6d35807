"""A gateway process with API keys: start, rates, tenants, a changed file, and what its log and metrics say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.producer.gateway.harness import GatewayProcess, Stack, get, post, stack
from tests.support import RedisServer, eventually

Guarded = tuple[Stack, GatewayProcess, dict[str, str], Path]
PROMPT = "a-prompt-that-no-log-may-have"


@pytest.fixture(scope="module")
def guarded(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A gateway with the keys of several tenants, and a worker."""
    with stack(redis_server.url, tmp_path_factory.mktemp("keys")) as made:
        path, keys = made.keys_file(
            slow="rpm=2", talker="tpm=100", streamer="tpm=100", humble="priority=low", other="priority=high"
        )
        gateway = made.gateway(wait=False, api_keys=str(path), log_level="debug")
        made.worker(FAKE_STEP="0.002")
        gateway.wait_until_it_answers()
        yield made, gateway, keys, path


def bearer(key: str) -> str:
    return f"Bearer {key}"


def complete(gateway: GatewayProcess, key: str, **body: object) -> tuple[int, dict[str, object], str]:
    given = {"model": "fake", "prompt": "x", "max_tokens": 2} | body
    answer = post(f"{gateway.url}/v1/completions", given, authorization=bearer(key))
    return answer.status, answer.json, answer.headers.get("retry-after", "")


def test_a_key_with_a_rate_gets_429_and_the_time_to_wait(
    guarded: Guarded,
) -> None:
    made, gateway, keys, path = guarded
    twin = made.gateway(api_keys=str(path))
    statuses = [complete(one, keys["slow"])[0] for one in (gateway, twin)]
    refused = [complete(one, keys["slow"]) for one in (gateway, twin, gateway)]
    assert statuses == [200, 200]
    for status, body, wait in refused:
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")  # type: ignore[index]
        assert 1 <= int(wait) <= 60
    assert complete(gateway, keys["other"])[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_is_charged_the_tokens_that_its_job_used_instead_of_the_estimate(guarded: Guarded, stream: bool) -> None:
    made, gateway, keys, _ = guarded
    key = keys["streamer" if stream else "talker"]
    body = {"model": "fake", "prompt": "x" * 80, "max_tokens": 3, "stream": stream}
    assert post(f"{gateway.url}/v1/completions", body, authorization=bearer(key)).status == 200
    rate = made.queue.keys.rate(hashlib.sha256(key.encode()).hexdigest()[:16])
    eventually(lambda: made.queue.hash(rate)["tokens"] == "83")  # the fake worker's tokens are bytes
    status, error, _ = complete(gateway, key, max_tokens=18)
    assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")  # type: ignore[index]


def test_a_key_cannot_use_a_higher_lane_than_its_own(
    guarded: Guarded,
) -> None:
    _, gateway, keys, _ = guarded
    job = {"body": {"prompt": "x", "max_tokens": 2}}
    for lane, status in (("high", 400), ("normal", 400), ("low", 202), (None, 202)):
        answer = post(f"{gateway.url}/v1/jobs", job | {"priority": lane}, authorization=bearer(keys["humble"]))
        assert answer.status == status, answer.body
    assert post(f"{gateway.url}/v1/jobs", job | {"priority": "high"}, authorization=bearer(keys["other"])).status == 202


def test_a_job_of_another_tenant_is_unknown(guarded: Guarded) -> None:
    _, gateway, keys, _ = guarded
    job = {"body": {"prompt": "x", "max_tokens": 2}}
    made = post(f"{gateway.url}/v1/jobs", job, authorization=bearer(keys["humble"])).json
    for path in ("", "?wait=1", "/events"):
        assert get(f"{gateway.url}/v1/jobs/{made['id']}{path}", authorization=bearer(keys["other"])).status == 404
    assert post(f"{gateway.url}/v1/jobs/{made['id']}/cancel", {}, authorization=bearer(keys["other"])).status == 404
    assert (
        get(f"{gateway.url}/v1/jobs/{made['id']}?wait=30", authorization=bearer(keys["humble"])).json["status"]
        == "succeeded"
    )
    assert post(f"{gateway.url}/v1/jobs", job | {"tenant": "other"}, authorization=bearer(keys["humble"])).status == 400


def test_one_tenant_cannot_take_all_requests_of_a_gateway(guarded: Guarded) -> None:
    made, *_ = guarded
    path, keys = made.keys_file(greedy="", other="")
    gateway = made.gateway(api_keys=str(path), max_requests="4")
    job = {"body": {"prompt": "x"}, "delay": 600, "id": "waited-for"}
    assert post(f"{gateway.url}/v1/jobs", job, authorization=bearer(keys["greedy"])).status == 202
    models, wait = f"{gateway.url}/v1/models", f"{gateway.url}/v1/jobs/waited-for?wait=300"
    with ThreadPoolExecutor(2) as threads, closing(gateway):  # its end ends the waits
        for _ in range(2):
            threads.submit(get, wait, timeout=300, authorization=bearer(keys["greedy"]))
        eventually(lambda: b"requests_in_flight 2.0" in get(f"{gateway.url}/metrics").body)
        refused = get(models, authorization=bearer(keys["greedy"]))
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert get(models, authorization=bearer(keys["other"])).status == 200


def test_a_changed_file_of_keys_takes_effect_while_the_gateway_runs(
    guarded: Guarded,
) -> None:
    made, *_ = guarded
    path, keys = made.keys_file(old="")
    gateway = made.gateway(api_keys=str(path))
    assert get(f"{gateway.url}/v1/models", authorization=bearer(keys["old"])).status == 200
    path.write_text("nonsense\n")
    eventually(lambda: "api_keys_refused" in gateway.log)
    assert get(f"{gateway.url}/v1/models", authorization=bearer(keys["old"])).status == 200
    path.write_text(f"{hashlib.sha256(b'new').hexdigest()} new\n")
    eventually(lambda: get(f"{gateway.url}/v1/models", authorization=bearer("new")).status == 200)
    assert get(f"{gateway.url}/v1/models", authorization=bearer(keys["old"])).status == 401


def test_neither_log_nor_metrics_nor_an_answer_has_a_key_or_a_prompt(
    guarded: Guarded,
) -> None:
    _, gateway, keys, path = guarded
    secret = "sk-wrong-0123456789"
    answers = [
        get(f"{gateway.url}/v1/models", authorization=bearer(secret)),
        get(f"{gateway.url}/v1/models?api_key={secret}", authorization=bearer(keys["other"])),
        get(f"{gateway.url}/{secret}", authorization=bearer(secret)),
        post(f"{gateway.url}/v1/completions", {"model": "fake", "prompt": PROMPT}, authorization=bearer(secret)),
        post(f"{gateway.url}/v1/completions", {"model": "fake", "prompt": PROMPT}, authorization=bearer(keys["slow"])),
        post(
            f"{gateway.url}/v1/completions", {"model": secret, "prompt": PROMPT}, authorization=bearer(keys["talker"])
        ),
        post(f"{gateway.url}/v1/completions", {"prompt": [PROMPT], "stop": {}}, authorization=bearer(keys["other"])),
        post(f"{gateway.url}/v1/completions", b'{"prompt": "' + PROMPT.encode(), authorization=bearer(keys["other"])),
        post(
            f"{gateway.url}/v1/jobs", {"body": {"prompt": PROMPT, "max_tokens": 3}}, authorization=bearer(keys["other"])
        ),
    ]
    assert [answer.status for answer in answers[:4]] == [401, 200, 401, 401]
    assert all(answer.status < 500 for answer in answers)
    texts = {"log": gateway.log, "metrics": get(f"{gateway.url}/metrics").body.decode()}
    texts |= {f"answer {number}": answer.body.decode() for number, answer in enumerate(answers) if number != 5}
    full_hashes = [line.split()[0] for line in path.read_text().splitlines() if not line.startswith("#")]
    for where, text in texts.items():
        for word in (*keys.values(), *full_hashes, secret, PROMPT):
            assert word not in text, where
    assert not any(tenant in texts["metrics"] for tenant in keys)
    assert [json.loads(line) for line in gateway.log.splitlines()]


def test_a_wrong_file_of_keys_ends_the_start_with_status_2_and_the_number_of_the_line(own_stack: Stack) -> None:
    path, keys = own_stack.keys_file(a="", b="")
    path.write_text(path.read_text() + f"{keys['a']} a\n")
    gateway = own_stack.gateway(wait=False, api_keys=str(path))
    assert gateway.popen.wait(60) == 2
    assert "line 4" in gateway.log
    assert keys["a"] not in gateway.log
