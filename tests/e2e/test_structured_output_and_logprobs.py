"""The demo model answers in JSON and tells its log-probabilities, through a real worker and over the wire alone."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support import eventually
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.demo.child import WorkerProcess, worker_process

pytestmark = pytest.mark.model

ASK = [{"role": "user", "content": "Describe one fruit."}]
FRUIT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "green", "yellow"]},
        "grams": {"type": "integer", "minimum": 1, "maximum": 9000},
    },
    "required": ["name", "colour", "grams"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def worker(fake_redis_url: str) -> Iterator[tuple[Queue, WorkerProcess]]:
    queue = Queue(command_client(fake_redis_url), fake_redis_url, Keys(f"test-{secrets.token_hex(6)}"))
    options = ["--model", "smollm2-135m", "--redis", queue.url, "--queue", queue.keys.queue, "--num-kv-blocks", "256"]
    with worker_process(*options) as process:
        yield queue, process


def answer(queue: Queue, **body: Any) -> dict[str, Any]:
    job = queue.add({"max_tokens": 80, "temperature": 1.0, "seed": 3, **body})
    eventually(lambda: queue.client.exists(queue.keys.result(job)), 60)
    return queue.check_ending(job)


def strict(raw: str | bytes | None) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(raw or b"", parse_constant=refuse)


def test_a_schema_and_a_choice_and_a_pattern_are_kept(worker: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = worker
    wanted = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": FRUIT}}
    result = answer(queue, messages=ASK, response_format=wanted, n=3, min_tokens=60, ignore_eos=True)
    for choice in result["choices"]:
        assert choice["finish_reason"] == "stop"
        Draft202012Validator(FRUIT).validate(strict(choice["text"]))
    (choice,) = answer(queue, messages=ASK, structured_outputs={"choice": ["apple", "pear"]})["choices"]
    assert choice["text"] in ("apple", "pear")
    (choice,) = answer(queue, messages=ASK, structured_outputs={"regex": "[A-Z][a-z]{2,6}!"})["choices"]
    assert re.fullmatch("[A-Z][a-z]{2,6}!", choice["text"])
    (choice,) = answer(queue, messages=ASK, response_format=wanted, max_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["text"][0]) == ("length", "{")


def test_logprobs_are_finite_whatever_the_sampler_did(worker: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = worker
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 2, "return_token_ids": True}
    wanted = {"type": "json_schema", "json_schema": {"schema": FRUIT}}
    result = answer(queue, **body, response_format=wanted, top_k=1, logit_bias={"5": -100})
    (choice,) = strict(queue.client.get(queue.keys.result(result["id"])))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    written = [entry["bytes"] for entry in content if entry["token"] not in ("<|im_end|>", "<|endoftext|>")]
    assert bytes(b for raw in written for b in raw).decode() == choice["text"]
    prompt = choice["prompt_logprobs"]
    assert (prompt[0], len(prompt)) == (None, result["usage"]["prompt_tokens"])
    for entry in [*content, *prompt[1:]]:
        told = [one["logprob"] for one in entry["top_logprobs"]]
        assert told == sorted(told, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (*told, entry["logprob"]))
        assert entry["logprob"] <= told[0]
    assert {len(entry["top_logprobs"]) for entry in content} == {5}
    events = [fields for _, fields in queue.events(result["id"]) if fields["type"] == "token"]
    assert [entry for fields in events for entry in strict(fields["logprobs"])["content"]] == content


def test_no_grammar_harms_the_worker(worker: tuple[Queue, WorkerProcess]) -> None:
    queue, process = worker
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"'
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"grammar": chain}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "(" * 5000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": '{"items":' * 2000 + "{}" + "}" * 2000}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format: not is not supported",
        ),
    ]
    for body, words in bodies:
        result = answer(queue, messages=ASK, **body)
        assert (result["status"], result["error"]["code"]) == ("failed", "invalid_request")
        assert words in result["error"]["message"]
    assert answer(queue, messages=ASK, max_tokens=2)["status"] == "succeeded"
    process.check()
