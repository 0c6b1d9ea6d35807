"""The synchronous client.

    with Client("redis://localhost:6379/0", queue="default") as client:
        job = client.submit("Hello", max_tokens=32)
        for piece in job.text():
            print(piece, end="", flush=True)
        print(job.result().usage)
        for result in client.map(["a", "b", "c"], max_tokens=8):
            print(result.text)

A `Client` is thread-safe. Importing it does not import torch.

While Redis is away, restarts or fails over, every method retries: as long as its `timeout` allows; without a time-out a
wait retries for five minutes, a single question such as `cancel` for 30 s, and a `submit` without `wait` for 3 s. A
client that has never reached its Redis gives up after 30 s. So callers get

    TimeoutError         the time-out is over, whether Redis was reachable or not; `__cause__` is the last error of
                         Redis, if there was an error
    redis.RedisError     the call has no time-out and Redis stayed away; or an error that a retry cannot mend, raised at
                         once: a wrong password (AuthenticationError), no right to a command (NoPermissionError), an
                         unknown host, TLS spoken to a plain port, a key of another type

With a time-out of 0 Redis is asked once. When a time-out ends, Redis has up to a second more to answer the command
under way, so that very short time-outs can succeed at all. A time-out cannot cut short the look-up of the host's name.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Unpack

from tokenmill.client.core import (
    Submit,
    cancel_all_steps,
    finished_steps,
    forget_steps,
    make_submit,
    new_id,
    results_steps,
    states_steps,
    submit_all_steps,
    submit_of,
    submit_steps,
)
from tokenmill.client.handles import Group, Job
from tokenmill.client.params import MapOptions, RequestParams
from tokenmill.client.patience import Deadline
from tokenmill.client.state import Lookup, lookup_steps, status_steps, workers_steps
from tokenmill.client.transport import Transport
from tokenmill.client.window import WINDOW, MapResult, Prompt, Window
from tokenmill.protocol.calls import EnqueueRefused
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import check_name
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus
from tokenmill.protocol.workers import WorkerInfo

__all__ = ["Client", "Group", "Job"]


class Client(Transport):
    """Submits jobs to one queue and reads their events and results.

    Args:
        url: URL of Redis: `redis://`, `rediss://` or `unix://`.
        queue: name of the queue.
        prefix: prefix of every key of the queue.
        block_ms: how many milliseconds one blocking read waits.
        fail_fast: raise at once if the first command cannot reach Redis, instead of waiting for it.

    Raises:
        ValueError: the URL, the queue or the prefix is malformed.
    """

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
        """Submit a job: `prompt` (text or token ids) or `messages`, and any key of the body (`max_tokens`, …).

        Args:
            id: the job's id, used only once; None: a random id.
            priority: the lane: `high`, `normal` or `low`.
            ttl: seconds after which the job expires, counted from when it joins its lane.
            delay: seconds before the job joins its lane; longer if the queue or the tenant's quota is full then.
            group: the group that counts the job.
            tenant: the tenant whose quota counts the job.
            stream: False: no token events, only the result.
            callback: URL to which the result is posted.
            traceparent: W3C trace context.
            max_attempts: maximum number of starts.
            wait: while the queue or the tenant's quota is full, wait instead of raising.
            timeout: seconds to wait for Redis and, with `wait`, for room.

        Raises:
            JobError: a worker would refuse the job; nothing was sent.
            ValueError: `priority` is not a lane.
            JobExists, QueueFull, QuotaExceeded: the queue refused the job.
            TimeoutError: the queue did not take the job within `timeout` seconds.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for 3 s (with `wait`: five
                minutes).

        After the last two errors the job may have been added nevertheless. With an `id` of your own a second `submit`
        tells: it raises `JobExists` if the job was added.
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
        return self._submit(job)

    def submit_entry(
        self, entry: JobEntry, priority: str = "normal", *, delay: float | None = None, timeout: float | None = None
    ) -> Job:
        """Submit a job whose entry was built and checked before; arguments and errors are those of `submit`."""
        return self._submit(submit_of(self.keys, entry, priority, delay, False, timeout))

    def _submit(self, job: Submit) -> Job:
        full = self._once(submit_steps(job))
        if full is not None:
            raise full
        return Job(self, job.entry.id, known=True)

    def job(self, id: str) -> Job:
        """Return the handle of a job that any process has submitted, without asking Redis.

        Raises:
            ValueError: `id` is not a valid id.
        """
        return Job(self, check_name("id", id))

    def status(self, id: str, timeout: float | None = None) -> JobStatus:
        """Return the state of a job, in one round trip.

        Raises:
            ValueError: `id` is not a valid id.
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for 30 s.
        """
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return self._once(status_steps(self.keys, id, deadline))

    def lookup(self, id: str, timeout: float | None = None, with_result: bool = True) -> Lookup:
        """Return the state, the tenant and the result of a job, in one round trip.

        Args:
            with_result: False: leave out the result, which may be large.

        Raises:
            ValueError, TimeoutError, redis.RedisError: as `status`.
        """
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return self._once(lookup_steps(self.keys, id, deadline, with_result))

    def workers(self, timeout: float | None = None) -> tuple[WorkerInfo, ...]:
        """Return the live workers of the queue, ordered by name.

        Asks for the consumers of the lanes; only if none of them lives, the keyspace is scanned, at most once a minute.
        The access roles `producer` and `client` may not list workers.

        Raises:
            TimeoutError: Redis did not answer within `timeout` seconds.
            redis.RedisError: Redis refuses the command; or, without a time-out, stayed away for 30 s.
        """
        deadline = Deadline.after(f"queue {self.keys.queue}: no list of workers", timeout)
        return self._once(workers_steps(self.keys, self._roster, deadline))

    def group(self, name: str | None = None) -> Group:
        """Return the handle of a group (without `name`: of a new group with a random name), without asking Redis.

        Raises:
            ValueError: `name` is not a valid name.
        """
        return Group(self, new_id() if name is None else check_name("group", name))

    def create_group(self, expected: int, name: str | None = None, timeout: float | None = None) -> Group:
        """Create a group that is complete when `expected` jobs have ended. The call is idempotent.

        Raises:
            ValueError: `name` is not a valid name, or `expected` is not a whole number of at least 0.
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
        """Run many prompts, with at most `window` unfinished jobs at a time; yield the result of each prompt.

        A prompt is text, token ids, chat messages, or a dict of `submit` arguments, which take precedence over
        `params`. Each result has the `prompt` and its `index`. A malformed prompt has a failed result with the error
        of the check; no job was submitted for it. An error, or closing the iterator early, cancels the unfinished jobs;
        if Redis does not answer within five seconds, their ids are logged.

        Args:
            window: maximum number of unfinished jobs.
            ordered: yield results in the order of the prompts, instead of the order of their ends.
            timeout: seconds without an end of a job, and without the queue taking a job; None: a day.
            strict: raise for a malformed prompt, which cancels the unfinished jobs.

        Raises:
            ValueError: `window` is below 1.
            JobError, TypeError, ValueError: with `strict`: a prompt is malformed.
            JobExists: the id that a prompt names is in use.
            QueueFull, QuotaExceeded: with `wait=False`: the queue has no room.
            JobLost: Redis had one of the jobs and no longer knows it.
            TimeoutError: for `timeout` seconds no job ended and the queue took no job.
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
        """Submit many jobs in one round trip; return None for each job that was added, otherwise why it was refused.

        The entries are not checked here: a malformed entry gets an error result from a worker.

        Raises:
            ValueError: `priority` is not a lane.
            redis.RedisError: some jobs may have been added; submitted again, these are refused as `JobExists`.
        """
        return self._once(submit_all_steps(self.keys, entries, priority))

    def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """Return up to 512 jobs of a group that have ended, as pairs (entry, job id) in the order of their ends.

        Args:
            after: the entry of the last job that was seen; `0`: the beginning.
            block_ms: milliseconds to wait for a first end, at most the client's own `block_ms`; None: do not wait.

        Raises:
            redis.RedisError: Redis stayed away for five minutes, or refuses a command.
        """
        block = None if block_ms is None else max(1, min(block_ms, self._block_ms))
        return self._once(finished_steps(self.keys, group, after, block))

    def results(self, ids: Sequence[str]) -> list[Result | None]:
        """Return the results of many jobs in one round trip, without waiting; None for a job without a result.

        Raises:
            redis.RedisError: as `finished`.
        """
        return self._once(results_steps(self.keys, ids))

    def states(self, ids: Sequence[str]) -> list[str | None]:
        """Return the states of many jobs in one round trip, `delayed` included; None for a job unknown to Redis.

        Raises:
            redis.RedisError: as `finished`.
        """
        return self._once(states_steps(self.keys, ids))

    def cancel_all(self, ids: Sequence[str], reason: str = "user") -> list[CancelReply]:
        """Cancel many jobs in one round trip; return what happened to each, as `Job.cancel`.

        Raises:
            redis.RedisError: Redis refuses the command, or stayed away for 30 s.
        """
        return self._once(cancel_all_steps(self.keys, ids, reason))

    def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """Delete the keys of finished jobs, and their entries in a group's stream, before they expire.

        Raises:
            redis.RedisError: as `finished`.
        """
        self._once(forget_steps(self.keys, ids, group, entries))
