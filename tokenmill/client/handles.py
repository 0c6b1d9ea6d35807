"""Handles of jobs and groups: `Job` and `Group` of `Client`, `AsyncJob` and `AsyncGroup` of `AsyncClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Unpack

from tokenmill.client.core import Presence, cancel_steps
from tokenmill.client.follow import TextFollower, check_event_id, result_steps, stream_steps
from tokenmill.client.groups import (
    Finished,
    Following,
    GroupResult,
    Progress,
    cancel_group_steps,
    check_expected,
    expect_steps,
    progress_steps,
)
from tokenmill.client.params import GroupOptions
from tokenmill.client.patience import Deadline
from tokenmill.protocol.events import Event
from tokenmill.protocol.keys import CANCEL_TTL_S
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus

if TYPE_CHECKING:
    from tokenmill.client.aio import AsyncClient
    from tokenmill.client.sync import Client


class Job:
    """A job of a queue; made by `Client.submit` and `Client.job`."""

    def __init__(self, client: Client, job_id: str, known: bool = False) -> None:
        """Make a handle, without asking Redis. `known`: Redis has the job, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> Iterator[Event]:
        """Yield the job's events in order, up to the `FinalEvent`.

        A `StartEvent` with a higher fence than an earlier `StartEvent` means that a second worker restarted the job:
        drop the text that came before it.

        Args:
            from_id: the `id` of the last event that was seen, to resume behind it; `0`: the beginning.
            timeout: seconds to wait for the final event; None: a day.

        Raises:
            ValueError: `from_id` is not the id of an event.
            TimeoutError: no final event within `timeout` seconds. The events that had come by then were yielded.
            JobLost: Redis had the job and no longer knows it.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for five minutes.
        """
        client, deadline = self._client, self._deadline(timeout)
        start = check_event_id(from_id)
        return client._drive(stream_steps(client.keys, self.id, start, deadline, client._block_ms, self._presence))

    def text(self, index: int = 0, timeout: float | None = None) -> Iterator[str]:
        """Yield the text of one choice, in pieces as they come, until the job ends.

        The iteration ends in the same way for a job that failed: `result` has the status.

        Args:
            index: index of the choice.
            timeout: as for `stream`.

        Raises:
            TextRestarted: a worker was lost, and the new text differs from the text that was yielded.
            TimeoutError, JobLost, redis.RedisError: as `stream`.
        """
        follower = TextFollower(index)
        for event in self.stream(timeout=timeout):
            piece = follower.feed(event)
            if piece:
                yield piece

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, whatever its status. With `timeout=0`: return it if the job has ended.

        Raises:
            TimeoutError: no result within `timeout` seconds (None: a day). The job keeps running.
            JobLost: Redis had the job and no longer knows it.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for five minutes.
        """
        client = self._client
        return client._once(
            result_steps(client.keys, self.id, self._deadline(timeout), client._block_ms, self._presence)
        )

    def status(self, timeout: float | None = None) -> JobStatus:
        """Return the job's state; see `Client.status`."""
        return self._client.status(self.id, timeout)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(f"job {self.id}: not finished", timeout)

    def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None) -> CancelReply:
        """Cancel the job: a queued or delayed job ends at once, a running job within a step. Partial text is kept.

        Args:
            reason: kept in the result.
            ttl: seconds for which Redis keeps the cancel of a job that it does not know yet.
            timeout: seconds to wait for Redis; the call does not wait for the end of the job.

        Raises:
            TimeoutError: Redis did not answer within `timeout` seconds. The job may have been cancelled.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for 30 s.
        """
        deadline = Deadline.after(f"job {self.id}: not cancelled", timeout)
        return self._client._once(cancel_steps(self._client.keys, self.id, reason, ttl, deadline))


class Group:
    """A group of jobs, counted and followed together; made by `Client.group` and `Client.create_group`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"Group({self.name!r})"

    def expect(self, expected: int, timeout: float | None = None) -> None:
        """Announce how many jobs the group will have: it is complete when that many jobs have ended.

        Raises:
            ValueError: `expected` is not a whole number of at least 0.
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for 30 s.
        """
        deadline = Deadline.after(f"group {self.name}: not created", timeout)
        self._client._once(expect_steps(self._client.keys, self.name, check_expected(expected), deadline))

    def submit(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GroupOptions]) -> Job:
        """Submit a job as a member of the group; arguments and errors are those of `Client.submit`."""
        return self._client.submit(prompt, **options, group=self.name)

    def progress(self, timeout: float | None = None) -> Progress:
        """Return the group's counts; all zero for a group that Redis does not know.

        Raises:
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: as `expect`.
        """
        deadline = Deadline.after(f"group {self.name}: no counts", timeout)
        return self._client._once(progress_steps(self._client.keys, self.name, deadline))

    def finished(self, after: str = "0", timeout: float | None = None) -> Iterator[Finished]:
        """Yield each member that has ended, in the order of the ends, until the group is complete.

        A group without `expected` is never complete: then the iteration ends only with its time-out.

        Args:
            after: the `entry` of the last member that was seen; `0`: the beginning.
            timeout: seconds without a further end of a member; None: a day.

        Raises:
            ValueError: `after` is not the ID of an entry.
            TimeoutError: no member ended for `timeout` seconds.
            GroupLost: Redis no longer knows the group.
            redis.RedisError: as `Job.stream`.
        """
        return self._client._drive(self._following(after, timeout).finished())

    def results(self, after: str = "0", timeout: float | None = None) -> Iterator[GroupResult]:
        """Yield the result of each member that has ended. Arguments and order are those of `finished`.

        Raises:
            JobLost: a result has expired or was deleted; `finished` still yields the id of its job.
            ValueError, TimeoutError, GroupLost, redis.RedisError: as `finished`.
        """
        return self._client._drive(self._following(after, timeout).results())

    def cancel(
        self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None
    ) -> dict[str, CancelReply]:
        """Cancel every unfinished member that Redis knows; return {job id: reply}.

        Redis knows members that are delayed, were submitted by a client, or have started, but not a job that was added
        by a bare XADD and that no worker has started. Reads the ids of all unfinished jobs of the queue.

        Raises:
            TimeoutError: not done within `timeout` seconds; some members may have been cancelled.
            redis.RedisError: as `expect`.
        """
        deadline = Deadline.after(f"group {self.name}: not cancelled", timeout)
        return self._client._once(cancel_group_steps(self._client.keys, self.name, reason, ttl, deadline))

    def _following(self, after: str, timeout: float | None) -> Following:
        client = self._client
        return Following(client.keys, self.name, check_event_id(after, "after"), timeout, client._block_ms)


class AsyncJob:
    """A job of a queue; made by `AsyncClient.submit` and `AsyncClient.job`."""

    def __init__(self, client: AsyncClient, job_id: str, known: bool = False) -> None:
        """Make a handle, without asking Redis. `known`: Redis has the job, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> AsyncGenerator[Event, None]:
        """Same as `Job.stream`."""
        client, deadline = self._client, self._deadline(timeout)
        start = check_event_id(from_id)
        return client._drive(stream_steps(client.keys, self.id, start, deadline, client._block_ms, self._presence))

    async def text(self, index: int = 0, timeout: float | None = None) -> AsyncIterator[str]:
        """Same as `Job.text`."""
        follower = TextFollower(index)
        async with aclosing(self.stream(timeout=timeout)) as events:
            async for event in events:
                piece = follower.feed(event)
                if piece:
                    yield piece

    async def result(self, timeout: float | None = None) -> Result:
        """Same as `Job.result`."""
        client = self._client
        return await client._once(
            result_steps(client.keys, self.id, self._deadline(timeout), client._block_ms, self._presence)
        )

    async def status(self, timeout: float | None = None) -> JobStatus:
        """Same as `Job.status`."""
        return await self._client.status(self.id, timeout)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(f"job {self.id}: not finished", timeout)

    async def cancel(self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None) -> CancelReply:
        """Same as `Job.cancel`."""
        deadline = Deadline.after(f"job {self.id}: not cancelled", timeout)
        return await self._client._once(cancel_steps(self._client.keys, self.id, reason, ttl, deadline))


class AsyncGroup:
    """A group of jobs, counted and followed together; made by `AsyncClient.group` and `AsyncClient.create_group`."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"AsyncGroup({self.name!r})"

    async def expect(self, expected: int, timeout: float | None = None) -> None:
        """Same as `Group.expect`."""
        deadline = Deadline.after(f"group {self.name}: not created", timeout)
        await self._client._once(expect_steps(self._client.keys, self.name, check_expected(expected), deadline))

    async def submit(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GroupOptions]) -> AsyncJob:
        """Same as `Group.submit`."""
        return await self._client.submit(prompt, **options, group=self.name)

    async def progress(self, timeout: float | None = None) -> Progress:
        """Same as `Group.progress`."""
        deadline = Deadline.after(f"group {self.name}: no counts", timeout)
        return await self._client._once(progress_steps(self._client.keys, self.name, deadline))

    def finished(self, after: str = "0", timeout: float | None = None) -> AsyncGenerator[Finished, None]:
        """Same as `Group.finished`."""
        return self._client._drive(self._following(after, timeout).finished())

    def results(self, after: str = "0", timeout: float | None = None) -> AsyncGenerator[GroupResult, None]:
        """Same as `Group.results`."""
        return self._client._drive(self._following(after, timeout).results())

    async def cancel(
        self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None
    ) -> dict[str, CancelReply]:
        """Same as `Group.cancel`."""
        deadline = Deadline.after(f"group {self.name}: not cancelled", timeout)
        return await self._client._once(cancel_group_steps(self._client.keys, self.name, reason, ttl, deadline))

    def _following(self, after: str, timeout: float | None) -> Following:
        client = self._client
        return Following(client.keys, self.name, check_event_id(after, "after"), timeout, client._block_ms)
