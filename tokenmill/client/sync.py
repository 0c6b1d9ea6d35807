"""The synchronous client.

    with Client("redis://localhost:6379/0", queue="default") as client:
        job = client.submit("Hello", max_tokens=32)
        for piece in job.text():
            print(piece, end="", flush=True)
        print(job.result().usage)
        for result in client.map(["a", "b", "c"], max_tokens=8):
            print(result.text)

Thread-safe. Importing it does not import torch.

While Redis is away, restarts or changes its master, every method tries again: for as long as its `timeout` allows;
without one a wait outlives five minutes of that, a single question such as `cancel` 30 s and a submit that is not to
wait 3 s. A client that has never reached its Redis gives up after 30 s. So callers see

    TimeoutError         the time-out is over, whether Redis was there or not; `__cause__` is Redis' last error, if any
    redis.RedisError     no time-out was given and Redis stayed away, or it refuses for good: a wrong password
                         (AuthenticationError), no right to a command (NoPermissionError), an unknown host, TLS spoken
                         to a plain port, a key of another type. What waiting does not mend is raised at once.

A time-out of 0 asks once. When a time-out ends, Redis has up to a second more for the answer under way, so that very
short ones can succeed at all. What they cannot cut short is this client's look-up of the host's name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from redis.exceptions import NoPermissionError, RedisError

from tokenmill.client.core import (
    BLOCK_MS,
    READ_COUNT,
    WINDOW,
    Ask,
    Emit,
    Exist,
    Get,
    MapResult,
    Once,
    Pause,
    Presence,
    Prompt,
    Run,
    Step,
    Steps,
    TextFollower,
    Window,
    abandon_steps,
    cancel_steps,
    check_event_id,
    finished_steps,
    forget_steps,
    make_submit,
    new_id,
    result_steps,
    results_steps,
    states_steps,
    stream_steps,
    submit_all_steps,
    submit_steps,
)
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
from tokenmill.client.params import GroupOptions, MapOptions, RequestParams
from tokenmill.client.patience import OUTAGE_S, Deadline, Line, Tries
from tokenmill.client.state import status_steps
from tokenmill.protocol.calls import EnqueueRefused
from tokenmill.protocol.connection import DEFAULT_URL, blocking_client, command_client, ends_by
from tokenmill.protocol.events import Event
from tokenmill.protocol.faults import DEMOTED
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys, check_name
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus

T = TypeVar("T")
log = logging.getLogger(__name__)

_trying: ContextVar[bool] = ContextVar("trying", default=False)
"""Inside of `Client.patiently`."""


class Job:
    """One job, known by its id; made by `Client.submit` and `Client.job`."""

    def __init__(self, client: Client, job_id: str, known: bool = False) -> None:
        """`known`: Redis has it, or had it."""
        self._client = client
        self.id = job_id
        self._presence = Presence(client.keys, *[job_id] if known else [])

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def stream(self, from_id: str = "0", timeout: float | None = None) -> Iterator[Event]:
        """Events in order, ending with the `FinalEvent`. Resume with the `id` of the last event seen as `from_id`.

        A `StartEvent` with a higher fence than one seen before means that another worker began anew: drop the text.

        Raises:
            ValueError: `from_id` is no event's id.
            TimeoutError: no end within `timeout` seconds (default: a day). What was there by then was handed out.
            JobLost: Redis had the job and knows nothing more of it.
            redis.RedisError: without a time-out: Redis stayed away for five minutes; with one: it refuses for good.
        """
        client, deadline = self._client, self._deadline(timeout)
        start = check_event_id(from_id)
        return client._drive(stream_steps(client.keys, self.id, start, deadline, client._block_ms, self._presence))

    def text(self, index: int = 0, timeout: float | None = None) -> Iterator[str]:
        """Pieces of one choice's text as they come. It ends with the job, however that ended: see `result()`.

        Raises:
            TextRestarted: a worker was lost and the new text differs from what was handed out.
            TimeoutError, JobLost: as `stream`.
        """
        follower = TextFollower(index)
        for event in self.stream(timeout=timeout):
            piece = follower.feed(event)
            if piece:
                yield piece

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, whatever its status. With `timeout=0`: return it if the job has ended.

        Raises:
            TimeoutError: no result within `timeout` seconds (default: a day). The job goes on.
            JobLost: Redis had the job and no longer knows it.
            redis.RedisError: without a time-out: Redis stayed away for five minutes; with one: it refuses for good.
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
        """Cancel: a queued or delayed job ends at once, a running one within a step. Partial text is kept.

        Args:
            ttl: seconds for which a cancel of a job that has not come yet is remembered.
            timeout: seconds to wait for Redis; the end of the job is not waited for.

        Raises:
            TimeoutError: Redis did not answer within `timeout` seconds. The job may have been cancelled.
            redis.RedisError: without a time-out: Redis stayed away for 30 s; with one: it refuses for good.
        """
        deadline = Deadline.after(f"job {self.id}: not cancelled", timeout)
        return self._client._once(cancel_steps(self._client.keys, self.id, reason, ttl, deadline))


class Group:
    """Jobs that are counted and followed together; made by `Client.group` and `Client.create_group`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"Group({self.name!r})"

    def expect(self, expected: int, timeout: float | None = None) -> None:
        """Announce how many jobs the group will have: it is complete when as many have ended.

        Raises:
            ValueError: `expected` is not a whole number of at least 0.
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: without a time-out: Redis stayed away for 30 s; with one: it refuses for good.
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

        A group without `expected` is never complete: the iteration ends with its time-out only.

        Args:
            after: the `entry` of the last member that was seen; `0`: from the beginning.
            timeout: seconds without a further end (default: a day).

        Raises:
            ValueError: `after` is not an entry.
            TimeoutError: no member ended for `timeout` seconds.
            GroupLost: Redis no longer knows the group.
            redis.RedisError: as `Job.stream`.
        """
        return self._client._drive(self._following(after, timeout).finished())

    def results(self, after: str = "0", timeout: float | None = None) -> Iterator[GroupResult]:
        """Yield the result of each member that has ended; as `finished`, whose arguments these are.

        Raises:
            JobLost: a result has expired or was deleted; `finished` still yields its id.
            ValueError, TimeoutError, GroupLost, redis.RedisError: as `finished`.
        """
        return self._client._drive(self._following(after, timeout).results())

    def cancel(
        self, reason: str = "user", ttl: int = CANCEL_TTL_S, timeout: float | None = None
    ) -> dict[str, CancelReply]:
        """Cancel every unfinished member that Redis knows; return the reply of each by id.

        Redis knows members that are delayed, were submitted by a client, or have started. A job added by a bare XADD
        that no worker has started is not found. Reads the ids of all unfinished jobs of the queue.

        Raises:
            TimeoutError: not done within `timeout` seconds; some members may have been cancelled.
            redis.RedisError: as `expect`.
        """
        deadline = Deadline.after(f"group {self.name}: not cancelled", timeout)
        return self._client._once(cancel_group_steps(self._client.keys, self.name, reason, ttl, deadline))

    def _following(self, after: str, timeout: float | None) -> Following:
        client = self._client
        return Following(client.keys, self.name, check_event_id(after, "after"), timeout, client._block_ms)


class Client:
    """Submits jobs to one queue and reads what comes of them.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        block_ms: how long one blocking read waits.
        fail_fast: where Redis cannot be reached at first, raise at once rather than wait for it.

    Raises:
        ValueError: a malformed URL, queue or prefix.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        queue: str = "default",
        *,
        prefix: str = "tokenmill",
        block_ms: int = BLOCK_MS,
        fail_fast: bool = False,
    ) -> None:
        self.keys = Keys(queue, prefix)
        self.redis = command_client(url, retries=0)
        self._blocking = blocking_client(url, block_ms)
        self._block_ms = block_ms
        self._runner = Runner(self.redis)
        self._line = Line(fail_fast)

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        id: str | None = None,
        priority: str = "normal",
        ttl: float | None = None,
        delay: float | None = None,
        group: str | None = None,
        tenant: str | None = None,
        stream: bool = True,
        callback: str | None = None,
        traceparent: str | None = None,
        max_attempts: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        **params: Unpack[RequestParams],
    ) -> Job:
        """Add a job: `prompt` (text or token ids) or `messages`, and any parameter of the body (`max_tokens`, …).

        Args:
            id: the job's id, never to be used again; random when left out.
            ttl: seconds, counted from when it joins its lane, after which it expires.
            delay: seconds before it joins its lane; longer where a cap of the queue stands against it then.
            stream: False: no token events, only the result.
            wait: while the queue is full or the tenant's quota used up, wait instead of raising.
            timeout: seconds to wait for Redis and, with `wait`, for room.

        Raises:
            JobError: a worker would refuse the job; nothing was sent.
            ValueError: an unknown `priority`.
            JobExists, QueueFull, QuotaExceeded: the queue did.
            TimeoutError: not taken within `timeout` seconds.
            redis.RedisError: without a time-out: Redis stayed away, for 3 s or, with `wait`, for five minutes.

        After the last two the job may have been added all the same. Name an `id` to find out: submitted again, it
        is refused as `JobExists` where it was.
        """
        job = make_submit(
            self.keys,
            prompt,
            priority,
            delay,
            wait,
            timeout,
            messages=messages,
            id=id,
            ttl=ttl,
            group=group,
            tenant=tenant,
            stream=stream,
            callback=callback,
            traceparent=traceparent,
            max_attempts=max_attempts,
            **params,
        )
        full = self._once(submit_steps(job))
        if full is not None:
            raise full
        return Job(self, job.entry.id, known=True)

    def job(self, id: str) -> Job:
        """A job submitted elsewhere. Nothing is asked of Redis yet.

        Raises:
            ValueError: not an id.
        """
        return Job(self, check_name("id", id))

    def status(self, id: str, timeout: float | None = None) -> JobStatus:
        """Return the state of a job, in one round trip.

        Raises:
            ValueError: not an id.
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: without a time-out: Redis stayed away for 30 s; with one: it refuses for good.
        """
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return self._once(status_steps(self.keys, id, deadline))

    def group(self, name: str | None = None) -> Group:
        """Return the group of a name; a random name when left out. Nothing is asked of Redis yet.

        Raises:
            ValueError: not a name.
        """
        return Group(self, new_id() if name is None else check_name("group", name))

    def create_group(self, expected: int, name: str | None = None, timeout: float | None = None) -> Group:
        """Create a group that is complete when `expected` jobs have ended. May be repeated.

        Raises:
            ValueError: not a name, or `expected` is not a whole number of at least 0.
            TimeoutError, redis.RedisError: as `Group.expect`.
        """
        group = self.group(name)
        group.expect(expected, timeout)
        return group

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        timeout: float | None = None,
        strict: bool = False,
        **params: Unpack[MapOptions],
    ) -> Generator[MapResult, None, None]:
        """Run many prompts with at most `window` unfinished at a time; yield the result of each.

        A prompt is text, token ids, chat messages, or a dict of `submit` arguments, which take precedence over
        `params`. Each result has the `prompt` and its `index`. A malformed prompt has a failed result with the error
        of the check; nothing of it was sent. Closing the iterator early cancels the unfinished jobs, and so does an
        error; where Redis does not answer that within five seconds, the log has their ids.

        Args:
            ordered: yield results in the order of the prompts, rather than in the order of their ends.
            timeout: seconds without any job's end or start (default: a day).
            strict: raise for a malformed prompt, which cancels the unfinished jobs.

        Raises:
            ValueError: `window` is below 1.
            JobError, TypeError, ValueError: with `strict`: a prompt is malformed.
            JobExists: the id that a prompt names is in use.
            QueueFull, QuotaExceeded: with `wait=False`: the queue has no room.
            JobLost: Redis had one of the jobs and no longer knows it.
            TimeoutError: for `timeout` seconds no job ended and the queue took none.
            redis.RedisError: as `Job.stream`.
        """
        block_ms = self._block_ms
        work = Window(
            self.keys,
            prompts,
            params,
            window=window,
            ordered=ordered,
            timeout=timeout,
            block_ms=block_ms,
            strict=strict,
        )
        try:
            yield from self._drive(work.steps())
        finally:
            self._abandon(list(work.pending))

    def submit_all(self, entries: Sequence[JobEntry], priority: str = "normal") -> list[EnqueueRefused | None]:
        """Add many jobs in one round trip; return None for each that was added, else why it was refused.

        Entries are not checked: the worker answers what is wrong with them.

        Raises:
            ValueError: an unknown `priority`.
            redis.RedisError: some may have been added. Repeated, those are refused as `JobExists`.
        """
        return self._once(submit_all_steps(self.keys, entries, priority))

    def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """Return up to 512 jobs of a group that have ended since `after`, as (entry, id) in the order of their ends.

        Args:
            after: the last entry that was seen.
            block_ms: milliseconds to wait for one, at most the client's own `block_ms`; None: do not wait.

        Raises:
            redis.RedisError: Redis stayed away for five minutes, or refuses.
        """
        block = None if block_ms is None else max(1, min(block_ms, self._block_ms))
        return self._once(finished_steps(self.keys, group, after, block))

    def results(self, ids: Sequence[str]) -> list[Result | None]:
        """Return the results of many jobs in one round trip, without waiting; None where there is none.

        Raises:
            redis.RedisError: as `finished`.
        """
        return self._once(results_steps(self.keys, ids))

    def states(self, ids: Sequence[str]) -> list[str | None]:
        """Return the states of many jobs in one round trip, `delayed` included; None where Redis knows no such job.

        Raises:
            redis.RedisError: as `finished`.
        """
        return self._once(states_steps(self.keys, ids))

    def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """Delete what Redis keeps of finished jobs, and their entries of a group's stream, ahead of their time.

        Raises:
            redis.RedisError: as `finished`.
        """
        self._once(forget_steps(self.keys, ids, group, entries))

    def patiently(
        self,
        call: Callable[[], T],
        deadline: Deadline | None = None,
        outage_s: float = OUTAGE_S,
        pause: Callable[[float], object] = time.sleep,
    ) -> T:
        """Call something that asks Redis and may be repeated, again and again while Redis is away; returns its reply.

        Within another `patiently` it is called once: the outer one does it all again.

        Args:
            deadline: of the whole call; where it has no time-out, `outage_s` counts.
            pause: waits between two tries.

        Raises:
            TimeoutError: the deadline is over.
            redis.RedisError: Redis stayed away, or refuses.
        """
        if _trying.get():
            return call()
        tries, token = Tries(self._line, deadline, outage_s), _trying.set(True)
        try:
            while True:
                try:
                    with ends_by(tries.ends_by):
                        reply = call()
                except RedisError as error:
                    if isinstance(error, DEMOTED):
                        for client in (self.redis, self._blocking):
                            client.connection_pool.disconnect(inuse_connections=False)
                    pause(tries.pause(error))
                else:
                    self._line.works()
                    return reply
        finally:
            _trying.reset(token)

    def close(self) -> None:
        """Close the connections."""
        self.redis.close()
        self._blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel jobs whose results are no longer awaited; a failure is logged, so that it hides no other error."""
        try:
            self._once(abandon_steps(self.keys, ids))
        except (RedisError, TimeoutError) as error:
            log.warning("unfinished jobs go on: %s; could not cancel them: %s", ", ".join(ids), error)

    def _once(self, steps: Once[T]) -> T:
        """Carry out the steps of a method that returns a value."""
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = self._carry_out(step)

    def _drive(self, steps: Steps[T]) -> Iterator[T]:
        """Carry out the steps of a method that yields values."""
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration:
                return
            reply = None
            if isinstance(step, Emit):
                yield step.value
            else:
                reply = self._carry_out(step)

    def _carry_out(self, step: Step) -> Any:
        match step:
            case Pause():
                return time.sleep(step.seconds)
            case Run():
                return self.patiently(lambda: self._runner.run_all(step.calls), step.deadline, step.outage_s)
            case Ask():
                return self.patiently(lambda: self._ask(step), step.deadline, step.outage_s)
            case Exist():
                return self._exist(step)
            case Get():
                return self.patiently(lambda: self.redis.mget(step.keys), step.deadline)
        return self.patiently(lambda: self._xread(step.streams, step.block_ms), step.deadline)

    def _ask(self, step: Ask) -> list[Any]:
        pipe = self.redis.pipeline(transaction=step.atomic)
        for command in step.commands:
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        return list(pipe.execute())

    def _exist(self, step: Exist) -> list[bool]:
        asked = Ask([("EXISTS", *keys) for keys in step.groups], step.deadline)
        try:
            return [count > 0 for count in self._carry_out(asked)]
        except NoPermissionError:  # the role `producer` may not look
            return [True] * len(step.groups)

    def _xread(self, streams: Mapping[str, str], block_ms: int | None) -> Any:
        asked: dict[Any, Any] = dict(streams)
        reader = self.redis if block_ms is None else self._blocking
        return reader.xread(asked, count=READ_COUNT, block=block_ms)
