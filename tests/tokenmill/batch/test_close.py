"""Closing a batch: every request gets its one line, whatever was in flight and whatever was killed."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import RedisServer, eventually
from tests.tokenmill.batch.files import read, request, write
from tests.tokenmill.batch.running import Files, Later, requests
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill import batch
from tokenmill.batch import BatchError, BatchInvalid, BatchReport, BatchStopped, flight
from tokenmill.client.sync import Client
from tokenmill.protocol.keys import Keys

NOWHERE = "redis://127.0.0.1:1/0"


def codes(path: Path) -> list[str]:
    return [line["error"]["code"] for line in read(path)]


def begun(files: Files, client: Client, queue: Queue, window: int) -> None:
    """Start a run, and stop it once its window is in the queue."""
    later = Later(files, client, window=window)
    eventually(lambda: queue.depth() == window)
    later.stop.set()
    assert not later.join().complete


def expire(queue: Queue) -> None:
    """Delete what Redis knows of jobs, as when their time is over."""
    for key in queue.redis.scan_iter(match=queue.keys.root + "*"):
        if b":result:" in key or b":job:" in key or b":group" in key or b":out:" in key:
            queue.redis.delete(key)


def test_requests_in_flight_are_cancelled_and_every_request_has_its_line(
    tmp_path: Path, client: Client, queue: Queue
) -> None:
    files = Files(tmp_path, requests(12))
    begun(files, client, queue, window=5)
    told: list[batch.Progress] = []
    assert files.close(client, reason="no longer wanted", progress=told.append) == BatchReport(12, 0, 12)
    files.check()
    assert queue.depth() == 0
    assert codes(files.errors) == ["batch_cancelled"] * 12
    assert {line["error"]["message"] for line in read(files.errors)} == {"no longer wanted"}
    assert all(line["response"] is None for line in read(files.errors))
    assert (told[0].done, told[-1].done, told[-1].total) == (0, 12, 12)
    assert not list(queue.redis.scan_iter(match=queue.keys.root + "job:*"))


def test_requests_that_ended_before_the_close_keep_their_results(tmp_path: Path, client: Client, queue: Queue) -> None:
    lines = requests(12)
    lines[1]["body"]["prompt"] = "one FAIL"
    files = Files(tmp_path, lines)
    begun(files, client, queue, window=5)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: queue.depth() == 0)
    worker.stop()
    assert files.close(client, code="batch_expired", reason="too late") == BatchReport(12, 4, 8)
    files.check()
    assert sorted(codes(files.errors)) == ["batch_expired"] * 7 + ["engine_error"]


def test_a_request_that_succeeds_while_it_is_being_cancelled_has_its_result(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path, requests(3))
    begun(files, client, queue, window=3)
    worker = MiniWorker(queue)
    cancel_all = client.cancel_all

    def late(ids: Any, reason: str) -> Any:
        worker.start()
        eventually(lambda: queue.depth() == 0)
        return cancel_all(ids, reason)

    monkeypatch.setattr(client, "cancel_all", late)
    assert files.close(client) == BatchReport(3, 3, 0)
    worker.stop()
    files.check()


def test_running_requests_end_with_the_code_of_the_close(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, [request("hold", "some HOLD more"), *requests(4)])
    worker = MiniWorker(queue)
    begun(files, client, queue, window=2)
    worker.start()
    eventually(lambda: b"running" in [queue.redis.hget(key, "state") for key in jobs(queue)])
    assert files.close(client, code="batch_expired", reason="late") == BatchReport(5, 0, 5)
    worker.stop()
    files.check()
    assert codes(files.errors) == ["batch_expired"] * 5
    assert {line["error"]["message"] for line in read(files.errors)} == {"late"}


def jobs(queue: Queue) -> list[bytes]:
    return list(queue.redis.scan_iter(match=queue.keys.root + "job:*"))


def test_a_request_that_no_worker_ends_gets_its_line_after_the_grace_and_stays_cancelled(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    files = Files(tmp_path, [request("lost", "one DIE"), *requests(3)])
    begun(files, client, queue, window=1)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: [queue.redis.hget(key, "state") for key in jobs(queue)] == [b"running"])
    worker.stop()
    assert files.close(client, grace_s=0.2) == BatchReport(4, 0, 4)
    files.check()
    assert queue.redis.exists(queue.keys.cancel(read(files.errors)[-1]["id"].removeprefix("batch_req_")))


def test_a_second_close_changes_nothing_and_does_not_need_redis(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(6))
    begun(files, client, queue, window=3)
    files.close(client)
    before = files.output.read_bytes(), files.errors.read_bytes()
    with Client(NOWHERE) as nobody:
        assert files.close(nobody, code="batch_expired") == BatchReport(6, 0, 6)
        assert files.run(nobody) == BatchReport(6, 0, 6)
    assert (files.output.read_bytes(), files.errors.read_bytes()) == before


def test_a_batch_that_never_began_is_closed_without_redis(tmp_path: Path) -> None:
    files = Files(tmp_path, requests(600))
    with Client(NOWHERE) as nobody:
        assert files.close(nobody) == BatchReport(600, 0, 600)
    files.check()


def test_a_close_without_an_error_file_writes_to_the_output(tmp_path: Path, client: Client) -> None:
    path = write(tmp_path / "in.jsonl", requests(3))
    assert batch.close(path, tmp_path / "out.jsonl", client=client) == BatchReport(3, 0, 3)
    assert codes(tmp_path / "out.jsonl") == ["batch_cancelled"] * 3


def test_requests_whose_results_have_expired_get_the_error_line(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(8))
    begun(files, client, queue, window=4)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: queue.depth() == 0)
    worker.stop()
    expire(queue)
    assert files.close(client, code="batch_expired") == BatchReport(8, 0, 8)
    files.check()
    assert codes(files.errors) == ["batch_expired"] * 8


def test_a_job_that_redis_loses_during_the_close_gets_the_error_line(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    monkeypatch.setattr(flight, "LOST_LOOK_S", 0.1)
    files = Files(tmp_path, [request("hold", "HOLD"), *requests(2)])
    begun(files, client, queue, window=1)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: [queue.redis.hget(key, "state") for key in jobs(queue)] == [b"running"])
    monkeypatch.setattr(worker, "_cancelled", lambda _: None)
    later = Later(files, client, Files.close)
    eventually(lambda: later.told and later.told[-1].in_flight == 1)
    queue.redis.delete(*queue.redis.scan_iter(match=queue.keys.root + "*"))
    assert later.join() == BatchReport(3, 0, 3)
    files.check()
    worker.release()


def test_a_stopped_close_is_continued_by_the_next(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    files = Files(tmp_path, [request("hold", "HOLD"), *requests(5)])
    begun(files, client, queue, window=3)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: queue.depth() == 3 and b"running" in [queue.redis.hget(key, "state") for key in jobs(queue)])
    monkeypatch.setattr(worker, "_cancelled", lambda _: None)
    later = Later(files, client, Files.close)
    eventually(lambda: later.told and later.told[-1].in_flight == 1)
    later.stop.set()
    report = later.join()
    assert (report.done, report.complete) == (5, False)
    with pytest.raises(BatchStopped):
        files.close(client, stop=stopped())
    worker.release()
    assert files.close(client).complete
    worker.stop()
    files.check()


def stopped() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def test_a_close_and_a_run_refuse_each_other(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(5))
    later = Later(files, client, window=2)
    eventually(lambda: queue.depth() == 2)
    with pytest.raises(BatchError, match="another run writes to it"):
        files.close(client)
    later.stop.set()
    later.join()
    assert queue.depth() == 2


def test_a_close_at_another_queue_is_refused_and_changes_nothing(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(4))
    begun(files, client, queue, window=2)
    with Client(queue.url, "other") as other, pytest.raises(BatchError, match="name the same --queue"):
        files.close(other)
    assert read(files.errors) == []
    assert queue.depth() == 2


def test_a_close_refuses_unknown_codes_and_faulty_inputs(tmp_path: Path, client: Client) -> None:
    files = Files(tmp_path, [*requests(3), request("r1")])
    with pytest.raises(ValueError, match="batch_cancelled, batch_expired"):
        files.close(client, code="failed")
    with pytest.raises(BatchInvalid, match="duplicate_custom_id"):
        files.close(client)
    assert not files.output.exists()


def test_a_close_after_a_cancel_gives_every_request_its_line(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(6))
    begun(files, client, queue, window=4)
    assert batch.cancel(files.input, files.output, files.errors, client=client) == 4
    assert files.close(client) == BatchReport(6, 0, 6)
    files.check()


def test_a_job_that_was_cancelled_by_hand_keeps_its_own_reason(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(3))
    begun(files, client, queue, window=3)
    (_, fields), *_ = queue.redis.xrange(queue.keys.lane("normal"))
    client.job(fields[b"id"].decode()).cancel("by hand")
    assert files.close(client, code="batch_expired", reason="late") == BatchReport(3, 0, 3)
    assert sorted(codes(files.errors)) == ["batch_cancelled", "batch_expired", "batch_expired"]
    files.check()


@pytest.mark.parametrize("seed", range(4))
def test_lines_are_whole_after_any_number_of_broken_off_calls(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """An error at a random step, in place of a kill: what is on the disk by then is all that the next call knows."""
    monkeypatch.setattr(flight, "IDLE_MS", 20)
    rng = random.Random(seed)
    files = Files(tmp_path, requests(40))
    worker = MiniWorker(queue)
    worker.start()
    for _ in range(6):
        with monkeypatch.context() as broken:
            break_after(broken, rng.randrange(12))
            call: Any = files.run if rng.random() < 0.5 else files.close
            try:
                call(client, **({"window": 5} if call == files.run else {}))
            except Broken:
                tear(rng, files)
    assert files.close(client).complete
    worker.stop()
    files.check()


class Broken(BaseException):
    """The end of a process, at a step of the test's choice."""


def break_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Raise `Broken` at the step with this number that writes, syncs, submits, cancels, looks or deletes."""
    left = [steps]

    def broken(function: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Broken
            return function(*args, **options)

        return step

    for owner, name in (
        (batch.output.Outputs, "append"),
        (batch.output.Outputs, "sync"),
        (Client, "submit_all"),
        (Client, "cancel_all"),
        (Client, "states"),
        (Client, "results"),
        (Client, "forget"),
    ):
        patch.setattr(owner, name, broken(getattr(owner, name)))


def tear(rng: random.Random, files: Files) -> None:
    """Leave the beginning of a line at the end of an output, as a kill within a write does."""
    path = rng.choice((files.output, files.errors))
    if path.exists() and path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b'{"id":"batch_req_0'[: rng.randrange(1, 18)])


@pytest.mark.redis_server
def test_a_close_waits_while_redis_is_away_and_its_stop_ends_the_wait(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    admin = own_redis.client()
    queue = Queue(own_redis.url, admin, Keys("q"))
    files = Files(tmp_path, [request("hold", "HOLD"), *requests(7)])
    with Client(own_redis.url, "q", block_ms=300) as client:
        begun(files, client, queue, window=4)
    own_redis.kill()
    with Client(own_redis.url, "q", block_ms=300) as client:
        stopping = Later(files, client, Files.close)
        eventually(lambda: "waiting for Redis" in caplog.text)
        stopping.stop.set()
        with pytest.raises(BatchStopped):
            stopping.join()
    assert read(files.errors) == []
    caplog.clear()
    with Client(own_redis.url, "q", block_ms=300) as client:
        later = Later(files, client, Files.close)
        eventually(lambda: "waiting for Redis" in caplog.text)
        own_redis.start()
        assert later.join() == BatchReport(8, 0, 8)
    admin.close()
    files.check()
