"""Restarts of workers under load, and failures of Redis and of its connections; real processes, real servers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest
import redis

from tests.chaos.proxy import Proxy
from tests.e2e.process import Start
from tests.e2e.test_worker_process import running, tokens
from tests.support import RedisServer, eventually
from tests.worker.fakes import text_of
from tests.worker.harness import Queue
from tokenmill.client.sync import Client
from tokenmill.protocol.calls import QueueFull, QuotaExceeded
from worker.ops.exits import Exit

pytestmark = pytest.mark.redis_server


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[Proxy]:
    between = Proxy(own_redis.port)
    yield between
    between.close()


def through(queue: Queue, proxy: Proxy) -> Queue:
    """Return the same queue, with the URL for a worker behind the proxy."""
    return Queue(queue.client, f"redis://127.0.0.1:{proxy.port}/0", queue.keys)


def test_a_rolling_restart_under_load_loses_and_doubles_nothing(own: Queue, start: Start) -> None:
    options = {"FAKE_STEP": "0.01", "drain_seconds": "0.3", "max_waiting": "4", "max_num_seqs": "8"}
    old = [start(own, **options) for _ in range(2)]
    jobs: dict[str, str] = {}

    def feed(count: int) -> None:
        for _ in range(count):
            prompt = f"job {len(jobs)}"
            jobs[own.add({"prompt": prompt, "max_tokens": 10 + len(jobs) % 60}, tenant="t", group="g")] = prompt

    feed(40)
    eventually(lambda: all("worker_ready" in worker.log for worker in old), 30)
    eventually(lambda: any(own.client.exists(own.keys.result(job)) for job in jobs), 20)
    for worker in old:
        start(own, **options)
        worker.popen.terminate()
        feed(20)
        assert worker.wait(20) == Exit.OK
    ends = {job: own.check_ending(job) for job in jobs}
    assert {end["status"] for end in ends.values()} == {"succeeded"}
    for number, (job, prompt) in enumerate(jobs.items()):
        assert ends[job]["choices"][0]["text"] == text_of(prompt.encode(), 0, 10 + number % 60)
        # Deploys hand back what they do not finish; that is neither a death nor a start that counts.
        assert own.client.hmget(own.keys.job(job), "deaths", "tries") == [b"0", b"1"]
    assert own.client.hmget(own.keys.group("g"), "total", "succeeded") == [b"80", b"80"]
    assert (own.depth(), own.pending(), own.client.xlen(own.keys.dead)) == (0, 0, 0)


def test_a_redis_that_comes_back_empty_is_served_on(own: Queue, own_redis: RedisServer, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.02")
    job = running(own, max_tokens=200)
    own_redis.kill()
    shutil.rmtree(own_redis.folder / "appendonlydir")
    own_redis.start()
    eventually(lambda: "job_lost" in worker.log, 20)
    other = own.add({"prompt": "after", "max_tokens": 2})
    assert own.check_ending(other)["status"] == "succeeded"
    assert not own.client.exists(own.keys.result(job))
    assert own.client.exists(*own.keys.lanes) == 3
    assert worker.stop() == Exit.OK


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_worker_survives_an_outage_that_is_longer_than_its_lease(
    own: Queue, own_redis: RedisServer, start: Start, seconds: float
) -> None:
    """The outage is longer than the lease: the job is run again, here or by another worker, and logged in one line."""
    worker = start(own, FAKE_STEP="0.02", lease_seconds="2")
    job = running(own, max_tokens=150)
    own_redis.kill()
    time.sleep(seconds)  # the outage itself
    assert worker.popen.poll() is None
    own_redis.start()
    result = own.check_ending(job)
    assert result["status"] == "succeeded"
    assert worker.log.count("redis_unreachable") == 1
    assert worker.stop() == Exit.OK


def test_a_read_only_redis_is_waited_for(own: Queue, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.02", lease_seconds="5")
    job = running(own, max_tokens=120)
    own.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    eventually(lambda: "redis_unreachable" in worker.log)
    own.client.execute_command("REPLICAOF", "NO", "ONE")
    result = own.check_ending(job)
    assert (result["status"], result["attempt"]) == ("succeeded", 1)
    assert worker.stop() == Exit.OK


def test_a_redis_that_is_loading_is_waited_for(own: Queue, own_redis: RedisServer, start: Start) -> None:
    """The server accepts connections and answers LOADING for a while."""
    worker = start(own, FAKE_STEP="0.02", lease_seconds="8")
    job = running(own, max_tokens=120)
    for number in range(400):
        own.client.set(f"ballast:{number}", "x" * 5000)
    own.client.bgrewriteaof()  # keys of a snapshot load one by one, and slowly below
    eventually(lambda: own.client.info("persistence")["aof_rewrite_in_progress"] == 0, 20)
    own_redis.kill()
    own_redis.options = ("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024")
    loading: list[bool] = []

    def answers() -> bool:
        try:
            return bool(own.client.ping())
        except redis.exceptions.BusyLoadingError:
            loading.append(True)
            return False
        except redis.ConnectionError:
            return False

    own_redis.launch()
    eventually(answers, 30)
    assert loading
    result = own.check_ending(job)
    assert (result["status"], result["attempt"]) == ("succeeded", 1)
    assert worker.stop() == Exit.OK
    assert worker.log.count("redis_unreachable") == 1


def test_a_flushed_script_cache_costs_nothing(own: Queue, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.02")
    job = running(own, max_tokens=60)
    for _ in range(5):
        own.client.script_flush()
        seen = tokens(own, job)
        eventually(lambda: tokens(own, job) > seen)  # noqa: B023
    assert own.check_ending(job)["attempt"] == 1
    assert worker.stop() == Exit.OK


def test_replies_that_are_lost_on_the_way_lose_and_double_nothing(own: Queue, proxy: Proxy, start: Start) -> None:
    worker = start(through(own, proxy), FAKE_STEP="0.005", lease_seconds="2")
    jobs = [own.add({"prompt": f"{i}", "max_tokens": 60}) for i in range(30)]
    for _ in range(6):
        proxy.swallow(0.15)
        time.sleep(0.2)  # some replies get through
    ends = [own.check_ending(job) for job in jobs]
    assert {end["status"] for end in ends} == {"succeeded"}
    assert (own.depth(), own.pending()) == (0, 0)
    assert worker.stop() == Exit.OK


def test_a_line_that_goes_silent_is_survived(own: Queue, proxy: Proxy, start: Start) -> None:
    """Sockets stay open and no data comes; an outage shorter than the lease costs no start."""
    worker = start(through(own, proxy), FAKE_STEP="0.01", lease_seconds="6")
    job = running(own, max_tokens=150)
    proxy.silence(2.0)
    result = own.check_ending(job)
    assert (result["status"], result["attempt"]) == ("succeeded", 1)
    assert worker.stop() == Exit.OK


def test_sigterm_during_a_blocked_read_ends_in_bounded_time(own: Queue, start: Start) -> None:
    worker = start(own, block_ms="1500")
    eventually(lambda: "worker_ready" in worker.log, 20)
    began = time.monotonic()
    assert worker.stop() == Exit.OK
    assert time.monotonic() - began < 6
    assert own.pending() == 0


def test_a_second_sigterm_hands_everything_back_now(own: Queue, start: Start) -> None:
    worker = start(own, FAKE_STEP="0.05", drain_seconds="60")
    job = running(own, max_tokens=200)
    worker.popen.terminate()
    eventually(lambda: "signal_received" in worker.log)
    worker.popen.terminate()
    assert worker.wait(10) == Exit.OK
    assert "drain_cut_short" in worker.log
    assert own.client.hget(own.keys.job(job), "state") == b"queued"


def test_a_delayed_jobs_budget_starts_when_it_joins_its_lane(own: Queue, start: Start) -> None:
    start(own)
    with Client(own.url, own.keys.queue) as client:
        job = client.submit("x", max_tokens=2, delay=1.2, ttl=0.8)
        assert own.client.zcard(own.keys.delayed) == 1
        result = job.result(timeout=15)
    assert result.status == "succeeded"
    assert own.client.zcard(own.keys.delayed) + own.depth() == 0


def test_depth_and_tenants_are_capped_and_a_waiting_submit_gets_room(own: Queue, start: Start) -> None:
    own.client.hset(own.keys.meta, mapping={"max_depth": 3, "max_per_tenant": 2})
    with Client(own.url, own.keys.queue) as client:
        first = [client.submit("x", max_tokens=30, tenant="t") for _ in range(2)]
        with pytest.raises(QuotaExceeded) as quota:
            client.submit("x", tenant="t")
        assert (quota.value.tenant, quota.value.used) == ("t", 2)
        client.submit("x", max_tokens=30)
        with pytest.raises(QueueFull) as full:
            client.submit("x")
        assert full.value.depth == 3
        start(own, FAKE_STEP="0.01")
        waited = client.submit("x", max_tokens=1, tenant="t", wait=True)
        # It came in once another of its tenant had ended: running jobs count, too.
        assert sum(bool(own.client.exists(own.keys.result(job.id))) for job in first) >= 1
        assert waited.result(timeout=15).status == "succeeded"
    eventually(lambda: own.depth() == 0)
    assert own.client.get(own.keys.quota("t")) == b"0"


def test_an_ended_job_with_a_callback_is_in_the_callbacks(own: Queue, start: Start) -> None:
    start(own, callback_hosts="hooks.example.org")
    url = "https://hooks.example.org/done?x=1"
    job = own.add({"prompt": "x", "max_tokens": 2}, callback=url)
    assert own.check_ending(job)["status"] == "succeeded"
    ((_, fields),) = own.client.xrange(own.keys.callbacks)
    assert fields == {b"id": job.encode(), b"url": url.encode()}
    for bad in ("https://elsewhere.org/", "http://hooks.example.org/", "https://user@evil.org/hooks.example.org"):
        error = own.check_ending(own.add({"prompt": "x"}, callback=bad))["error"]
        assert error["code"] == "invalid_request"
    assert own.client.xlen(own.keys.callbacks) == 1
