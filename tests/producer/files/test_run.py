"""Batches of the HTTP API from state to state, in this process: their ends, their files, and runs that are cut off."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from producer.files import run as running
from producer.files.catalog import delete_expired
from producer.files.folder import Folder, FolderBucket
from tests.producer.files.tenant import Tenant
from tests.support import eventually
from tests.tokenmill.batch.files import CHAT, request
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.batch import BatchError
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.job import parse_entry
from tokenmill.protocol.scripts import Ref


@pytest.fixture
def tenant(queue: Queue, tmp_path: Path) -> Tenant:
    return Tenant(tmp_path / "files", queue)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "POLL_S", 0.02)
    monkeypatch.setattr(running, "COUNTS_S", 0.0)


def numbers(count: int) -> list[str]:
    return [str(n) for n in range(count)]


def later(seconds: float) -> Callable[[float], bool]:
    """Make way after so many seconds."""
    end = time.monotonic() + seconds
    return lambda start_s: time.monotonic() > end


def test_a_batch_is_completed_with_a_line_for_every_request(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "two", "FAIL", "four"])
    before = tenant.batch(batch_id)
    assert (before.status, before.request_counts and before.request_counts.total) == ("validating", 0)
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.status == "completed"
    good, bad = tenant.check_whole(batch_id, numbers(4))
    assert [*bad] == ["2"]
    assert good["1"]["response"]["body"]["choices"][0]["text"] == "two "
    moments = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert (batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at) == (None,) * 4
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (3, 3, 6)


def test_an_output_without_lines_becomes_no_file(tenant: Tenant, worker: MiniWorker) -> None:
    well, ill = tenant.of(["one"]), tenant.of(["FAIL"])
    assert tenant.run(well)
    assert tenant.batch(well).error_file_id is None
    assert tenant.run(ill)
    batch = tenant.batch(ill)
    assert (batch.status, batch.output_file_id, batch.usage) == ("completed", None, None)
    assert [*tenant.lines(batch.error_file_id)] == ["0"]


def test_the_counts_are_whole_where_every_request_is_refused_at_once(tenant: Tenant, queue: Queue) -> None:
    batch_id = tenant.create(request(str(n), echo=True) for n in range(3))
    assert tenant.run(batch_id)
    assert tenant.batch(batch_id).status == "completed"
    assert len(tenant.check_whole(batch_id, numbers(3))[1]) == 3
    assert queue.depth() == 0


def test_the_requests_are_of_the_tenant_and_in_the_lowest_lane(tenant: Tenant, queue: Queue) -> None:
    batch_id = tenant.of(["one"])
    thread = tenant.start(batch_id, lambda start_s: bool(queue.depth()))
    eventually(queue.depth)
    [(_, fields)] = queue.redis.xrange(queue.keys.lane("low"))
    assert fields[b"tenant"] == b"t"
    thread.join()


@pytest.mark.parametrize(
    ("lines", "codes", "params"),
    [
        ([], ["empty_file"], [None]),
        (["nonsense"], ["invalid_json_line"], [None]),
        ([request("a"), request("a")], ["duplicate_custom_id"], ["custom_id"]),
        ([request("a", url=CHAT)], ["url_mismatch"], ["url"]),
        (
            [{**request("a"), "method": "GET"}, request("b", url="/v1/x")],
            ["invalid_method", "invalid_url"],
            ["method", "url"],
        ),
    ],
)
def test_a_faulty_file_fails_its_batch_and_submits_nothing(
    tenant: Tenant, queue: Queue, lines: list[Any], codes: list[str], params: list[str | None]
) -> None:
    batch_id = tenant.create(lines)
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == codes
    assert [error.param for error in batch.errors.data] == params
    assert str(tenant.folder) not in batch.to_json()
    assert (queue.depth(), batch.output_file_id, batch.error_file_id) == (0, None, None)
    assert not [*tenant.storage.open_batches()]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_compressed_file_fails_its_batch_without_being_unpacked(tenant: Tenant, cancelled: bool) -> None:
    batch_id = tenant.create(gzip.compress(json.dumps(request("a")).encode()))
    if cancelled:
        tenant.cancel(batch_id)
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["invalid_file"]


# ── cancel and expiry ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_cancelled_before_its_start_submits_nothing_and_names_every_request(
    tenant: Tenant, queue: Queue
) -> None:
    batch_id = tenant.of(["one", "two"])
    assert tenant.cancel(batch_id).status == "cancelling"
    assert tenant.batch(batch_id).status == "cancelling"
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    assert batch.in_progress_at is None
    _, bad = tenant.check_whole(batch_id, numbers(2))
    assert {line["error"]["code"] for line in bad.values()} == {"batch_cancelled"}
    assert queue.depth() == 0


def test_a_batch_cancelled_in_mid_run_keeps_what_is_done_and_ends_what_runs(
    tenant: Tenant, queue: Queue, worker: MiniWorker
) -> None:
    batch_id = tenant.of(["one", "HOLD two", "three"])
    thread = tenant.start(batch_id)
    eventually(lambda: (counts := tenant.batch(batch_id).request_counts) and counts.completed == 1)
    asked = tenant.cancel(batch_id)
    assert (asked.status, asked.cancelled_at) == ("cancelling", None)
    thread.join()
    batch = tenant.batch(batch_id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at == asked.cancelling_at
    good, bad = tenant.check_whole(batch_id, numbers(3))
    assert ([*good], {line["error"]["code"] for line in bad.values()}) == (["0"], {"batch_cancelled"})
    eventually(lambda: queue.depth() == 0)


def test_a_second_cancel_changes_nothing(tenant: Tenant) -> None:
    batch_id = tenant.of(["one"])
    first = tenant.cancel(batch_id)
    assert tenant.cancel(batch_id) == first
    tenant.run(batch_id)
    ended = tenant.batch(batch_id)
    assert tenant.cancel(batch_id) == ended


def test_a_batch_that_has_ended_cannot_be_cancelled(tenant: Tenant, worker: MiniWorker) -> None:
    well, ill = tenant.of(["one"]), tenant.create([])
    for batch_id in (well, ill):
        tenant.run(batch_id)
        before = tenant.batch(batch_id)
        with pytest.raises(ApiError, match=f"is {before.status}") as refused:
            tenant.cancel(batch_id)
        assert refused.value.status == 409
        assert tenant.batch(batch_id) == before


def test_a_batch_expires_before_its_start(tenant: Tenant, queue: Queue) -> None:
    batch_id = tenant.of(["one"], "1s")
    eventually(lambda: time.time() >= (tenant.batch(batch_id).expires_at or 0))
    assert tenant.run(batch_id)
    assert tenant.batch(batch_id).status == "expired"
    _, bad = tenant.check_whole(batch_id, ["0"])
    assert (bad["0"]["error"]["code"], queue.depth()) == ("batch_expired", 0)


def test_a_batch_expires_in_mid_run_with_what_is_done(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "HOLD two"], "2s")
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.status == "expired"
    assert (batch.expired_at or 0) >= (batch.expires_at or 0)
    good, bad = tenant.check_whole(batch_id, numbers(2))
    assert ([*good], bad["1"]["error"]["code"]) == (["0"], "batch_expired")


def test_a_cancelled_batch_ends_in_time_though_its_worker_died_and_its_runs_make_way(
    tenant: Tenant, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CLOSE_S", 4.0)
    batch_id = tenant.of(["one", "two"])
    tenant.run(batch_id, lambda start_s: bool(queue.depth()))
    scripts = queue.scripts()
    for delivery in scripts.read(1) or ():
        entry = parse_entry(delivery.fields)
        scripts.start(Ref(delivery.lane, delivery.entry, entry.id), entry.identity, prompt_tokens=1)
    tenant.cancel(batch_id)
    runs = 1
    while not tenant.run(batch_id, later(1.5)):
        runs += 1
        assert tenant.batch(batch_id).status == "cancelling"
    assert runs > 1
    _, bad = tenant.check_whole(batch_id, numbers(2))
    assert {line["error"]["code"] for line in bad.values()} == {"batch_cancelled"}


def test_the_files_of_a_batch_expire_after_its_output_expires_after(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.create([request("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
    tenant.run(batch_id)
    record = tenant.files.load(tenant.batch(batch_id).output_file_id or "") or {}
    assert record["expires_at"] - record["created_at"] == 3600
    assert (tenant.batches.load(batch_id) or {})["ttl_s"] is None


def test_an_ended_batch_is_deleted_after_its_time_and_a_running_one_is_not(tenant: Tenant, worker: MiniWorker) -> None:
    ended, waiting = tenant.of(["one"]), tenant.of(["one"])
    tenant.run(ended)
    for batch_id in (ended, waiting):
        tenant.batches.save(batch_id, {**(tenant.batches.load(batch_id) or {}), "ttl_s": 0, "completed_at": 1})
    assert delete_expired(tenant.storage)["batches"] == 1
    assert tenant.batches.ids() == [waiting]


def test_a_damaged_record_does_not_keep_expired_files_and_batches(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one"])
    broken, expired = tenant.batch(batch_id).input_file_id, tenant.upload(b"")
    (tenant.files.content(broken).parent / "record.json").write_text("{")
    tenant.files.save(expired, {**(tenant.files.load(expired) or {}), "expires_at": 1})
    tenant.run(batch_id)
    tenant.batches.save(batch_id, {**(tenant.batches.load(batch_id) or {}), "ttl_s": 0, "completed_at": 1})
    assert delete_expired(tenant.storage) == {"files": 1, "batches": 1, "leftovers": 0}


def test_a_batch_of_a_faulty_file_that_was_cancelled_fails(tenant: Tenant) -> None:
    batch_id = tenant.create(["nonsense"])
    tenant.cancel(batch_id)
    tenant.run(batch_id)
    assert tenant.batch(batch_id).status == "failed"


# ── runs that are cut off ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_makes_way_and_a_later_one_goes_on(tenant: Tenant, queue: Queue, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "HOLD two", "three"])
    begun = []

    def makes_way(start_s: float) -> bool:
        begun.append(start_s)
        counts = tenant.batch(batch_id).request_counts
        return counts is not None and counts.completed == 1

    assert not tenant.run(batch_id, makes_way)
    assert begun[-1] > 0
    assert queue.depth() == 2
    assert [found for found, _, _ in tenant.storage.open_batches()] == [batch_id]
    assert tenant.batch(batch_id).status == "in_progress"
    worker.release()
    assert tenant.run(batch_id)
    good, _ = tenant.check_whole(batch_id, numbers(3))
    assert len(good) == 3


def test_the_batch_of_another_queue_is_refused(tenant: Tenant, queue: Queue) -> None:
    batch_id = tenant.of(["one"])
    tenant.batches.save(batch_id, {**(tenant.batches.load(batch_id) or {}), "root": "tokenmill:{other}:"})
    with pytest.raises(BatchError, match="other"):
        tenant.run(batch_id)
    assert (queue.depth(), tenant.batch(batch_id).status) == (0, "validating")


def test_a_batch_whose_files_cannot_be_used_is_tried_until_long_after_its_time_and_then_fails(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BatchError(f"{tenant.folder}: No space left on device")

    monkeypatch.setattr("tokenmill.batch.run", refuse)
    monkeypatch.setattr("tokenmill.batch.close", refuse)
    batch_id = tenant.of(["one"])
    for _ in range(2):
        with pytest.raises(BatchError, match="space"):
            tenant.run(batch_id)
        assert tenant.batch(batch_id).status == "validating"
    late = {"expires_at": int(time.time()) - running.GIVE_UP_S}
    tenant.batches.save(batch_id, {**(tenant.batches.load(batch_id) or {}), **late})
    assert tenant.run(batch_id)
    batch = tenant.batch(batch_id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["internal_error"]
    assert str(tenant.folder) not in batch.to_json()


def test_a_batch_that_another_process_runs_is_left_alone(tenant: Tenant) -> None:
    batch_id = tenant.of(["one"])
    with tenant.batches.lock(batch_id) as held:
        assert held
        assert tenant.run(batch_id)
    assert tenant.batch(batch_id).status == "validating"
    assert [found for found, _, _ in tenant.storage.open_batches()] == [batch_id]


def test_a_batch_that_has_ended_is_not_run_again(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one"])
    tenant.run(batch_id)
    ended, files = tenant.batch(batch_id), tenant.files.ids()
    tenant.storage.open_batch(batch_id, tenant.name)
    assert tenant.run(batch_id)
    assert (tenant.batch(batch_id), tenant.files.ids()) == (ended, files)
    assert not [*tenant.storage.open_batches()]


def test_the_input_is_deleted_while_its_batch_runs(tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "HOLD two"])
    thread = tenant.start(batch_id)
    eventually(lambda: (counts := tenant.batch(batch_id).request_counts) and counts.completed == 1)
    assert tenant.files.delete(tenant.batch(batch_id).input_file_id)
    worker.release()
    thread.join()
    assert tenant.batch(batch_id).status == "completed"
    tenant.check_whole(batch_id, numbers(2))


class Killed(BaseException):
    """Stands for SIGKILL at a moment of the run."""


STEPS: tuple[tuple[type[Any], str], ...] = (
    *((FolderBucket, name) for name in ("save", "add", "take_in", "clear")),
    (Folder, "close_batch"),
)
"""What a run writes into the storage."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Let the run die before, or after, its nth write; return a function that tells the number of moments so far."""
    passed = 0

    def at() -> None:
        nonlocal passed
        passed += 1
        if passed == moment + 1:
            raise Killed

    for kind, name in STEPS:
        original = getattr(kind, name)

        def step(*args: Any, original: Any = original) -> Any:
            at()
            done = original(*args)
            at()
            return done

        monkeypatch.setattr(kind, name, step)
    return lambda: passed


@pytest.mark.parametrize(("end", "window"), [("completed", "24h"), ("cancelled", "24h"), ("expired", "1s")])
def test_a_run_that_is_killed_at_any_write_is_finished_by_the_next_with_no_file_twice(
    tenant: Tenant, worker: MiniWorker, end: str, window: str
) -> None:
    moment = 0
    while True:
        own = Tenant(tenant.folder / str(moment), tenant.queue)
        batch_id = own.of(["one", "FAIL"], window)
        if end == "cancelled":
            own.cancel(batch_id)
        if end == "expired":
            record = own.batches.load(batch_id) or {}
            own.batches.save(batch_id, {**record, "expires_at": int(time.time())})
        with pytest.MonkeyPatch.context() as patched:
            passed = kill_at(patched, moment)
            with suppress(Killed):
                own.run(batch_id)
            finished = passed() <= moment
        assert own.run(batch_id)
        assert own.batch(batch_id).status == end
        own.check_whole(batch_id, numbers(2))
        if finished:
            break
        moment += 1
    assert moment > 10
