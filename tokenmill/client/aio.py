"""The asyncio client: the methods of `Client`, to be awaited or iterated with `async for`.

    async with AsyncClient("redis://localhost:6379/0") as client:
        job = await client.submit(messages=[{"role": "user", "content": "Hello"}])
        async for piece in job.text():
            print(piece, end="", flush=True)
        result = await job.result(timeout=60)
        async for result in client.map(prompts, window=32, ordered=False):
            ...

`tokenmill.client.sync` documents the arguments, the errors, and what callers get while Redis is away.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
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
from tokenmill.client.handles import AsyncGroup, AsyncJob
from tokenmill.client.params import MapOptions, RequestParams
from tokenmill.client.patience import Deadline
from tokenmill.client.state import Lookup, lookup_steps, status_steps, workers_steps
from tokenmill.client.transport import AsyncTransport
from tokenmill.client.window import WINDOW, MapResult, Prompt, Window
from tokenmill.protocol.calls import EnqueueRefused
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import check_name
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus
from tokenmill.protocol.workers import WorkerInfo

__all__ = ["AsyncClient", "AsyncGroup", "AsyncJob"]


class AsyncClient(AsyncTransport):
    """Submits jobs to one queue and reads their events and results. For one event loop; arguments as `Client`."""

    async def submit(
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
    ) -> AsyncJob:
        """Same as `Client.submit`."""
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
        return await self._submit(job)

    async def submit_entry(
        self, entry: JobEntry, priority: str = "normal", *, delay: float | None = None, timeout: float | None = None
    ) -> AsyncJob:
        """Same as `Client.submit_entry`."""
        return await self._submit(submit_of(self.keys, entry, priority, delay, False, timeout))

    async def _submit(self, job: Submit) -> AsyncJob:
        full = await self._once(submit_steps(job))
        if full is not None:
            raise full
        return AsyncJob(self, job.entry.id, known=True)

    def job(self, id: str) -> AsyncJob:
        """Same as `Client.job`."""
        return AsyncJob(self, check_name("id", id))

    async def status(self, id: str, timeout: float | None = None) -> JobStatus:
        """Same as `Client.status`."""
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return await self._once(status_steps(self.keys, id, deadline))

    async def lookup(self, id: str, timeout: float | None = None, with_result: bool = True) -> Lookup:
        """Same as `Client.lookup`."""
        deadline = Deadline.after(f"job {check_name('id', id)}: no status", timeout)
        return await self._once(lookup_steps(self.keys, id, deadline, with_result))

    async def workers(self, timeout: float | None = None) -> tuple[WorkerInfo, ...]:
        """Same as `Client.workers`."""
        deadline = Deadline.after(f"queue {self.keys.queue}: no list of workers", timeout)
        return await self._once(workers_steps(self.keys, self._roster, deadline))

    def group(self, name: str | None = None) -> AsyncGroup:
        """Same as `Client.group`."""
        return AsyncGroup(self, new_id() if name is None else check_name("group", name))

    async def create_group(self, expected: int, name: str | None = None, timeout: float | None = None) -> AsyncGroup:
        """Same as `Client.create_group`."""
        group = self.group(name)
        await group.expect(expected, timeout)
        return group

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        timeout: float | None = None,
        strict: bool = False,
        **params: Unpack[MapOptions],
    ) -> AsyncGenerator[MapResult, None]:
        """Same as `Client.map`. Use `contextlib.aclosing` to leave the loop early: it cancels unfinished jobs."""
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
            async with aclosing(self._drive(work.steps())) as results:
                async for result in results:
                    yield result
        finally:
            await self._abandon(list(work.pending))

    async def submit_all(self, entries: Sequence[JobEntry], priority: str = "normal") -> list[EnqueueRefused | None]:
        """Same as `Client.submit_all`."""
        return await self._once(submit_all_steps(self.keys, entries, priority))

    async def finished(self, group: str, after: str = "0", block_ms: int | None = None) -> list[tuple[str, str]]:
        """Same as `Client.finished`."""
        block = None if block_ms is None else max(1, min(block_ms, self._block_ms))
        return await self._once(finished_steps(self.keys, group, after, block))

    async def results(self, ids: Sequence[str]) -> list[Result | None]:
        """Same as `Client.results`."""
        return await self._once(results_steps(self.keys, ids))

    async def states(self, ids: Sequence[str]) -> list[str | None]:
        """Same as `Client.states`."""
        return await self._once(states_steps(self.keys, ids))

    async def cancel_all(self, ids: Sequence[str], reason: str = "user") -> list[CancelReply]:
        """Same as `Client.cancel_all`."""
        return await self._once(cancel_all_steps(self.keys, ids, reason))

    async def forget(self, ids: Sequence[str], group: str, entries: Sequence[str]) -> None:
        """Same as `Client.forget`."""
        await self._once(forget_steps(self.keys, ids, group, entries))
