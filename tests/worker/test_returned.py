"""A job that is handed back is read at once by the next worker; a job above its tenant's cap of running jobs waits."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import redis

from tests.steps import Steps
from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Queue, inside
from tokenmill.protocol.job import Identity
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.scripts import CancelReply, Delivery, Ref, Scripts, StartStatus
from worker.cli import settings_from
from worker.inbox import Inbox
from worker.jobs.held import Held
from worker.queue.intake import Intake
from worker.queue.returner import Returner
from worker.queue.sweeper import Sweeper

BODY = {"prompt": "x", "max_tokens": 2}


def scripts(queue: Queue, name: str, lease_ms: int = 30_000) -> Steps:
    queue.client.hset(queue.keys.meta, "lease_ms", lease_ms)
    made = Steps(queue.client, queue.keys, name)
    made.ensure_groups()
    return made


def refs(found: list[Delivery] | None) -> list[Ref]:
    return [Ref(one.lane, one.entry, one.fields[b"id"].decode()) for one in found or ()]


def test_a_job_that_is_handed_back_is_read_next_before_new_jobs(queue: Queue) -> None:
    ours, theirs = scripts(queue, "a"), scripts(queue, "b")
    first = queue.add(BODY)
    (ref,) = refs(ours.read(1))
    ours.yield_(ref, idle_ms=30_000, due_in_ms=0)
    second = queue.add(BODY, "high")
    found = theirs.read(5) or []
    assert [(ref.id, one.again) for ref, one in zip(refs(found), found, strict=True)] == [
        (first, True),
        (second, False),
    ]
    assert not queue.client.exists(queue.keys.returned)
    assert ours.renew([ref]) == [ref]


@pytest.mark.parametrize("late", ["renewal", "start", "clear", "hand-back"])
def test_late_commands_of_a_worker_undo_no_hand_back(queue: Queue, late: str) -> None:
    """The command was under way in another thread; the entry stays idle for a lease, and the next read takes it."""
    ours, theirs = scripts(queue, "a"), scripts(queue, "b")
    queue.add(BODY)
    (ref,) = refs(ours.read(1))
    fence = ours.start(ref, Identity(ref.id), prompt_tokens=1).fence
    ours.yield_(ref, idle_ms=30_000, due_in_ms=0)
    if late == "renewal":
        assert ours.renew([ref]) == [ref]
    elif late == "start":
        assert ours.start(ref, Identity(ref.id), prompt_tokens=1).status is StartStatus.LOST
    elif late == "clear":
        assert not ours.clear(ref, fence)
    else:
        assert not ours.yield_(ref, idle_ms=0, due_in_ms=10_000)
    assert refs(theirs.read(5)) == [ref]
    assert theirs.start(ref, Identity(ref.id), prompt_tokens=1).deaths == 0


def test_a_returned_entry_is_read_after_new_entries_of_a_higher_lane(queue: Queue) -> None:
    ours = scripts(queue, "a")
    low = [queue.add(BODY, "low") for _ in range(4)]
    for ref in reversed(refs(ours.read(4))):
        ours.yield_(ref, idle_ms=30_000, due_in_ms=0)
    high = [queue.add(BODY, "high") for _ in range(3)]
    found = [ref.id for _ in range(7) for ref in refs(ours.read(1))]
    assert found == high + low


def test_a_returned_entry_is_not_read_before_it_is_due(queue: Queue) -> None:
    ours, theirs = scripts(queue, "a", 1000), scripts(queue, "b", 1000)
    queue.add(BODY)
    (ref,) = refs(ours.read(1))
    ours.yield_(ref, idle_ms=700, due_in_ms=300)
    assert theirs.read(5) == []
    assert queue.client.zcard(queue.keys.returned) == 1
    assert refs(eventually(lambda: theirs.read(5), 5)) == [ref]


def test_a_returned_entry_that_another_worker_has_taken_over_is_not_taken_from_it(queue: Queue) -> None:
    ours, theirs = scripts(queue, "a"), scripts(queue, "b")
    queue.add(BODY)
    (ref,) = refs(ours.read(1))
    gone = queue.add(BODY)
    (lost,) = refs(ours.read(1))
    queue.client.xdel(queue.keys.lane("normal"), lost.entry)
    for one in (ref.entry, lost.entry, "17-0"):
        queue.client.zadd(queue.keys.returned, {f"normal {one}": 0})
    queue.client.zadd(queue.keys.returned, {"nonsense": 0})
    assert theirs.read(5) == []
    assert ours.renew([ref]) == []
    assert not queue.client.exists(queue.keys.returned, queue.keys.result(gone))


@pytest.mark.parametrize("room", [1, 2, 5])
def test_jobs_that_are_handed_back_again_and_again_leave_places_for_new_jobs(queue: Queue, room: int) -> None:
    ours = scripts(queue, "a")
    for _ in range(20):
        queue.add(BODY)
    for ref in refs(ours.read(20)):
        ours.yield_(ref, idle_ms=30_000, due_in_ms=0)
    new = queue.add(BODY)
    found: list[Ref] = []
    while new not in (ids := {ref.id for ref in found}):
        found = refs(ours.read(room))
        assert len(found) == room
        for ref in found:
            ours.yield_(ref, idle_ms=30_000, due_in_ms=0)
    assert len(ids) == room
    assert len(refs(ours.read(30))) == 21


def test_after_a_sweep_that_took_all_places_new_jobs_are_read(queue: Queue) -> None:
    """Sweeps find more and more while jobs of a tenant above its limit become due faster than they are read."""
    ours = scripts(queue, "a")
    seen: list[bool] = []

    class Full(Sweeper):
        def sweep(self, room: int) -> list[Delivery]:
            return [Delivery("normal", f"1-{n}", {b"id": b"old"}) for n in range(room)]

    class Looks(Intake):
        def _accept(self, found: list[Delivery], sent: float) -> None:
            seen.append(found[0].fields[b"id"] == b"old")

    held, parts = Held(), MagicMock()
    sweeper = Full(ours, held, parts, 30, 15, parts)
    looks = Looks(settings_from({"model": "fake"}), ours, queue.client, held, *[parts] * 4, sweeper, *[parts] * 5)
    for _ in range(4):
        queue.add(BODY)
        assert looks.round()
    assert seen == [True, False, True, False]


class TestRunningCap:
    def start(self, scripts: Scripts, ref: Ref, tenant: str | None = "t") -> StartStatus:
        return scripts.start(ref, Identity(ref.id, tenant=tenant), prompt_tokens=1).status

    def finish(self, scripts: Steps, ref: Ref) -> None:
        started = scripts.start(ref, Identity(ref.id, tenant="t"), prompt_tokens=1)  # it runs: a new fence
        result = Result(id=ref.id, status=Status.SUCCEEDED, choices=())
        scripts.finalise(ref, Identity(ref.id, tenant="t"), result, fence=started.fence, published=0)

    def make(self, queue: Queue, jobs: int, cap: int) -> tuple[Steps, list[Ref]]:
        made = scripts(queue, "a", 200)
        queue.client.hset(queue.keys.meta, "max_running_per_tenant", cap)
        for _ in range(jobs):
            queue.add(BODY, tenant="t")
        return made, refs(made.read(jobs))

    def test_a_job_above_the_cap_is_handed_back_and_starts_when_another_has_ended(self, queue: Queue) -> None:
        ours, (first, second) = self.make(queue, 2, cap=1)
        assert self.start(ours, first) is StartStatus.OK
        assert self.start(ours, second) is StartStatus.CAPPED
        assert not queue.client.exists(queue.keys.out(second.id))
        assert refs(eventually(lambda: ours.read(5), 5)) == [second]
        assert self.start(ours, second) is StartStatus.CAPPED
        self.finish(ours, first)
        assert refs(eventually(lambda: ours.read(5), 5)) == [second]
        started = ours.start(second, Identity(second.id, tenant="t"), prompt_tokens=1)
        assert (started.status, started.attempt, started.tries) == (StartStatus.OK, 1, 1)

    def test_the_cap_does_not_apply_to_other_tenants_or_without_a_tenant(self, queue: Queue) -> None:
        ours, (first, second, third) = self.make(queue, 3, cap=1)
        assert self.start(ours, first) is StartStatus.OK
        assert self.start(ours, second, "u") is StartStatus.OK
        assert self.start(ours, third, None) is StartStatus.OK

    def test_an_entry_that_is_handed_back_or_restarted_takes_one_place(self, queue: Queue) -> None:
        ours, (first, second) = self.make(queue, 2, cap=1)
        assert self.start(ours, first) is StartStatus.OK
        assert self.start(ours, first) is StartStatus.OK  # as after a death
        ours.yield_(first, idle_ms=0)
        assert self.start(ours, second) is StartStatus.OK
        assert self.start(ours, first) is StartStatus.CAPPED

    def test_a_deleted_entry_takes_no_place(self, queue: Queue) -> None:
        ours, (first, second) = self.make(queue, 2, cap=1)
        assert self.start(ours, first) is StartStatus.OK
        queue.client.xdel(queue.keys.lane("normal"), first.entry)
        assert self.start(ours, second) is StartStatus.OK

    def test_a_job_above_the_cap_can_be_cancelled(self, queue: Queue) -> None:
        ours, (first, second) = self.make(queue, 2, cap=1)
        self.start(ours, first)
        assert self.start(ours, second) is StartStatus.CAPPED
        assert ours.cancel(second.id) is CancelReply.ASKED  # bare entries have no hash before their start
        assert refs(eventually(lambda: ours.read(5), 5)) == [second]
        assert self.start(ours, second) is StartStatus.CANCELLED

    def test_a_flood_of_one_tenants_jobs_ends_and_does_not_block_other_tenants(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.meta, "max_running_per_tenant", 2)
        jobs = [queue.add({"prompt": f"{i}", "max_tokens": 4}, tenant="t") for i in range(12)]
        others = [queue.add({"prompt": f"{i}", "max_tokens": 4}, tenant=f"u{i}") for i in range(12)]
        running = queue.keys.running("t")
        seen: list[int] = []

        def over() -> bool:
            seen.append(int(queue.client.scard(running)))
            return queue.depth() == 0

        # Fewer places than the flood has jobs: those that wait for its cap must not keep the others from being read.
        with inside(queue, FakeEngine(step_seconds=0.005), lease_seconds="2", max_waiting="4") as worker:
            eventually(over, 60)
            worker.at_rest()
        assert max(seen) <= 2
        ends = [queue.check_ending(job) for job in jobs + others]
        assert {(end["status"], end["attempt"]) for end in ends} == {("succeeded", 1)}
        assert not queue.client.exists(running, queue.keys.returned)


def test_a_worker_stops_computing_a_job_at_its_lease_end_by_its_own_clock(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While renewals fail, the blocks are free; later the job runs again, and no death counts for it."""
    renew, silent = Scripts.renew, [True]

    def deaf(self: Scripts, refs: list[Ref]) -> list[Ref]:
        if silent and refs:
            raise redis.TimeoutError("no reply")
        return renew(self, refs)

    monkeypatch.setattr(Scripts, "renew", deaf)
    with inside(queue, FakeEngine(step_seconds=0.01), lease_seconds="0.5") as worker:
        job = queue.add({"prompt": "x", "max_tokens": 200})
        eventually(lambda: worker.engine.stats().running)
        lost = worker.worker.telemetry.leases_lost
        eventually(lambda: lost._value.get() >= 1)
        eventually(
            lambda: worker.engine.stats().running == 0 or queue.client.hget(queue.keys.job(job), "attempt") > b"1"
        )
        silent.clear()
        assert queue.check_ending(job)["attempt"] >= 2
        assert queue.client.hmget(queue.keys.job(job), "tries", "deaths") == [b"1", b"0"]
        worker.at_rest()


def test_the_connection_for_hand_backs_is_used_by_one_thread_at_a_time() -> None:
    """A second connection would be opened, and refused after the password has changed."""
    pings: list[str] = []
    scripts = SimpleNamespace(client=SimpleNamespace(ping=lambda: pings.append("ping")))
    returner = Returner(scripts, Held(), Inbox(), 30)  # type: ignore[arg-type]
    with returner._in_use:
        returner.keep_alive()
    assert pings == []
    returner.keep_alive()
    assert pings == ["ping"]
