"""The RQ jobs in real `rq worker` processes: one request each, resumed after a kill, cancelled after a stop."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import rq
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from tests.producer.rqprocess import Rq, rq_on
from tests.support import RedisServer, eventually, output_of
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.keys import Keys

pytestmark = pytest.mark.redis_server


@pytest.fixture
def queue(redis_server: RedisServer) -> Iterator[Queue]:
    client = command_client(redis_server.url)
    yield Queue(redis_server.url, client, Keys(f"q{secrets.token_hex(6)}"))
    client.close()


@pytest.fixture
def rqueue(queue: Queue, tmp_path: Path) -> Iterator[Rq]:
    with rq_on(queue, tmp_path) as found:
        yield found


def submitted(queue: Queue, request: str) -> bool:
    return bool(queue.redis.exists(queue.keys.job(request)))


def held(queue: Queue, request: str) -> bool:
    return queue.redis.hget(queue.keys.job(request), "state") == b"running"


def scripts_run(queue: Queue) -> int:
    return int(queue.redis.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


def batch_file(folder: Path, prompts: list[str]) -> Path:
    path = folder / "in.jsonl"
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for n, prompt in enumerate(prompts)
    ]
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return path


def custom_ids(path: Path) -> list[int]:
    return sorted(int(orjson.loads(line)["custom_id"]) for line in path.read_bytes().splitlines())


def test_a_job_returns_its_result_as_plain_json_and_shows_itself(queue: Queue, rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="one two", max_tokens=9, tenant="t")
    rqueue.worker("--burst")
    result = rqueue.ends(job, "finished").return_value()
    assert result is not None
    assert result["choices"][0]["text"] == "one two "
    assert result == orjson.loads(queue.redis.get(queue.keys.result(f"{job.id}.g1")) or b"")
    assert job.meta["tokenmill"] == {
        "queue": queue.keys.queue, "request": f"{job.id}.g1", "status": "succeeded", "tokens": 2,
    }  # fmt: skip
    assert job.func_name == "producer.jobs.generate"


def test_a_request_that_a_worker_would_refuse_fails_the_rq_job_with_its_reason(rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="x", temperature=9)
    rqueue.worker("--burst")
    failed = rqueue.ends(job, "failed").latest_result()
    assert failed is not None
    assert "temperature" in str(failed.exc_string)


def test_a_retry_after_a_failure_starts_the_next_generation(queue: Queue, rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="a FAIL", retry=rq.Retry(max=2))
    rqueue.worker("--burst")
    failed = rqueue.ends(job, "failed").latest_result()
    assert failed is not None
    assert f"request {job.id}.g3 failed (engine_error): told to" in str(failed.exc_string)
    assert [submitted(queue, f"{job.id}.g{n}") for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_job_whose_horse_is_killed_waits_for_the_same_request(queue: Queue, rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="HOLD on", retry=rq.Retry(max=1))
    process = rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    process.kill_horse()
    eventually(lambda: "terminated unexpectedly" in process.log)
    eventually(lambda: rqueue.status(job) == "started")
    worker.release()
    result = rqueue.ends(job, "finished").return_value()
    assert result is not None
    assert (result["id"], result["attempt"], result["status"]) == (f"{job.id}.g1", None, "succeeded")
    assert not submitted(queue, f"{job.id}.g2")
    assert not queue.redis.exists(queue.keys.cancel(f"{job.id}.g1"))


def test_a_job_whose_worker_is_killed_is_resumed_by_the_next(queue: Queue, rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="HOLD on", retry=rq.Retry(max=1))
    process = rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    process.kill()
    # RQ calls a job abandoned when its worker's heartbeats have stopped for a minute and a half.
    rqueue.jobs.started_job_registry.cleanup(timestamp=2**40)
    assert rqueue.status(job) == "queued"
    rqueue.worker("--burst")
    eventually(lambda: rqueue.status(job) == "started")
    worker.release()
    result = rqueue.ends(job, "finished").return_value()
    assert result is not None
    assert result["id"] == f"{job.id}.g1"
    assert not submitted(queue, f"{job.id}.g2")


@pytest.mark.slow
def test_a_retried_job_finds_the_request_that_ended_after_its_worker_was_killed(
    queue: Queue, rqueue: Rq, worker: MiniWorker
) -> None:
    job = rqueue.enqueue("generate", prompt="HOLD on", retry=rq.Retry(max=1))
    process = rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    process.kill()
    worker.release()
    eventually(lambda: queue.redis.exists(queue.keys.result(f"{job.id}.g1")))
    rqueue.jobs.started_job_registry.cleanup(timestamp=2**40)
    rqueue.worker("--burst")
    assert rqueue.ends(job, "finished").return_value() is not None
    assert not submitted(queue, f"{job.id}.g2")


def test_stopping_a_job_cancels_its_request_and_a_requeue_submits_it_again(
    queue: Queue, rqueue: Rq, worker: MiniWorker
) -> None:
    job = rqueue.enqueue("generate", prompt="some HOLD text")
    rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    send_stop_job_command(rqueue.redis, job.id, serializer=JSONSerializer)
    rqueue.ends(job, "stopped")
    with Client(queue.url, queue.keys.queue) as client:
        result = client.job(f"{job.id}.g1").result(timeout=10)
    assert (result.status, result.cancel_reason, result.text) == ("cancelled", "stopped in RQ", "some ")
    worker.release()
    job.requeue()
    again = rqueue.ends(job, "finished").return_value()
    assert again is not None
    assert again["id"] == f"{job.id}.g2"


def test_cancelling_a_running_job_in_rq_cancels_its_request(queue: Queue, rqueue: Rq, worker: MiniWorker) -> None:
    job = rqueue.enqueue("generate", prompt="HOLD")
    rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    job.cancel()
    with Client(queue.url, queue.keys.queue) as client:
        assert client.job(f"{job.id}.g1").result(timeout=10).cancel_reason == "cancelled in RQ"


@pytest.mark.parametrize("retries", [0, 1])
def test_a_job_that_times_out_cancels_its_request_unless_it_will_be_retried(
    queue: Queue, rqueue: Rq, worker: MiniWorker, retries: int
) -> None:
    retry = rq.Retry(max=retries, interval=600) if retries else None
    job = rqueue.jobs.enqueue("producer.jobs.generate", kwargs={"prompt": "HOLD"}, job_timeout=600, retry=retry)
    process = rqueue.worker()
    eventually(lambda: held(queue, f"{job.id}.g1"))
    process.end_time()
    rqueue.ends(job, "scheduled" if retries else "failed")
    assert "JobTimeoutException" in process.log
    if not retries:
        eventually(lambda: queue.redis.exists(queue.keys.result(f"{job.id}.g1")))
    assert held(queue, f"{job.id}.g1") == bool(retries)
    assert not queue.redis.exists(queue.keys.cancel(f"{job.id}.g1"))


def test_a_job_that_runs_out_of_time_while_it_submits_cancels_its_request(queue: Queue, rqueue: Rq) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 1)
    queue.add("another")
    job = rqueue.jobs.enqueue("producer.jobs.generate", kwargs={"prompt": "x"}, job_timeout=600)
    process = rqueue.worker()
    eventually(lambda: job.get_meta(refresh=True))
    before = scripts_run(queue)
    eventually(lambda: scripts_run(queue) > before + 3)  # the enqueue script refuses it again and again
    process.end_time()
    rqueue.ends(job, "failed")
    assert queue.redis.exists(queue.keys.cancel(f"{job.id}.g1"))


def test_a_batch_file_is_finished_over_a_killed_horse(
    queue: Queue, rqueue: Rq, worker: MiniWorker, tmp_path: Path
) -> None:
    source, output = batch_file(tmp_path, ["a", "b", "HOLD c", "d", "e", "f"]), tmp_path / "out.jsonl"
    job = rqueue.enqueue("run_batch", input=str(source), output=str(output), window=3, retry=rq.Retry(max=1))
    process = rqueue.worker()
    eventually(lambda: output.exists() and len(custom_ids(output)) == 2)
    process.kill_horse()
    eventually(lambda: "terminated unexpectedly" in process.log)
    worker.release()
    assert rqueue.ends(job, "finished").return_value() == {"total": 6, "succeeded": 6, "failed": 0}
    assert custom_ids(output) == list(range(6))
    assert job.meta["tokenmill"]["succeeded"] == 6


def test_stopping_a_batch_cancels_its_requests_in_flight_and_a_requeue_finishes_it(
    queue: Queue, rqueue: Rq, worker: MiniWorker, tmp_path: Path
) -> None:
    source, output = batch_file(tmp_path, ["a", "HOLD b", "c", "d"]), tmp_path / "out.jsonl"
    job = rqueue.enqueue("run_batch", input=str(source), output=str(output), window=2)
    rqueue.worker()
    eventually(lambda: output.exists() and custom_ids(output) == [0] and queue.depth() == 2)
    send_stop_job_command(rqueue.redis, job.id, serializer=JSONSerializer)
    rqueue.ends(job, "stopped")
    eventually(lambda: queue.depth() == 0)
    assert custom_ids(output) == [0]
    worker.release()
    job.requeue()
    rqueue.ends(job, "finished")
    assert custom_ids(output) == [0, 1, 2, 3]


def test_cancelling_a_batch_that_has_submitted_no_request_logs_no_failed_cancel(
    queue: Queue, rqueue: Rq, tmp_path: Path
) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 0)
    source, output = batch_file(tmp_path, ["a"]), tmp_path / "out.jsonl"
    job = rqueue.enqueue("run_batch", input=str(source), output=str(output))
    process = rqueue.worker("--burst")
    eventually(output.exists)
    job.cancel()
    process.popen.wait(20)
    assert "BatchStopped" in process.log
    assert "could not cancel" not in process.log


def test_a_pickled_job_is_not_unpickled(rqueue: Rq, tmp_path: Path) -> None:
    sign = tmp_path / "unpickled"
    pickled = rq.Queue(rqueue.jobs.name, connection=rqueue.redis).enqueue("pathlib.Path.touch", sign)
    process = rqueue.worker("--burst")
    process.popen.wait(20)
    assert not sign.exists()
    assert pickled.get_status(refresh=True) == "failed"


def test_jobs_import_no_torch() -> None:
    code = (
        "import sys, producer.jobs, producer.clerk; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    output_of([sys.executable, "-c", code])
