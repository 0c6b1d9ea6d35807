"""The wire contract as users use it: redis-cli and the documented keys, against a worker with a real model."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny
from tests.support import eventually, output_of, running_redis
from tests.worker.harness import Queue
from tests.worker.test_service import FUZZ
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys
from worker.demo.child import WorkerProcess, worker_process
from worker.demo.embedded import embedded_redis

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
REDIS_CLI = shutil.which("redis-cli")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few thousand parameters with a context of 256 tokens."""
    return tiny.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.redis_server)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[Queue, WorkerProcess]]:
    """A worker on the default queue of a server of its own, loaded once for all tests here."""
    with ExitStack() as stack:
        if request.param == "fake":
            url = stack.enter_context(embedded_redis())
        else:
            request.getfixturevalue("redis_server")  # skips, loudly, where there is none
            url = stack.enter_context(running_redis(tmp_path_factory.mktemp("redis"))).url
        options = ["--model", str(model), "--redis", url, "--num-kv-blocks", "32", "--block-size", "8"]
        options += ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--num-threads", "1"]
        options += ["--dtype", "float32", "--served-model-name", "tiny", "--max-waiting", "4", "--log-format", "json"]
        worker = stack.enter_context(worker_process(*options))
        queue = Queue(stack.enter_context(command_client(url)), url, Keys())
        eventually(lambda: worker.check() or queue.client.keys(queue.keys.worker("*")), 90)
        yield queue, worker
        assert worker.stop() == 0


def info(queue: Queue) -> dict[str, str]:
    (key,) = queue.client.keys(queue.keys.worker("*"))
    fields: Any = queue.client.hgetall(key)
    return {name.decode(): value.decode() for name, value in fields.items()}


def at_rest(queue: Queue) -> None:
    """Wait until the worker reports that it holds no job and that all its blocks are free."""

    eventually(lambda: queue.depth() == queue.pending() == 0, 15)
    seconds, micros = queue.client.time()
    now = seconds * 1000 + micros // 1000

    def rests() -> bool:
        said = info(queue)
        assert said["total_blocks"] == "32"
        quiet = said["waiting"] == said["running"] == "0" and said["free_blocks"] == "32"
        return quiet and int(said["updated_ms"]) > now

    eventually(rests, 15)


def redis_cli(queue: Queue, line: str) -> Any:
    """Run one line of the page as it stands there, and read the answer as JSON."""
    if REDIS_CLI is None:
        pytest.skip("no redis-cli on this machine")
    command = [REDIS_CLI, "-u", queue.url, "--json", "-2"]
    return json.loads(output_of(command, stdin=line + "\n"))


def test_the_pages_four_lines_run_as_they_stand(served: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = served
    lines = [line.partition("  #")[0].strip() for line in re.findall(r"^    (?:XADD|XREAD|GET|SET) .+$", PAGE, re.M)]
    job = secrets.token_hex(8)
    xadd, xread, get, cancel = (line.replace("7f3a…", job) for line in lines)
    assert redis_cli(queue, xadd)
    seen: list[dict[str, str]] = []
    last = "0"
    while not seen or seen[-1]["type"] != "final":
        assert xread.endswith(" 0")
        for _, entries in redis_cli(queue, f"{xread[:-1]}{last}"):
            for last, flat in entries:  # noqa: B007
                seen.append(dict(zip(flat[::2], flat[1::2], strict=True)))
    result = json.loads(redis_cli(queue, get))
    assert json.loads(seen[-1]["result"]) == result
    assert "".join(e["text"] for e in seen if e["type"] == "token") == result["choices"][0]["text"]
    assert result["usage"]["completion_tokens"] <= 32
    assert redis_cli(queue, cancel) == "OK"
    assert json.loads(redis_cli(queue, get)) == result  # a cancel after the finish changes nothing
    queue.client.delete(queue.keys.cancel(job))
    at_rest(queue)


def test_fuzzed_bodies_each_get_their_error_and_the_worker_lives(served: tuple[Queue, WorkerProcess]) -> None:
    queue, worker = served
    fuzz = {name: case for name, case in FUZZ.items() if name != "can never fit"}
    jobs = {name: queue.add(body, **fields) for name, (body, fields, _) in fuzz.items()}
    for name, (_, _, code) in fuzz.items():
        assert (name, queue.check_ending(jobs[name])["error"]["code"]) == (name, code)
    worker.check()
    at_rest(queue)


def test_a_prompt_that_can_never_fit_is_answered_while_another_runs(served: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = served
    slow = queue.add({"prompt": [5] * 10, "max_tokens": 200, "ignore_eos": True, "temperature": 0})
    never = queue.add({"prompt": [5] * 256})
    behind = queue.add({"prompt": [5] * 10, "max_tokens": 2, "ignore_eos": True})
    assert queue.check_ending(never)["error"]["code"] == "prompt_too_long"
    assert queue.check_ending(behind)["status"] == "succeeded"
    assert queue.check_ending(slow)["usage"]["completion_tokens"] == 200
    at_rest(queue)


def test_a_cancel_frees_a_running_jobs_blocks_and_those_of_waiting_ones(served: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = served
    body = {"prompt": [5] * 10, "max_tokens": 240, "ignore_eos": True, "temperature": 1}
    jobs = [queue.add({**body, "prompt": [5 + i] * 100}) for i in range(8)]  # more than run, more than fit
    eventually(lambda: any(f["type"] == "token" for job in jobs for _, f in queue.events(job)), 20)
    for job in jobs:
        queue.cancel(job, "enough")
    results = [queue.check_ending(job) for job in jobs]
    assert {(r["status"], r.get("cancel_reason")) for r in results} == {("cancelled", "enough")}
    partial = [r for r in results if r["choices"] and r["choices"][0]["text"]]
    assert all(r["choices"][0]["finish_reason"] == "cancelled" for r in partial)
    at_rest(queue)


def test_a_job_that_is_cancelled_before_a_worker_reads_it_has_no_token(served: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = served
    job = secrets.token_hex(8)
    queue.cancel(job)
    queue.add({"prompt": [5] * 10, "max_tokens": 100}, id=job)
    result = queue.check_ending(job)
    assert (result["status"], result["choices"], result["attempt"]) == ("cancelled", [], 0)
    assert [f["type"] for _, f in queue.events(job)] == ["start", "final"]
    at_rest(queue)


def test_a_chat_goes_through_the_template_and_a_bad_role_is_the_senders_error(
    served: tuple[Queue, WorkerProcess],
) -> None:
    queue, _ = served
    good = queue.add({"messages": [{"role": "user", "content": "Hi 🔥"}], "max_tokens": 8, "model": "tiny"})
    bad = queue.add({"messages": [{"role": "wizard", "content": "Hi"}], "max_tokens": 8})
    assert queue.check_ending(good)["status"] == "succeeded"
    error = queue.check_ending(bad)["error"]
    assert (error["code"], "wizard" in error["message"]) == ("invalid_request", True)


def test_greedy_text_is_the_same_alone_and_among_other_jobs(served: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = served
    body = {"prompt": [9, 8, 7, 6], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    alone = queue.check_ending(queue.add(body))["choices"]
    crowd = [queue.add({"prompt": [5 + i] * 30, "max_tokens": 20}) for i in range(6)]
    among = queue.check_ending(queue.add(body))["choices"]
    assert among == alone
    for job in crowd:
        queue.check_ending(job)
    at_rest(queue)
