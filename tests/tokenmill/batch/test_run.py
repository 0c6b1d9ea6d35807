"""A batch run over a real queue: every request gets its line once, with a bounded number in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import RedisServer, eventually
from tests.tokenmill.batch.files import read, request, write
from tests.tokenmill.batch.running import Files, Later, requests
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill import batch
from tokenmill.batch import BatchError, BatchInvalid, BatchReport, Progress, flight
from tokenmill.client.sync import Client
from tokenmill.protocol.body import parse_body
from tokenmill.protocol.keys import Keys


def test_every_request_gets_one_line_and_failed_ones_go_to_the_error_file(
    tmp_path: Path, client: Client, worker: MiniWorker
) -> None:
    lines = requests(30)
    lines[3]["body"]["prompt"] = "one FAIL"
    lines[7]["body"]["echo"] = True
    files = Files(tmp_path, lines)
    told: list[Progress] = []
    assert files.run(client, window=8, progress=told.append) == BatchReport(30, 28, 2)
    files.check()
    assert sorted(line["custom_id"] for line in read(files.errors)) == ["r3", "r7"]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in read(files.output)}
    assert texts["r5"] == "say 5 "
    assert (told[0].done, told[-1].done, told[-1].total) == (0, 30, 30)
    assert max(one.in_flight for one in told) <= 8


def test_the_progress_counts_refused_requests_up_to_the_last(tmp_path: Path, client: Client) -> None:
    lines = requests(3)
    for line in lines:
        line["body"]["echo"] = True
    told: list[Progress] = []
    assert Files(tmp_path, lines).run(client, progress=told.append) == BatchReport(3, 0, 3)
    assert (told[-1].done, told[-1].failed) == (3, 3)


def test_a_second_run_changes_nothing_and_submits_nothing(tmp_path: Path, client: Client, worker: MiniWorker) -> None:
    files = Files(tmp_path, requests(5))
    first = files.run(client)
    before = files.output.read_bytes()
    with Client("redis://127.0.0.1:1/0") as nobody:
        assert files.run(nobody) == first == BatchReport(5, 5, 0)
    assert files.output.read_bytes() == before


def test_no_request_of_a_file_with_a_fault_is_submitted(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, [*requests(3), request("r1")])
    with pytest.raises(BatchInvalid, match="line 4: duplicate_custom_id"):
        files.run(client)
    assert queue.depth() == 0
    assert not files.output.exists()


def test_no_more_than_the_window_is_in_the_queue_and_it_is_refilled(
    tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker
) -> None:
    files = Files(tmp_path, requests(40))
    files.run(client, window=6)
    assert 2 <= worker.most <= 6
    files.check()


def test_a_run_waits_while_the_queue_is_full(
    tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    queue.redis.hset(queue.keys.meta, "max_depth", 3)
    files = Files(tmp_path, requests(20))
    files.run(client, window=10)
    assert worker.most <= 3
    files.check()


def test_the_end_of_a_job_makes_room_in_a_full_queue_at_once(
    tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 3_600_000)
    queue.redis.hset(queue.keys.meta, "max_depth", 2)
    files = Files(tmp_path, requests(20))
    files.run(client, window=10)
    files.check()


def test_lines_of_one_system_prompt_go_out_together(tmp_path: Path, client: Client, queue: Queue) -> None:
    lines = []
    for number in range(9):
        system = {"role": "system", "content": "ABC"[number % 3]}
        messages = [system, {"role": "user", "content": f"{number}"}]
        lines.append(request(f"r{number}", url="/v1/chat/completions", messages=messages))
    files = Files(tmp_path, lines)
    later = Later(files, client, window=9)
    eventually(lambda: queue.depth() == 9)
    entries = queue.redis.xrange(queue.keys.lane("normal"))
    sent = [parse_body(fields[b"body"]).messages or [] for _, fields in entries]
    assert [f"{messages[0].content}{messages[1].content}" for messages in sent] == [
        *("A0", "A3", "A6", "B1", "B4", "B7", "C2", "C5", "C8")
    ]
    later.stop.set()
    assert not later.join().complete


def test_a_stopped_run_leaves_its_jobs_and_the_next_takes_their_results(
    tmp_path: Path, client: Client, queue: Queue
) -> None:
    files = Files(tmp_path, requests(12))
    later = Later(files, client, window=5)
    eventually(lambda: queue.depth() == 5)
    later.stop.set()
    report = later.join()
    assert (report, report.complete) == (BatchReport(12, 0, 0), False)
    assert queue.depth() == 5
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: queue.depth() == 0)
    worker.stop()
    # Five results wait in Redis now, and nobody serves the queue: they must be found without being computed again.
    later = Later(files, client, window=5)
    eventually(lambda: len(read(files.output)) == 5)
    worker = MiniWorker(queue)
    worker.start()
    assert later.join() == BatchReport(12, 12, 0)
    assert later.told[0].resumed == 0
    worker.stop()
    files.check()


def test_results_that_expired_meanwhile_are_computed_again(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(4))
    later = Later(files, client)
    eventually(lambda: queue.depth() == 4)
    later.stop.set()
    later.join()
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: queue.depth() == 0)
    for key in queue.redis.scan_iter(match=queue.keys.root + "*"):
        if b":result:" in key or b":job:" in key or b":group" in key:
            queue.redis.delete(key)
    assert files.run(client) == BatchReport(4, 4, 0)
    worker.stop()
    files.check()


def test_jobs_that_redis_forgot_are_submitted_again(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "RESUBMIT_S", 0.2)
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    files = Files(tmp_path, requests(6))
    later = Later(files, client)
    eventually(lambda: queue.depth() == 6)
    for key in queue.redis.scan_iter(match=queue.keys.root + "*"):
        queue.redis.delete(key)
    eventually(lambda: queue.depth() == 6)
    worker = MiniWorker(queue)
    worker.start()
    assert later.join() == BatchReport(6, 6, 0)
    worker.stop()
    files.check()


def test_jobs_are_submitted_again_soon_after_redis_came_back_empty(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "LOST_LOOK_S", 0.1)
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    files = Files(tmp_path, requests(6))
    later = Later(files, client)
    eventually(lambda: queue.depth() == 6)
    queue.redis.delete(*queue.redis.scan_iter(match=queue.keys.root + "*"))  # at once, as after a restart
    eventually(lambda: queue.depth() == 6)
    worker = MiniWorker(queue)
    worker.start()
    assert later.join() == BatchReport(6, 6, 0)
    worker.stop()
    files.check()


def test_jobs_whose_lines_are_written_are_deleted_in_redis(
    tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker
) -> None:
    Files(tmp_path, requests(10)).run(client)
    left = [key for key in queue.redis.scan_iter(match=queue.keys.root + "*") if b":group" not in key]
    assert not [key for key in left if b":result:" in key or b":out:" in key or b":job:" in key]
    (stream,) = queue.redis.scan_iter(match=queue.keys.root + "group-out:*")
    assert queue.redis.xlen(stream) == 0


def test_a_run_after_a_cancel_submits_the_cancelled_requests_again(
    tmp_path: Path, client: Client, queue: Queue
) -> None:
    files = Files(tmp_path, [request("hold", "HOLD x"), *requests(5)])
    worker = MiniWorker(queue)
    worker.start()
    later = Later(files, client, window=4)
    eventually(lambda: queue.depth() == 4)
    with pytest.raises(BatchError, match="another run writes to it"):
        batch.cancel(files.input, files.output, files.errors, client=client)
    later.stop.set()
    later.join()
    assert batch.cancel(files.input, files.output, files.errors, client=client) == 4
    eventually(lambda: queue.depth() == 0)
    for key in queue.redis.scan_iter(match=queue.keys.root + "*"):
        if b":group" in key or b":job:" in key:  # they expire
            queue.redis.delete(key)
    assert batch.cancel(files.input, files.output, files.errors, client=client) == 0
    worker.release()
    assert files.run(client) == BatchReport(6, 6, 0)
    worker.stop()
    files.check()


def test_a_cancel_that_asks_another_redis_fails_and_leaves_the_run_as_it_was(
    tmp_path: Path, client: Client, queue: Queue
) -> None:
    files = Files(tmp_path, requests(4))
    later = Later(files, client)
    eventually(lambda: queue.depth() == 4)
    later.stop.set()
    later.join()
    state = tmp_path / f"{files.output.name}.state"
    before = state.read_bytes()
    another = queue.url.rpartition("/")[0] + "/9"
    with Client(another, queue.keys.queue) as other, pytest.raises(batch.BatchNotFound, match="no request of the run"):
        batch.cancel(files.input, files.output, files.errors, client=other)
    assert state.read_bytes() == before
    assert batch.cancel(files.input, files.output, files.errors, client=client) == 4
    assert queue.depth() == 0


def test_a_job_that_is_cancelled_by_id_has_its_error_line(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(3))
    later = Later(files, client)
    eventually(lambda: queue.depth() == 3)
    for _, fields in queue.redis.xrange(queue.keys.lane("normal")):
        client.job(fields[b"id"].decode()).cancel("by hand")
    assert later.join() == BatchReport(3, 0, 3)
    assert {line["error"]["code"] for line in read(files.errors)} == {"batch_cancelled"}
    files.check()


def test_an_input_that_is_changed_is_noticed(tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker) -> None:
    files = Files(tmp_path, requests(3))
    later = Later(files, client)
    later.join()
    write(files.input, [*requests(3), request("more")])
    with pytest.raises(BatchError, match="another input, or the input was changed"):
        files.run(client)


def test_an_input_that_is_changed_while_it_runs_is_noticed(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(50))
    later = Later(files, client, window=2)
    eventually(lambda: queue.depth() == 2)
    text = files.input.read_text()
    with files.input.open("r+") as same:
        same.write(text.replace("r4", "xx"))
    worker = MiniWorker(queue)
    worker.start()
    with pytest.raises(BatchError, match=r"line 5 was changed while the batch ran"):
        later.join()
    worker.stop()


def test_inputs_and_outputs_are_kept_apart(tmp_path: Path, client: Client) -> None:
    files = Files(tmp_path, requests(1))
    before = files.input.read_bytes()
    for output, errors in ((files.input, None), (files.output, files.input)):
        with pytest.raises(BatchError, match="is the input"):
            batch.run(files.input, output, errors, client=client)
    with pytest.raises(BatchError, match=r"without \.gz"):
        batch.run(files.input, tmp_path / "out.gz", client=client)
    assert files.input.read_bytes() == before
    with pytest.raises(ValueError, match="window"):
        files.run(client, window=0)
    with pytest.raises(ValueError, match="priority"):
        files.run(client, priority="urgent")


def test_no_request_of_a_file_with_another_url_is_submitted(tmp_path: Path, client: Client, queue: Queue) -> None:
    files = Files(tmp_path, requests(3))
    with pytest.raises(BatchInvalid, match="url_mismatch"):
        files.run(client, url="/v1/chat/completions")
    assert queue.depth() == 0
    with pytest.raises(ValueError, match="url: must be one of"):
        files.run(client, url="/v1/files")


def test_the_requests_of_a_run_count_against_the_quota_of_its_tenant(
    tmp_path: Path, client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "IDLE_MS", 50)
    queue.redis.hset(queue.keys.meta, "max_per_tenant", 2)
    files = Files(tmp_path, requests(9))
    later = Later(files, client, url="/v1/completions", tenant="acme")
    eventually(lambda: queue.depth() == 2)
    tenants = [fields[b"tenant"] for _, fields in queue.redis.xrange(queue.keys.lane("normal"))]
    assert tenants == [b"acme", b"acme"]
    worker = MiniWorker(queue)
    worker.start()
    assert later.join() == BatchReport(9, 9, 0)
    worker.stop()
    assert worker.most == 2
    files.check()
    with pytest.raises(ValueError, match="tenant: must match"):
        files.run(client, tenant="a b")


def test_two_files_in_one_process_do_not_mix(tmp_path: Path, client: Client, worker: MiniWorker) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(Files(tmp_path / name, requests(10)))
    runs = [Later(files, client) for files in made]
    for one, files in zip(runs, made, strict=True):
        assert one.join() == BatchReport(10, 10, 0)
        files.check()


def test_large_bodies_narrow_the_window(
    tmp_path: Path, client: Client, queue: Queue, worker: MiniWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr("tokenmill.batch.runner.CHUNK_BYTES", 1 << 18)
    files = Files(tmp_path, [request(f"r{number}", "x" * 500_000) for number in range(6)])
    files.run(client)
    assert worker.most <= 3
    files.check()


@pytest.mark.redis_server
def test_a_run_waits_while_redis_is_full_or_away(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    admin = own_redis.client()
    queue = Queue(own_redis.url, admin, Keys("q"))
    files = Files(tmp_path, requests(20))
    admin.config_set("maxmemory", 1)
    with Client(own_redis.url, "q", block_ms=300) as client:
        later = Later(files, client, window=4)
        eventually(lambda: "waiting for Redis" in caplog.text)
        admin.config_set("maxmemory", 0)
        eventually(lambda: queue.depth() == 4)
        own_redis.kill()
        eventually(lambda: caplog.text.count("waiting for Redis") >= 2)
        own_redis.start()
        worker = MiniWorker(queue)
        worker.start()
        assert later.join() == BatchReport(20, 20, 0)
        worker.stop()
    admin.close()
    files.check()
