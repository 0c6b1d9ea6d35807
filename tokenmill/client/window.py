"""`map`, without I/O: runs many prompts with a bounded number of unfinished jobs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.client.core import (
    Emit,
    Full,
    Get,
    Presence,
    Read,
    Steps,
    Submit,
    extended,
    make_entry,
    submit_steps,
)
from tokenmill.client.patience import Deadline
from tokenmill.protocol.calls import enqueue_call
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import SEAL_ID
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import ErrorInfo, Result, Status

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""For `map`: text, token ids, chat messages, or keyword arguments of `submit`."""

WINDOW = 64
"""Default maximum number of unfinished jobs."""
FULL_MS = 1000
"""While the queue is full: how long one read waits for an end of a running job, before the next job is tried again."""


@dataclass(frozen=True, slots=True)
class MapResult(Result):
    """The result of one prompt of `map`."""

    index: int = 0
    """The prompt's position, counted from 0."""
    prompt: Any = None
    """The prompt as it was passed to `map`."""


def map_arguments(prompt: Prompt) -> dict[str, Any]:
    """Return the arguments of `submit` for a prompt of `map`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": prompt}
    return {"prompt": prompt}


class Window:
    """Keeps at most `window` jobs unfinished, and yields results in the order of the prompts or of their ends.

    In the order of the prompts a slow job holds back the results of later jobs; at most four windows of jobs and
    results are kept.
    """

    def __init__(
        self,
        keys: Keys,
        prompts: Iterable[Prompt],
        defaults: Mapping[str, Any],
        *,
        window: int,
        ordered: bool,
        timeout: float | None,
        block_ms: int,
        strict: bool = False,
    ) -> None:
        """Take the prompts; nothing is submitted yet.

        Args:
            defaults: arguments of `submit`; arguments in a prompt take precedence.
            timeout: seconds without an end of a job, and without the queue taking a job; None: a day.
            strict: raise for a malformed prompt, instead of yielding a failed result.

        Raises:
            ValueError: `window` is below 1.
        """
        if window < 1:
            raise ValueError("window: must be at least 1")
        self.keys, self.ordered, self.window, self.timeout, self.block_ms = keys, ordered, window, timeout, block_ms
        self.defaults = {"stream": False, **defaults}
        self.items = enumerate(prompts)
        self.strict = strict
        self.pending: dict[str, tuple[int, Prompt]] = {}
        """Id of each unfinished job → index, prompt."""
        self._last: dict[str, str] = {}
        self._ready: dict[int, MapResult] = {}
        self._handed = 0

    def steps(self) -> Steps[MapResult]:
        """Yield a result for each prompt.

        Raises:
            TimeoutError: for `timeout` seconds no job finished and the queue took no job.
            JobLost: Redis had one of the jobs and no longer knows it.
        """
        item = next(self.items, None)
        deadline = self._deadline()
        while item is not None or self.pending:
            full: Full | None = None
            while item is not None and full is None and self._room():
                try:
                    submit, patient = self._submit(item[1], deadline)
                except (JobError, TypeError, ValueError) as error:
                    if self.strict:
                        raise
                    yield from self._hand(_malformed(error, *item))
                    item = next(self.items, None)
                    deadline = self._deadline()
                    continue
                full = yield from submit_steps(submit)
                if full is None:
                    self.pending[submit.entry.id] = item
                    self._last[submit.entry.id] = SEAL_ID
                    item = next(self.items, None)
                    deadline = self._deadline()
                elif not patient:
                    raise full
            ids = list(self.pending)
            if not ids:
                continue
            replies = yield Get([self.keys.result(job_id) for job_id in ids], deadline)
            done = [(job_id, raw) for job_id, raw in zip(ids, replies, strict=True) if raw is not None]
            for job_id, raw in done:
                yield from self._take(job_id, Result.from_json(raw))
            if done:
                deadline = self._deadline()
                continue
            streams = {self.keys.out(job_id): self._last[job_id] for job_id in ids}
            block_ms = deadline.block_ms(min(self.block_ms, FULL_MS) if full else self.block_ms)
            read = yield Read(streams, block_ms, deadline)
            if not read:
                yield from Presence(self.keys, *ids).look(ids, deadline)
            by_stream = {self.keys.out(job_id): job_id for job_id in ids}
            for stream, entries in read or ():
                self._last[by_stream[stream.decode()]] = entries[-1][0].decode()

    def _submit(self, prompt: Prompt, deadline: Deadline) -> tuple[Submit, bool]:
        """Return the step that submits a prompt, and whether the caller wants to wait while the queue is full.

        The step itself waits only if no job is unfinished: otherwise `steps` waits for the end of such a job.
        """
        arguments = {**self.defaults, **map_arguments(prompt)}
        priority, delay = arguments.pop("priority", "normal"), arguments.pop("delay", None)
        patient = arguments.pop("wait", True)
        entry = make_entry(**arguments)
        call = enqueue_call(self.keys, entry, priority, delay)
        return Submit(entry, call, patient and not self.pending, deadline), patient

    def _deadline(self) -> Deadline:
        return Deadline.after("map: no job finished", self.timeout)

    def _room(self) -> bool:
        held = len(self._ready) + len(self.pending)
        return len(self.pending) < self.window and (not self.ordered or held < 4 * self.window)

    def _take(self, job_id: str, result: Result) -> Generator[Emit[MapResult], None, None]:
        index, prompt = self.pending.pop(job_id)
        del self._last[job_id]
        yield from self._hand(extended(MapResult, result, index=index, prompt=prompt))

    def _hand(self, result: MapResult) -> Generator[Emit[MapResult], None, None]:
        if not self.ordered:
            yield Emit(result)
            return
        self._ready[result.index] = result
        while self._handed in self._ready:
            yield Emit(self._ready.pop(self._handed))
            self._handed += 1


def _malformed(error: JobError | TypeError | ValueError, index: int, prompt: Prompt) -> MapResult:
    """Return the failed result of a prompt that was not submitted."""
    refused = error if isinstance(error, JobError) else JobError(ErrorCode.INVALID_REQUEST, str(error))
    given = prompt.get("id") if isinstance(prompt, Mapping) else None
    job_id = given if isinstance(given, str) else ""
    return MapResult(job_id, Status.FAILED, error=ErrorInfo.of(refused), index=index, prompt=prompt)
