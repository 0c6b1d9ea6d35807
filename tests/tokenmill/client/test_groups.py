"""Groups, the state of a job, results without waiting, and the prompts of `map`, in both clients."""

from __future__ import annotations

import pytest

from tests.support import eventually
from tests.tokenmill.client.test_aio import run
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill import (
    AsyncClient,
    CancelReply,
    Client,
    GroupLost,
    JobError,
    JobLost,
    JobStatus,
    Progress,
    QueueFull,
    Status,
    WaitTimeout,
)
from tokenmill.client import groups
from tokenmill.protocol.result import Result


def test_status_tells_every_state_of_a_job_apart(client: Client, queue: Queue) -> None:
    job = client.submit("x", delay=60)
    assert (client.status("never"), job.status()) == (JobStatus.UNKNOWN, JobStatus.DELAYED)
    job.cancel()
    assert job.status() is JobStatus.CANCELLED
    held, failing = client.submit("one HOLD"), client.submit("FAIL")
    assert client.status(held.id) is JobStatus.QUEUED
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: held.status() is JobStatus.RUNNING)
    assert failing.status() is JobStatus.QUEUED
    worker.release()
    eventually(lambda: failing.status() is JobStatus.FAILED)
    assert held.status() is JobStatus.SUCCEEDED
    worker.stop()
    late = client.submit("x", ttl=0.001)
    worker = MiniWorker(queue)
    worker.start()
    eventually(lambda: late.status() is JobStatus.EXPIRED)
    worker.stop()
    assert [one for one in JobStatus if one.ended] == [one.value for one in Status]


def test_status_reads_an_ending_from_the_result_alone(client: Client, queue: Queue) -> None:
    queue.redis.set(queue.keys.result("a"), Result("a", Status.SUCCEEDED).to_json())
    assert client.status("a") is JobStatus.SUCCEEDED
    with pytest.raises(ValueError, match="id"):
        client.status("not an id")


@pytest.mark.redis_server
def test_status_is_one_round_trip(client: Client, queue: Queue) -> None:
    job = client.submit("x")
    sent: list[object] = []
    connection = client.redis.connection_pool.connection_class
    original = connection.send_packed_command

    def counted(self: object, command: object, check_health: bool = True) -> None:
        sent.append(command)
        original(self, command, check_health)  # type: ignore[arg-type]

    connection.send_packed_command = counted  # type: ignore[method-assign,assignment]
    try:
        job.status()
    finally:
        connection.send_packed_command = original  # type: ignore[method-assign]
    assert len(sent) == 1


def test_a_result_without_waiting_is_returned_or_raises_a_time_out(client: Client, queue: Queue) -> None:
    job = client.submit("x")
    with pytest.raises(WaitTimeout):
        job.result(timeout=0)
    job.cancel()
    assert job.result(timeout=0).status is Status.CANCELLED
    with pytest.raises(TimeoutError):
        client.job("never").result(timeout=0)


def test_map_links_each_result_to_its_prompt(client: Client, worker: MiniWorker) -> None:
    prompts = ["one", {"prompt": "two"}, [3]]
    for ordered in (True, False):
        found = list(client.map(prompts, ordered=ordered, timeout=20))
        assert sorted((r.index, str(r.prompt)) for r in found) == [(n, str(p)) for n, p in enumerate(prompts)]
        assert {r.index: r.text for r in found} == {0: "one ", 1: "two ", 2: "[3] "}


MALFORMED = ["", None, 5, b"x", {"prompt": "x", "temprature": 1}, {"prompt": "x", "priority": "urgent"}, object()]
MALFORMED += [{"prompt": "x", "id": "not an id"}, {"prompt": "x", "ttl": float("nan")}, {"prompt": "x", "delay": 1e300}]
MALFORMED += [{"messages": ["no object"]}, {"prompt": "x", "delay": "soon"}, {1, 2}]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_malformed_prompt_fails_in_its_place_and_cancels_no_job(
    client: Client, worker: MiniWorker, ordered: bool
) -> None:
    prompts = [*MALFORMED, "good", *MALFORMED]
    found = list(client.map(prompts, window=1, ordered=ordered, timeout=20))  # type: ignore[arg-type]
    assert sorted(result.index for result in found) == [*range(len(prompts))]
    for result in found:
        if result.prompt == "good":
            assert result.text == "good "
        else:
            assert result.status is Status.FAILED
            assert result.error is not None
            named = isinstance(result.prompt, dict) and "id" in result.prompt
            assert result.error.code == ("no_id" if named else "invalid_request")
    assert list(client.map([], timeout=1)) == []
    with pytest.raises(JobError):
        list(client.map(["", "good"], strict=True, timeout=5))


def test_map_without_wait_raises_where_the_queue_is_full(client: Client, queue: Queue) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 0)
    with pytest.raises(QueueFull):
        list(client.map(["x"], wait=False, timeout=5))


def test_a_group_counts_its_members_and_is_followed_to_its_end(client: Client, queue: Queue) -> None:
    group = client.create_group(3, "mine")
    assert group.progress() == Progress(expected=3)
    jobs = [group.submit(text) for text in ("one", "FAIL", "three")]
    jobs[2].cancel()
    assert group.progress() == Progress(3, total=3, cancelled=1)
    worker = MiniWorker(queue)
    worker.start()
    ends = list(group.finished(timeout=10))
    assert [end.id for end in ends] == [jobs[2].id, jobs[0].id, jobs[1].id]
    assert [end.status for end in ends] == [Status.CANCELLED, Status.SUCCEEDED, Status.FAILED]
    assert group.progress() == Progress(3, 3, succeeded=1, failed=1, cancelled=1)
    assert group.progress().complete
    results = list(client.group("mine").results(timeout=5))
    assert [(result.entry, result.id, result.status) for result in results] == [tuple(end) for end in ends]
    assert list(group.finished(after=ends[0].entry, timeout=5)) == ends[1:]
    assert [one.id for one in group.results(after=ends[1].entry, timeout=5)] == [jobs[1].id]
    with pytest.raises(ValueError, match="after"):
        group.finished(after="x")
    worker.stop()


def test_a_group_is_followed_while_its_members_end(client: Client, queue: Queue, worker: MiniWorker) -> None:
    group = client.create_group(40)
    for number in range(20):
        group.submit(f"w{number}", stream=False)
    results = group.results(timeout=20)
    first = [next(results).text for _ in range(20)]
    for number in range(20, 40):
        group.submit(f"w{number}", stream=False)
    assert first + [result.text for result in results] == [f"w{number} " for number in range(40)]


def test_following_a_group_waits_until_it_is_complete(client: Client, worker: MiniWorker) -> None:
    group = client.group()
    group.submit("one")
    ends = group.finished(timeout=1)
    assert next(ends).status is Status.SUCCEEDED
    with pytest.raises(TimeoutError, match=f"group {group.name}: no job ended"):
        next(ends)
    group.expect(1)
    assert len(list(group.finished(timeout=5))) == 1
    assert list(client.create_group(0).finished(timeout=5)) == []
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="expected"):
            group.expect(wrong)  # type: ignore[arg-type]


def test_a_group_or_result_that_redis_lost_ends_the_wait(client: Client, queue: Queue, worker: MiniWorker) -> None:
    group = client.create_group(2)
    job = group.submit("one")
    ends = group.finished(timeout=20)
    entry = next(ends).entry
    queue.redis.delete(queue.keys.result(job.id))
    with pytest.raises(JobLost):
        list(group.results(timeout=5))
    queue.redis.delete(queue.keys.group(group.name), queue.keys.group_out(group.name))
    with pytest.raises(GroupLost):
        list(ends)
    with pytest.raises(GroupLost):
        list(group.finished(after=entry, timeout=5))


def test_cancelling_a_group_ends_its_members_wherever_they_were_submitted(
    client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "PAGE", 3)
    group = client.create_group(8, "mine")
    mine = [group.submit("x") for _ in range(4)] + [group.submit("x", delay=60) for _ in range(2)]
    mine += [client.submit("x", group="mine", tenant="t"), client.submit("HOLD", group="mine", priority="high")]
    others = [client.submit("x"), client.submit("x", group="other", delay=60)]
    worker = MiniWorker(queue)
    worker.scripts.ensure_groups()
    (delivery,) = worker.scripts.read(1) or ()
    worker._serve = lambda _: None  # type: ignore[method-assign]
    told = client.group("mine").cancel()
    assert told.keys() == {job.id for job in mine}
    assert set(told.values()) <= {CancelReply.DONE, CancelReply.ASKED}
    assert delivery.fields[b"id"].decode() in told
    assert group.progress().cancelled >= 7
    assert [job.status() for job in others] == [JobStatus.QUEUED, JobStatus.DELAYED]
    assert client.group("unknown").cancel() == {}


def test_all_ids_of_a_sorted_set_are_read_even_if_scores_are_equal(
    client: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "PAGE", 2)
    for number in range(11):
        job = client.submit("x", id=f"j{number}", group="mine")
        queue.redis.zadd(queue.keys.open, {job.id: 1_700_000_000_123 * (-1 if number % 2 else 1)})
    queue.redis.zadd(queue.keys.delayed, {b"\xff not an id": 1})
    assert len(client.group("mine").cancel()) == 11


def test_the_asyncio_client_has_groups_status_and_bulk_calls_too(queue: Queue, worker: MiniWorker) -> None:
    async def scene(client: AsyncClient) -> None:
        group = await client.create_group(2)
        jobs = [await group.submit("one"), await group.submit("FAIL")]
        ends = [end async for end in group.finished(timeout=10)]
        assert [end.id for end in ends] == [job.id for job in jobs]
        assert [r.text async for r in group.results(after=ends[0].entry, timeout=5)] == [""]
        assert (await group.progress()).complete
        assert await group.cancel() == {}
        assert await jobs[0].status() is JobStatus.SUCCEEDED
        assert await client.status("never") is JobStatus.UNKNOWN
        assert await client.states([jobs[1].id, "never"]) == ["failed", None]
        assert await client.finished(group.name, ends[0].entry) == [(ends[1].entry, ends[1].id)]
        assert [r and r.status for r in await client.results([jobs[0].id, "never"])] == [Status.SUCCEEDED, None]
        await client.forget([ends[0].id], group.name, [ends[0].entry])
        assert await client.status(ends[0].id) is JobStatus.UNKNOWN
        with pytest.raises(TimeoutError):
            await client.job("never").result(timeout=0)
        found = [(r.index, r.prompt, r.ok) async for r in client.map(["", "two"], timeout=10)]
        assert found == [(0, "", False), (1, "two", True)]
        with pytest.raises(JobError):
            _ = [r async for r in client.map([""], strict=True)]

    run(queue, scene)
