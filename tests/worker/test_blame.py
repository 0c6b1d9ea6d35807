"""A job that kills its workers is found, one suspect at a time, and no other job fails for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Inside, Queue, inside
from tokenmill.protocol.job import Identity
from tokenmill.protocol.scripts import Delivery, Ref, Scripts, StartStatus
from worker.jobs.held import Held
from worker.jobs.job import Entry, Job, Start
from worker.ops.exits import Exit
from worker.queue.quarantine import DEATHS, MARGIN, Quarantine

BODY = {"prompt": "x", "max_tokens": 5}
LEASE = 0.6


@dataclass
class Setup:
    """A quarantine without threads."""

    queue: Queue
    lease: float = 0.3
    held: Held = field(default_factory=Held)

    def __post_init__(self) -> None:
        self.scripts = Scripts(self.queue.client, self.queue.keys, "us")
        self.scripts.ensure_groups()
        self.quarantine = Quarantine(self.scripts, self.held, self.lease)

    def delivered(self) -> list[Delivery]:
        """Claim and return all entries of the normal lane."""
        lane = self.queue.keys.lane("normal")
        _, entries, *_ = self.queue.client.xautoclaim(lane, "workers", "us", 0, "0-0", count=500)
        return [Delivery("normal", entry.decode(), dict(fields)) for entry, fields in entries]

    def hold(self, deliveries: list[Delivery]) -> list[Job]:
        jobs = []
        for lane, entry, fields, _ in deliveries:
            job = Job(Entry(lane, entry, Identity(fields[b"id"].decode())))
            self.held.add(job)
            self.quarantine.enter(job)
            jobs.append(job)
        return jobs


def die(queue: Queue, worker: str, jobs: int, tokens: int = 0) -> None:
    """Act as a worker that starts all entries, publishes some tokens, and dies."""
    scripts = Scripts(queue.client, queue.keys, worker)
    scripts.ensure_groups()
    lane = queue.keys.lane("normal")
    scripts.read(jobs)
    _, entries, *_ = queue.client.xautoclaim(lane, "workers", worker, 0, "0-0", count=jobs)
    for entry, fields in entries:
        job_id = fields[b"id"].decode()
        started = scripts.start(Ref("normal", entry.decode(), job_id), Identity(job_id), prompt_tokens=1)
        assert started.status is StartStatus.OK
        for n in range(1, tokens + 1):
            event = {"type": "token", "index": 0, "text": "a ", "tokens": 1}
            queue.client.xadd(queue.keys.out(job_id), event, id=f"{started.fence}-{n}")


def test_a_single_crash_makes_no_suspects(queue: Queue) -> None:
    setup = Setup(queue)
    for _ in range(4):
        queue.add(BODY)
    die(queue, "a", 4)
    jobs = setup.hold(setup.quarantine.sift(setup.delivered()))
    assert [job.suspect for job in jobs] == [False] * 4
    assert not setup.quarantine.taken
    assert all(setup.quarantine.admits(job) for job in jobs)


def test_of_several_suspects_a_worker_holds_one_and_hands_back_the_others_with_their_deaths(queue: Queue) -> None:
    setup = Setup(queue, lease=60)
    for _ in range(4):
        queue.add(BODY)
    for worker in ("a", "b"):
        die(queue, worker, 4)
    ordinary = queue.add(BODY)
    Scripts(queue.client, queue.keys, "c").read(1)
    kept = setup.quarantine.sift(setup.delivered())
    jobs = setup.hold(kept)
    assert [job.suspect for job in jobs] == [True, False]
    assert jobs[1].id == ordinary
    assert setup.quarantine.turned_away
    # Handed back as they were: the next worker sees two deaths, too.
    other = Quarantine(Scripts(queue.client, queue.keys, "other"), Held(), 60)

    def takeable() -> list[dict[str, object]]:
        found = queue.client.xpending_range(queue.keys.lane("normal"), "workers", "-", "+", 10, idle=60_000)
        return list(found) if len(found) == 3 else []

    idle = eventually(takeable)
    again = [one for one in setup.delivered() if one.entry in {row["message_id"].decode() for row in idle}]
    assert len(other.sift(again)) == 1


def test_a_suspect_waits_for_running_jobs_at_most_a_lease_and_then_runs_alone(queue: Queue) -> None:
    setup = Setup(queue, lease=0.2)
    suspect_id = queue.add(BODY)
    for worker in ("a", "b"):
        die(queue, worker, 1)
    runs, waits = Job(Entry("normal", "1-1", Identity("runs"))), Job(Entry("normal", "1-2", Identity("waits")))
    for job in (runs, waits):
        setup.held.add(job)
    setup.held.begin(runs.handle)
    (suspect,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    assert suspect.id == suspect_id
    assert not setup.quarantine.admits(suspect)
    assert not setup.quarantine.admits(waits)  # nothing new starts before it
    handed: list[Job] = []

    def hand_back(wanted: object) -> None:
        assert not setup.quarantine.admits(suspect)  # not before the others are handed back
        handed.extend(setup.held.take(wanted))  # type: ignore[arg-type]

    setup.quarantine.tick(hand_back)
    assert handed == []
    eventually(lambda: setup.quarantine.tick(hand_back) or handed)
    assert handed == [runs]
    assert setup.quarantine.admits(suspect)
    setup.held.begin(suspect.handle)
    assert not setup.quarantine.admits(waits)
    setup.held.forget(suspect.handle)
    assert setup.quarantine.admits(waits)


def test_after_a_suspect_ordinary_jobs_run_for_at_least_a_lease(queue: Queue) -> None:
    setup = Setup(queue, lease=0.3)
    for _ in range(2):
        queue.add(BODY)
    for worker in ("a", "b"):
        die(queue, worker, 2)
    ordinary = Job(Entry("normal", "1-1", Identity("ordinary")))
    (first,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    setup.held.begin(first.handle)
    setup.held.add(ordinary)
    setup.held.forget(first.handle)
    queue.client.xack(queue.keys.lane("normal"), "workers", first.entry.id)
    ended = time.monotonic()
    (second,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    assert second.suspect
    assert setup.quarantine.admits(ordinary)
    assert not setup.quarantine.admits(second)
    eventually(lambda: setup.quarantine.admits(second))
    assert time.monotonic() - ended >= 0.29
    assert not setup.quarantine.admits(ordinary)


def test_a_suspect_without_ordinary_jobs_beside_it_starts_at_once(queue: Queue) -> None:
    setup = Setup(queue, lease=60)
    for _ in range(2):
        queue.add(BODY)
    for worker in ("a", "b"):
        die(queue, worker, 2)
    (first,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    assert setup.quarantine.admits(first)
    setup.held.begin(first.handle)
    newcomer = Job(Entry("normal", "1-1", Identity("newcomer")))
    setup.held.add(newcomer)
    assert not setup.quarantine.admits(newcomer)  # it is alone, and stays it
    setup.held.forget(newcomer.handle)
    setup.held.forget(first.handle)
    queue.client.xack(queue.keys.lane("normal"), "workers", first.entry.id)
    (second,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    assert setup.quarantine.admits(second)


def test_a_suspect_is_cleared_once_it_has_passed_the_end_of_its_last_run_by_the_margin(queue: Queue) -> None:
    queue.add({"prompt": "x", "max_tokens": 200})
    for worker in ("a", "b"):
        die(queue, worker, 1, tokens=10)
    setup = Setup(queue)
    (suspect,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    setup.held.begin(suspect.handle)
    started = setup.scripts.start(suspect.ref, suspect.entry.identity, prompt_tokens=1, alone=True)
    suspect.start, suspect.outgoing.tokens = Start(fence=started.fence), 10 + MARGIN - 1
    setup.quarantine.tick(lambda wanted: None)
    assert setup.quarantine.taken
    suspect.outgoing.tokens += 1
    setup.quarantine.tick(lambda wanted: None)
    assert not setup.quarantine.taken
    assert not suspect.suspect
    # What it died of so far is forgotten: the next death is its first.
    assert queue.client.hmget(queue.keys.job(suspect.id), "deaths", "cleared", "alone") == [b"2", b"2", b"0"]
    assert not Setup(queue).hold(Setup(queue).quarantine.sift(setup.delivered()))[0].suspect


def test_without_events_a_suspect_runs_alone_to_its_end(queue: Queue) -> None:
    queue.add(BODY, stream="0")
    for worker in ("a", "b"):
        die(queue, worker, 1)
    setup = Setup(queue)
    (suspect,) = setup.hold(setup.quarantine.sift(setup.delivered()))
    setup.held.begin(suspect.handle)
    suspect.outgoing.tokens = 100_000
    setup.quarantine.tick(lambda wanted: None)
    assert setup.quarantine.taken


def test_a_suspect_that_was_lost_before_it_became_a_job_keeps_no_place(queue: Queue) -> None:
    queue.add(BODY)
    for worker in ("a", "b"):
        die(queue, worker, 1)
    setup = Setup(queue)
    assert len(setup.quarantine.sift(setup.delivered())) == 1
    assert setup.quarantine.taken  # reserved, and then its reader met an error
    setup.quarantine.begin()
    assert not setup.quarantine.taken


def test_a_job_hash_of_a_wrong_type_breaks_no_sweep(queue: Queue) -> None:
    job = queue.add(BODY)
    setup = Setup(queue)
    Scripts(queue.client, queue.keys, "a").read(1)
    queue.client.set(queue.keys.job(job), "not a hash")
    assert len(setup.quarantine.sift(setup.delivered())) == 1


def test_handing_back_an_entry_that_was_never_started_erases_no_death(queue: Queue) -> None:
    job = queue.add(BODY)
    die(queue, "a", 1)
    setup = Setup(queue)
    (delivery,) = setup.delivered()
    assert setup.scripts.yield_(Ref(delivery.lane, delivery.entry, job), idle_ms=0, count_start=False)
    die(queue, "b", 1)
    assert queue.client.hmget(queue.keys.job(job), "deaths", "tries") == [b"1", b"2"]


class TestSpent:
    """A job that has used all its attempts."""

    def start(self, queue: Queue, worker: str, **options: object) -> StartStatus:

        scripts = Scripts(queue.client, queue.keys, worker)
        scripts.ensure_groups()
        scripts.read(1)
        lane = queue.keys.lane("normal")
        _, [(entry, fields)], *_ = queue.client.xautoclaim(lane, "workers", worker, 0, "0-0", count=1)
        self.ref = Ref("normal", entry.decode(), fields[b"id"].decode())
        return scripts.start(self.ref, Identity(self.ref.id), prompt_tokens=1, max_attempts=3, **options).status  # type: ignore[arg-type]

    def test_a_job_that_dies_alone_after_its_last_start_is_given_up(self, queue: Queue) -> None:
        queue.add(BODY)
        for worker in ("a", "b"):
            assert self.start(queue, worker) is StartStatus.OK
        assert self.start(queue, "c", alone=True) is StartStatus.OK
        assert self.start(queue, "d", alone=True) is StartStatus.SPENT

    def test_a_job_that_never_ran_alone_gets_one_more_start_alone(self, queue: Queue) -> None:
        queue.add(BODY)
        for worker in ("a", "b", "c"):
            assert self.start(queue, worker) is StartStatus.OK
        assert self.start(queue, "d", alone=True) is StartStatus.OK
        assert self.start(queue, "e", alone=True) is StartStatus.SPENT

    def test_max_attempts_of_the_producer_allows_no_further_start(self, queue: Queue) -> None:
        queue.add(BODY)
        for worker in ("a", "b", "c"):
            assert self.start(queue, worker, strict=True) is StartStatus.OK
        assert self.start(queue, "d", alone=True, strict=True) is StartStatus.SPENT

    def test_hand_backs_of_a_drain_never_count_as_deaths(self, queue: Queue) -> None:
        queue.add(BODY)
        for turn in range(10):
            worker = f"w{turn}"
            assert self.start(queue, worker) is StartStatus.OK
            Scripts(queue.client, queue.keys, worker).yield_(self.ref, idle_ms=0, count_start=False)
        held = queue.client.hmget(queue.keys.job(self.ref.id), "attempt", "tries", "deaths", "state")
        assert held == [b"10", b"0", b"0", b"queued"]

    def test_retries_after_an_error_count_as_starts(self, queue: Queue) -> None:
        queue.add(BODY)
        for worker in ("a", "b", "c"):
            assert self.start(queue, worker) is StartStatus.OK
            Scripts(queue.client, queue.keys, worker).yield_(self.ref, idle_ms=0)
        assert self.start(queue, "d") is StartStatus.SPENT


class Breaking(FakeEngine):
    """Raises in the step in which the poisoned job runs."""

    def step(self) -> object:  # type: ignore[override]
        running = [live.request for live in self._live.values() if live.started]
        if any(one.prompt == [ord("!")] and one.id not in self._on_hold for one in running):
            raise RuntimeError("the device is lost")
        return super().step()


@pytest.mark.parametrize("times", [DEATHS + 1])
def test_a_broken_device_counts_a_death_for_the_jobs_that_ran_on_it(queue: Queue, times: int) -> None:
    """Each worker ends with an error; a death counts for the jobs that ran, not for those that waited."""
    poison = queue.add({"prompt": "!", "max_tokens": 5})
    neighbours = [queue.add({"prompt": f"{i}", "max_tokens": 40}) for i in range(6)]
    options = {"lease_seconds": "5", "max_waiting": "64"}  # long: every worker hands back what it holds
    ended = 0
    for _ in range(8):
        worker = Inside(queue, Breaking(step_seconds=0.002), **options).start()
        eventually(lambda: worker.status is not None or queue.depth() == 0, 20)  # noqa: B023
        if worker.status is None:
            break
        assert worker.join() is Exit.ERROR
        ended += 1
    else:
        raise AssertionError("the poison was never given up")
    assert worker.stop() is Exit.OK
    result = queue.check_ending(poison)
    assert (result["error"]["code"], ended) == ("gave_up", times)
    assert result["attempt"] >= times  # a start that was handed back before a step adds to it, and is no death
    assert result["error"]["cause"] == "worker_lost"
    for job in neighbours:
        assert queue.check_ending(job)["status"] == "succeeded"
    assert [fields[b"id"].decode() for _, fields in queue.client.xrange(queue.keys.dead)] == [poison]


def test_an_entry_handed_back_in_a_drain_starts_elsewhere_without_a_mark(queue: Queue) -> None:
    job = queue.add({"prompt": "long", "max_tokens": 200})
    for _ in range(4):
        with inside(queue, FakeEngine(step_seconds=0.01), lease_seconds=str(LEASE), drain_seconds="0"):
            eventually(lambda: queue.client.hget(queue.keys.job(job), "state") == b"running")
    assert queue.client.hmget(queue.keys.job(job), "attempt", "tries", "deaths") == [b"4", b"0", b"0"]
    with inside(queue, lease_seconds=str(LEASE)):
        assert queue.check_ending(job)["status"] == "succeeded"
