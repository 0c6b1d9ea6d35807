"""Log-probabilities are strict JSON, and no job waits for the grammar of another job."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from engine.outputs import Logprob, TokenLogprobs
from tests.support import eventually
from tests.worker.harness import Queue, inside
from worker.jobs.job import Outgoing
from worker.jobs.logprobs import LEAST, LogprobsWriter


def strict(raw: str | bytes) -> Any:
    """Parse JSON, and refuse NaN and infinities, which only Python accepts."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(raw, parse_constant=refuse)


def entry(token: int, top: int) -> dict[str, Any]:
    """Return a token's log-probabilities as a reader gets them."""

    def one(i: int, value: float) -> dict[str, Any]:
        text = bytes([i]).decode(errors="replace")
        return {"token": text, "token_id": i, "logprob": value, "bytes": [i]}

    values = [LEAST, LEAST, *(-float(i) for i in range(2, top))][:top]
    return {**one(token, -token / 8), "top_logprobs": [one(200 + i, value) for i, value in enumerate(values)]}


@pytest.mark.parametrize("top", [0, 1, 4])
def test_events_and_result_hold_logprobs_of_every_token_as_strict_json(queue: Queue, top: int) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "n": 2, "return_token_ids": True, "logprobs": top, "prompt_logprobs": 1}
    with inside(queue):
        job = queue.add(body)
        queue.check_ending(job)
    result = strict(queue.client.get(queue.keys.result(job)) or b"")
    for choice in result["choices"]:
        tokens = choice["token_ids"]
        assert choice["logprobs"] == {"content": [entry(token, top) for token in tokens]}
        assert choice["prompt_logprobs"] == [None, *(entry(token, 1) for token in b"bc")]
        mine = [f for _, f in queue.events(job) if f["type"] == "token" and int(f["index"]) == choice["index"]]
        assert [e for f in mine for e in strict(f["logprobs"])["content"]] == choice["logprobs"]["content"]
        assert [i for f in mine for i in strict(f["token_ids"])] == tokens


def test_a_job_without_logprobs_has_no_logprobs_fields(queue: Queue) -> None:
    with inside(queue):
        job = queue.add({"prompt": "abc", "max_tokens": 2})
        result = queue.check_ending(job)
    assert set(result["choices"][0]) == {"index", "text", "finish_reason", "stop"}
    assert not any({"logprobs", "token_ids"} & set(fields) for _, fields in queue.events(job))


def test_text_that_is_written_again_keeps_its_order_token_ids_and_logprobs() -> None:
    def logprobs(*tokens: int) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(Logprob(token, -1.0)) for token in tokens)

    outgoing = Outgoing()
    outgoing.add_text(0, "ab", [1, 2], logprobs(1, 2))
    outgoing.number_chunks()
    outgoing.confirm()
    outgoing.add_text(0, "c", [3], logprobs(3))
    outgoing.number_chunks()
    outgoing.add_text(0, "d", [4], logprobs(4))
    outgoing.add_text(0, "", [], ())
    outgoing.add_text(0, "e", [5], logprobs(5))
    assert [c.token_ids for c in outgoing.chunks] == [[3], [4, 5]]
    assert outgoing.chunks[1].logprobs == list(logprobs(4, 5))
    outgoing.write_again()
    (chunk,) = outgoing.number_chunks()
    assert (chunk.text, chunk.token_ids, chunk.logprobs) == ("abcde", [1, 2, 3, 4, 5], list(logprobs(1, 2, 3, 4, 5)))


def test_broken_characters_keep_their_bytes() -> None:
    written = LogprobsWriter(lambda token: b"\xf0\x9f").content([TokenLogprobs(Logprob(7, float("-inf")))])
    assert orjson.loads(orjson.dumps(written)) == {
        "content": [{"token": "\ufffd", "token_id": 7, "logprob": LEAST, "bytes": [0xF0, 0x9F], "top_logprobs": []}]
    }


def test_a_grammar_that_compiles_slowly_delays_its_own_job_only(queue: Queue) -> None:
    with inside(queue) as worker:
        slow = queue.add({"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "slow"}})
        assert queue.result(queue.add({"prompt": "x", "max_tokens": 1}))["status"] == "succeeded"
        assert not queue.client.exists(queue.keys.result(slow))
        worker.model.grammars.release.set()
        assert queue.check_ending(slow)["status"] == "succeeded"
        assert worker.model.grammars.compiled == [("regex", "slow")]


@pytest.mark.parametrize(("spec", "code"), [("bad", "invalid_request"), ("panic", "engine_error")])
def test_a_grammar_that_cannot_be_compiled_ends_its_job_alone(queue: Queue, spec: str, code: str) -> None:
    with inside(queue) as worker:
        job = queue.add({"prompt": "x", "structured_outputs": {"regex": spec}})
        result = queue.check_ending(job)
        assert (result["status"], result["error"]["code"], result["error"]["retryable"]) == ("failed", code, False)
        assert queue.result(queue.add({"prompt": "x", "max_tokens": 1}))["status"] == "succeeded"
        worker.at_rest()


@pytest.mark.parametrize(("failures", "status", "cause"), [(3, "succeeded", None), (4, "failed", "engine_error")])
def test_a_grammar_that_could_not_be_tried_is_tried_again_and_never_called_invalid(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, failures: int, status: str, cause: str | None
) -> None:
    monkeypatch.setattr("worker.queue.intake.GRAMMAR_PAUSES", (0.01, 0.01, 0.01))
    with inside(queue) as worker:
        worker.model.grammars.undecided = failures
        job = queue.add({"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "undecided"}})
        result = queue.check_ending(job)
        assert result["status"] == status
        if cause is not None:
            assert (result["error"]["code"], result["error"]["cause"]) == ("gave_up", cause)
            assert result["error"]["message"].startswith("structured_outputs.regex: ")
        worker.at_rest()


def test_a_worker_that_can_compile_no_grammar_fails_no_job_beside_a_healthy_one(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.intake.GRAMMAR_PAUSES", (0.01, 0.01))
    with inside(queue) as broken:
        broken.model.grammars.broken = True
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
        jobs = [queue.add(body) for _ in range(8)]
        plain = queue.add({"prompt": "x", "max_tokens": 1})
        assert queue.check_ending(plain)["status"] == "succeeded"
        with inside(queue):
            assert {queue.check_ending(job)["status"] for job in jobs} == {"succeeded"}
    assert {queue.client.hget(queue.keys.job(job), "tries") for job in jobs} == {b"1"}


def test_a_job_cancelled_while_its_grammar_is_compiled_computes_nothing(queue: Queue) -> None:
    with inside(queue) as worker:
        job = queue.add({"prompt": "x", "structured_outputs": {"regex": "slow"}})
        eventually(lambda: worker.worker.held.waiting == 1)
        queue.cancel(job)
        worker.model.grammars.release.set()
        assert queue.check_ending(job)["status"] == "cancelled"
        assert worker.engine.computed == []
