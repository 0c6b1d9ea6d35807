"""The clerk's process ends on a signal, with its children, and survives outages and failovers of Redis."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue as RqQueue
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer

from producer.rqworker import CLEANING_S, SteadyScheduler, SteadyWorker
from tests.e2e.process import Start
from tests.e2e.test_clerk import clerk, status
from tests.producer.receiver import Receiver, certificate, receiving
from tests.producer.rqprocess import Rq, RqProcess, rq_on
from tests.support import RedisServer, eventually
from tests.tokenmill.mini import Queue as MiniQueue
from tests.worker.harness import Queue
from tokenmill.client.sync import Client

pytestmark = pytest.mark.redis_server


@pytest.fixture
def office(own: Queue, tmp_path: Path) -> Iterator[Rq]:
    with rq_on(MiniQueue(own.url, own.client, own.keys), tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "hook")


@pytest.fixture
def receiver(tls: tuple[Path, Path]) -> Iterator[Receiver]:
    with receiving(tls) as found:
        yield found


def children(process: RqProcess) -> list[int]:
    """Scheduler and work horse."""
    listed = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def ends(process: RqProcess, number: int, timeout: float = 20) -> int:
    """The exit status after a signal; no child outlives the process."""
    before = children(process)
    process.popen.send_signal(number)
    ended = process.popen.wait(timeout)
    assert eventually(lambda: all(gone(pid) for pid in before), 10)
    return ended


MOMENTS = {
    "it has just begun": lambda office, process: "started with PID" in process.log,
    "its scheduler begins": lambda office, process: "Acquired scheduler lock" in process.log,
    "its first job is enqueued": lambda office, process: status(office, "deliver_callbacks") is not None,
    "its job is forked": lambda office, process: process.horse,
    "its job runs": lambda office, process: status(office, "deliver_callbacks") == "started",
    "its second job waits": lambda office, process: status(office, "janitor") == "scheduled",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_first_signal_ends_a_clerk_and_its_children_whatever_it_does(
    own: Queue, office: Rq, tls: tuple[Path, Path], moment: str, number: int
) -> None:
    process = clerk(office, tls[0])
    eventually(lambda: MOMENTS[moment](office, process), 30)
    assert ends(process, number) == 0, process.log
    assert not office.redis.smembers("rq:workers")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_the_job_under_way(own: Queue, office: Rq, tls: tuple[Path, Path], number: int) -> None:
    process = clerk(office, tls[0])
    office.ends(office.enqueue("generate", prompt="nobody answers"), "started")  # there is no worker
    process.popen.send_signal(number)
    key = f"rq:worker:{process.name}"
    eventually(lambda: office.redis.hget(key, "shutdown_requested_date"))
    assert process.popen.poll() is None
    time.sleep(0.2)  # RQ takes what comes at once for an echo of the first
    assert ends(process, number) == 0, process.log


def test_the_scheduler_is_stopped_however_early_the_end_comes(own: Queue) -> None:
    queue = RqQueue("early", connection=Redis.from_url(own.url), serializer=JSONSerializer)
    ours = signal.signal(signal.SIGTERM, lambda *_: None)  # as the worker's own: a fork inherits it
    try:
        for _ in range(10):
            scheduler = SteadyScheduler([queue], connection=queue.connection, serializer=JSONSerializer)
            process = scheduler.start()
            process.terminate()
            process.join(10)
            assert process.exitcode == 0
    finally:
        signal.signal(signal.SIGTERM, ours)


def test_the_lock_of_a_dead_scheduler_is_taken_over_and_that_of_a_living_one_is_not(own: Queue) -> None:
    queue = RqQueue("locked", connection=Redis.from_url(own.url), serializer=JSONSerializer)
    living, other = (SteadyScheduler([queue], connection=queue.connection, serializer=JSONSerializer) for _ in range(2))
    assert living.acquire_locks() == {"locked"}
    assert not other.acquire_locks()
    queue.connection.expire(living.get_locking_key("locked"), 50)  # as after 11 seconds without a heartbeat
    assert other.acquire_locks() == {"locked"}
    assert not living.acquire_locks()


def test_the_maintenance_lock_of_a_killed_worker_ends_within_seconds(own: Queue) -> None:
    queue = RqQueue("killed", connection=Redis.from_url(own.url), serializer=JSONSerializer)
    worker = SteadyWorker([queue], connection=queue.connection, serializer=JSONSerializer)
    key = queue.registry_cleaning_key
    assert queue.acquire_maintenance_lock()  # by a worker that is then killed; RQ's lock lives for 15 minutes
    worker.clean_registries()
    assert 0 < queue.connection.ttl(key) <= CLEANING_S
    queue.connection.expire(key, 5)
    worker.clean_registries()  # must not renew the lock
    assert 0 < queue.connection.ttl(key) <= 5


def test_a_worker_that_is_to_stop_begins_no_maintenance(own: Queue) -> None:
    queue = RqQueue("stopping", connection=Redis.from_url(own.url), serializer=JSONSerializer)
    worker = SteadyWorker([queue], connection=queue.connection, serializer=JSONSerializer)
    assert worker.should_run_maintenance_tasks
    worker._shutdown()
    with pytest.raises(StopRequested):
        assert worker.should_run_maintenance_tasks


def test_the_children_of_a_killed_clerk_end_as_well(
    own: Queue, own_redis: RedisServer, office: Rq, tls: tuple[Path, Path]
) -> None:
    process = clerk(office, tls[0])
    eventually(lambda: status(office, "deliver_callbacks") == "started", 20)
    horse = eventually(lambda: process.horse)
    scheduler = [pid for pid in children(process) if pid != horse]
    assert scheduler
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    eventually(lambda: all(gone(pid) for pid in scheduler), 20)
    own_redis.kill()  # which the work horse would wait for
    eventually(lambda: gone(horse), 20)
    own_redis.start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clerk_ends_without_redis_as_well(
    own: Queue, own_redis: RedisServer, office: Rq, tls: tuple[Path, Path], number: int
) -> None:
    process = clerk(office, tls[0])
    eventually(lambda: status(office, "deliver_callbacks") == "started", 20)
    own_redis.kill()
    eventually(lambda: "Redis is away" in process.log, 20)
    assert ends(process, number, 30) == 0, process.log
    own_redis.start()


def demote(client: Redis) -> None:
    client.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]


def promote(client: Redis) -> None:
    client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]


FAULTS: dict[str, tuple[Callable[[Redis], object], Callable[[Redis], object]]] = {
    "ReadOnlyError": (demote, promote),
    "NOREPLICAS": (
        lambda client: client.config_set("min-replicas-to-write", 1),
        lambda client: client.config_set("min-replicas-to-write", 0),
    ),
}


@pytest.mark.parametrize("state", ["started", pytest.param("scheduled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("word", FAULTS)
def test_a_clerk_outlives_a_failover(
    own: Queue, office: Rq, start: Start, receiver: Receiver, tls: tuple[Path, Path], word: str, state: str
) -> None:
    begin, end = FAULTS[word]
    start(own, callback_hosts="localhost")
    process = clerk(office, tls[0])
    eventually(lambda: status(office, "deliver_callbacks") == state, 90, 0.005)
    begin(own.client)
    eventually(lambda: word in process.log, 30)
    end(own.client)
    with Client(own.url, own.keys.queue) as client:
        client.submit("x", id="after", max_tokens=3, callback=receiver.url(), wait=True)
        eventually(lambda: receiver.received, 60)
    assert process.popen.poll() is None
    assert "ended RQ's loop" not in process.log, process.log
    assert process.stop() == 0
