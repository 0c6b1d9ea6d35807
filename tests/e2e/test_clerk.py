"""The clerk as it is run: `rq worker` with our worker class, beside a real worker, over a real Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.e2e.process import Start
from tests.producer.receiver import Receiver, certificate, receiving
from tests.producer.rqprocess import Rq, RqProcess, rq_on
from tests.support import RedisServer, eventually, output_of
from tests.tokenmill.mini import Queue as MiniQueue
from tests.worker.harness import Queue
from tokenmill.client.sync import Client

pytestmark = pytest.mark.redis_server
CLERK = ("--worker-class", "producer.clerk.ClerkWorker", "--with-scheduler")
HURRY = ("--maintenance-interval", "1", "--worker-ttl", "16", "--job-monitoring-interval", "1")


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


def clerk(office: Rq, authority: Path) -> RqProcess:
    return office.worker(
        *CLERK,
        *HURRY,
        TOKENMILL_CALLBACK_HOSTS="localhost",
        TOKENMILL_CALLBACK_SECRET="key",
        TOKENMILL_CALLBACK_CA_FILE=str(authority),
        TOKENMILL_CALLBACK_TIMEOUT_SECONDS="0.5",
        TOKENMILL_CALLBACK_LEASE_SECONDS="1",
        TOKENMILL_CALLBACK_BACKOFF_SECONDS="0.2",
        TOKENMILL_DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS="1",
    )


def chore(office: Rq, name: str) -> Job | None:
    job_id = f"clerk-{office.queue.keys.queue}-{name}".replace(".", "_")
    if not Job.exists(job_id, office.redis):
        return None
    return Job.fetch(job_id, connection=office.redis, serializer=JSONSerializer)


def status(office: Rq, name: str) -> str | None:
    job = chore(office, name)
    return None if job is None else str(job.get_status().value)


def test_a_job_with_a_callback_reaches_its_receiver_over_a_killed_clerk(
    own: Queue, office: Rq, start: Start, receiver: Receiver, tls: tuple[Path, Path]
) -> None:
    start(own, callback_hosts="localhost")
    process = clerk(office, tls[0])
    with Client(own.url, own.keys.queue) as client:
        first = client.submit("x", max_tokens=3, callback=receiver.url("/first"))
        eventually(lambda: receiver.received, 30)
        result = own.client.get(own.keys.result(first.id))
        assert (receiver.received[0].path, receiver.received[0].body) == ("/first", result)

        receiver.answers = [None]  # the clerk dies while it waits for the answer
        second = client.submit("x", max_tokens=3, callback=receiver.url("/second"))
        eventually(lambda: len(receiver.received) == 2, 20)
        process.kill_horse()
        receiver.answers = [200]
        eventually(lambda: len(receiver.received) == 3, 40)
    eventually(lambda: own.client.xlen(own.keys.callbacks) == 0)
    assert [one.headers["webhook-id"] for one in receiver.received] == [first.id, second.id, second.id]
    assert process.stop() == 0


def test_the_chores_run_and_are_listed_and_a_stop_does_not_wait_for_them(
    own: Queue, office: Rq, tls: tuple[Path, Path]
) -> None:
    process = clerk(office, tls[0])
    eventually(lambda: status(office, "deliver_callbacks") == "started", 20)
    assert status(office, "janitor") in ("queued", "scheduled")
    shown = output_of([sys.executable, "-m", "rq.cli", "info", "--url", office.queue.url])
    assert office.jobs.name in shown
    assert process.name[:8] in shown or "1 workers" in shown
    job = chore(office, "deliver_callbacks")
    assert job is not None
    assert job.func_name == "producer.jobs.deliver_callbacks"
    assert process.stop() == 0
    assert status(office, "deliver_callbacks") in ("scheduled", "queued")


def test_a_second_clerk_adds_no_second_round_of_chores(own: Queue, office: Rq, tls: tuple[Path, Path]) -> None:
    for _ in range(2):
        clerk(office, tls[0])
    eventually(lambda: status(office, "janitor") == "scheduled", 30)
    jobs: Any = own.client.keys("rq:job:*")
    assert len(jobs) == 2


def test_another_job_in_its_queue_need_not_wait_for_the_delivery_of_webhooks(
    own: Queue, office: Rq, start: Start, tls: tuple[Path, Path]
) -> None:
    start(own)
    clerk(office, tls[0])
    eventually(lambda: status(office, "deliver_callbacks") == "started", 20)
    office.ends(office.enqueue("generate", prompt="x", max_tokens=2), "finished")
    eventually(lambda: status(office, "deliver_callbacks") == "started", 20)


def test_webhooks_go_on_after_the_clerk_or_redis_is_killed(
    own: Queue, own_redis: RedisServer, office: Rq, start: Start, receiver: Receiver, tls: tuple[Path, Path]
) -> None:
    start(own, callback_hosts="localhost")
    process = clerk(office, tls[0])
    with Client(own.url, own.keys.queue) as client:

        def ask(number: int) -> None:
            client.submit("x", id=f"j{number}", max_tokens=3, callback=receiver.url(), wait=True)
            eventually(lambda: f"j{number}" in {one.headers["webhook-id"] for one in receiver.received}, 120, 0.1)

        ask(1)
        process.kill()
        process = clerk(office, tls[0])
        ask(2)
        own_redis.kill()
        own_redis.start()
        ask(3)
    assert len(receiver.received) == 3
    assert process.stop() == 0


def test_delayed_jobs_join_their_lanes_with_no_worker_alive(own: Queue, office: Rq, tls: tuple[Path, Path]) -> None:
    """So that an autoscaler at zero workers sees them, and counters heal there as well."""
    process = clerk(office, tls[0])
    with Client(own.url, own.keys.queue) as client:
        for number in range(100):
            client.submit("x", id=f"{number}", delay=0.5, tenant="t", group="g")
        eventually(lambda: own.depth() == 100, 30)
        assert client.states(["0", "99"]) == ["queued", "queued"]
    assert process.stop() == 0
