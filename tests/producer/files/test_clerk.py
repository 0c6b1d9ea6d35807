"""Batches in real `rq worker` processes of the clerk's class: kills, stops, several clerks, lost keys of RQ."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rq
from rq.job import Job
from rq.serializers import JSONSerializer

from producer.files.rqjobs import enqueue_batch
from tests.producer.files.tenant import Tenant
from tests.producer.gateway.harness import Stack, stack
from tests.support import RedisServer, eventually
from tests.tokenmill.batch.files import request
from tests.tokenmill.mini import MiniWorker

pytestmark = pytest.mark.redis_server
LONG = 60.0
"""Seconds for what RQ notices by a heartbeat, or by a chore, on a loaded machine."""


@pytest.fixture
def office(redis_server: RedisServer, tmp_path: Path) -> Iterator[Stack]:
    with stack(redis_server.url, tmp_path) as made:
        yield made


@pytest.fixture
def worker(office: Stack) -> Iterator[MiniWorker]:
    made = MiniWorker(office.queue)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def tenant(office: Stack) -> Tenant:
    return Tenant(office.files, office.queue)


def rq_queue(office: Stack) -> rq.Queue:
    return rq.Queue(office.batch_queue, connection=office.queue.redis, serializer=JSONSerializer)


def enqueue(office: Stack, tenant: Tenant, batch_id: str) -> None:
    enqueue_batch(rq_queue(office), tenant.name, batch_id)


def ends(tenant: Tenant, batch_id: str, status: str = "completed") -> None:
    eventually(lambda: tenant.batch(batch_id).status == status, LONG, 0.05)


def done(tenant: Tenant, batch_id: str, number: int) -> Callable[[], bool]:
    """Whether so many requests of a batch have succeeded."""

    def probe() -> bool:
        counts = tenant.batch(batch_id).request_counts
        return counts is not None and counts.completed >= number

    return probe


def numbers(count: int) -> list[str]:
    return [str(n) for n in range(count)]


def forget_rq(office: Stack) -> None:
    """Delete RQ's keys that have to do with this test's RQ queue, and all its jobs."""
    redis, name = office.queue.redis, office.batch_queue
    for job_id in (key.removeprefix(b"rq:job:").decode() for key in redis.scan_iter("rq:job:*")):
        if redis.hget(f"rq:job:{job_id}", "origin") == name.encode():
            redis.delete(f"rq:job:{job_id}", *redis.scan_iter(f"rq:*{job_id}*"))
    redis.delete(*redis.scan_iter(f"rq:*{name}*"))


def test_a_clerk_runs_a_batch(office: Stack, tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "two", "FAIL"])
    enqueue(office, tenant, batch_id)
    office.clerk()
    ends(tenant, batch_id)
    tenant.check_whole(batch_id, numbers(3))


@pytest.mark.parametrize("whole", [False, True], ids=["horse", "clerk"])
def test_a_batch_is_finished_after_a_sigkill(office: Stack, tenant: Tenant, worker: MiniWorker, whole: bool) -> None:
    batch_id = tenant.of(["one", "two", "HOLD three", "four", "five"])
    enqueue(office, tenant, batch_id)
    first = office.clerk()
    eventually(done(tenant, batch_id, 2), LONG)
    if whole:
        first.kill()
        office.clerk()
    else:
        first.kill_horse()
    worker.release()
    ends(tenant, batch_id)
    good, _ = tenant.check_whole(batch_id, numbers(5))
    assert len(good) == 5


def test_a_clerk_that_is_stopped_ends_soon_and_another_finishes_the_batch(
    office: Stack, tenant: Tenant, worker: MiniWorker
) -> None:
    batch_id = tenant.of(["one", "HOLD two", "three"])
    enqueue(office, tenant, batch_id)
    first = office.clerk()
    eventually(done(tenant, batch_id, 1), LONG)
    assert first.stop(LONG) == 0
    assert tenant.batch(batch_id).status == "in_progress"
    assert batch_id in rq_queue(office).job_ids
    office.clerk()
    worker.release()
    ends(tenant, batch_id)
    tenant.check_whole(batch_id, numbers(3))


def test_two_clerks_run_two_batches_at_once(office: Stack, tenant: Tenant, worker: MiniWorker) -> None:
    batches = [tenant.of(["HOLD one", "two"]), tenant.of(["HOLD one", "two"])]
    for batch_id in batches:
        enqueue(office, tenant, batch_id)
    office.clerk()
    office.clerk()
    for batch_id in batches:
        eventually(lambda batch_id=batch_id: tenant.batch(batch_id).status == "in_progress", LONG)  # type: ignore[misc]
    worker.release()
    for batch_id in batches:
        ends(tenant, batch_id)
        batch = tenant.batch(batch_id)
        assert sorted(tenant.lines(batch.output_file_id)) == numbers(2)


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_batch_outlives_the_loss_of_rqs_keys(
    office: Stack, tenant: Tenant, worker: MiniWorker, running: bool
) -> None:
    batch_id = tenant.of(["one", "HOLD two"])
    enqueue(office, tenant, batch_id)
    if running:
        office.clerk()
        eventually(done(tenant, batch_id, 1), LONG)
    forget_rq(office)
    assert not Job.exists(batch_id, connection=office.queue.redis)
    if not running:
        office.clerk()
    worker.release()
    ends(tenant, batch_id)
    tenant.check_whole(batch_id, numbers(2))


def test_a_batch_cancelled_in_rq_stops_and_expires_in_time(office: Stack, tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "HOLD two"])
    enqueue(office, tenant, batch_id)
    office.clerk()
    eventually(done(tenant, batch_id, 1), LONG)
    Job.fetch(batch_id, connection=office.queue.redis, serializer=JSONSerializer).cancel()
    eventually(lambda: unlocked(tenant, batch_id), LONG)
    record = tenant.batches.load(batch_id) or {}
    assert record["status"] == "in_progress"
    tenant.batches.save(batch_id, {**record, "expires_at": int(time.time())})
    ends(tenant, batch_id, "expired")
    tenant.check_whole(batch_id, numbers(2))


def unlocked(tenant: Tenant, batch_id: str) -> bool:
    with tenant.batches.lock(batch_id) as held:
        return held


def test_a_batch_that_was_never_enqueued_is_found_by_a_clerk_of_its_queue_only(
    office: Stack, tenant: Tenant, worker: MiniWorker
) -> None:
    mine, other = tenant.of(["one"]), tenant.of(["one"])
    tenant.batches.save(other, {**(tenant.batches.load(other) or {}), "root": "tokenmill:{other}:"})
    office.clerk()
    ends(tenant, mine)
    eventually(lambda: [batch_id for batch_id, _, _ in tenant.storage.open_batches()] == [other], LONG)
    assert tenant.batch(other).status == "validating"


def test_a_clerk_delivers_webhooks_while_a_batch_runs(office: Stack, tenant: Tenant, worker: MiniWorker) -> None:
    batch_id = tenant.of(["one", "HOLD two"])
    enqueue(office, tenant, batch_id)
    clerk = office.clerk()
    eventually(done(tenant, batch_id, 1), LONG)

    def runs_between() -> bool:
        runs = clerk.log.partition(f"batch {batch_id}")[2]
        _, found, after = runs.partition("producer.jobs.deliver_callbacks")
        return bool(found) and f"batch {batch_id}" in after and tenant.batch(batch_id).status == "in_progress"

    eventually(runs_between, LONG)
    worker.release()
    ends(tenant, batch_id)
    tenant.check_whole(batch_id, numbers(2))


def test_a_batch_outlives_a_crash_of_redis(own_redis: RedisServer, tmp_path: Path) -> None:
    with stack(own_redis.url, tmp_path) as office:
        tenant = Tenant(office.files, office.queue)
        lines = [request(str(n), f"prompt {n}", max_tokens=4) for n in range(60)]
        batch_id = tenant.create([{**line, "body": {**line["body"], "model": "fake"}} for line in lines])
        enqueue(office, tenant, batch_id)
        office.clerk()
        office.worker(FAKE_STEP="0.05", max_num_seqs="4")
        eventually(done(tenant, batch_id, 1), LONG)
        own_redis.kill()
        own_redis.start()
        ends(tenant, batch_id)
        good, _ = tenant.check_whole(batch_id, numbers(60))
        assert len(good) == 60


def test_without_a_folder_a_clerk_runs_no_chores_of_files(office: Stack) -> None:
    clerk = office.clerk(TOKENMILL_FILES="")
    eventually(lambda: "producer.jobs.janitor" in clerk.log, LONG)
    assert "tend_batches" not in clerk.log
    assert "clean_files" not in clerk.log


def test_a_clerk_with_a_folder_that_cannot_be_used_ends_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ: dict[str, Any] = {**os.environ, "TOKENMILL_FILES": str(tmp_path / "file" / "x")}
    code = "import os; from producer.clerk import check_environment; check_environment(os.environ)"
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("TOKENMILL_FILES: ")
