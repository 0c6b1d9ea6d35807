"""Ends a stopped or killed run: cancels its requests in flight, or gives every remaining request its error line."""

from __future__ import annotations

import threading
import time
from itertools import islice

from tokenmill.batch.files import Files, PathLike, opened
from tokenmill.batch.flight import Flight, Flights, reach
from tokenmill.batch.index import Line
from tokenmill.batch.report import BatchNotFound, BatchReport, BatchStopped, OnProgress, Progress
from tokenmill.batch.response import Asked, response_line
from tokenmill.batch.writer import Writer
from tokenmill.client.sync import Client
from tokenmill.protocol.errors import clean
from tokenmill.protocol.result import ErrorInfo, Result, Status

CHUNK = 1024
"""Number of lines whose jobs are looked up, or cancelled, in one round trip."""
EMPTY = 16
"""Number of consecutive chunks without a job that Redis knows after which `cancel` ends."""
GRACE_S = 60.0
"""Default time that `close` waits for the ends of cancelled requests."""
ENDINGS = {"batch_cancelled": Status.CANCELLED, "batch_expired": Status.EXPIRED}
"""Codes of the error lines that `close` writes, each with the status of a result that has this code."""


def cancel(
    input_path: PathLike,
    output_path: PathLike,
    errors_path: PathLike | None = None,
    *,
    client: Client,
    reason: str = "batch cancelled",
) -> int:
    """Cancel the requests that a stopped or killed run left in flight; return their number.

    These requests get no line in the outputs; a later run over the same files submits them again.

    Args:
        reason: kept in the results.

    Raises:
        BatchNotFound: Redis knows no request of the run, so that it may be another Redis. No file was changed.
        BatchError: no run has begun with these files and this queue; or as `run`, in particular while the run has not
            ended. No file was changed.
        redis.RedisError: Redis is away. Call again to continue.
    """
    with opened(input_path, output_path, errors_path, threading.Event()) as files:
        files.outputs.require_begun(client.keys.root)
        lines, cancelled, empty, known = files.index.plan(), 0, 0, False
        state = files.outputs.state
        # Lines are submitted in the order of the plan, so the requests in flight are at its beginning, with gaps where
        # the queue had no room.
        while empty < EMPTY and (some := [state.job_id(line.number) for line in islice(lines, CHUNK)]):
            states = client.states(some)
            flying = [job_id for job_id, at in zip(some, states, strict=True) if at in ("queued", "running")]
            client.cancel_all(flying, reason)
            cancelled += len(flying)
            empty = 0 if any(states) else empty + 1
            known = known or any(states)
        if known:
            files.outputs.next_generation()
        elif state.root is not None and not files.report.complete and not _is_there(client, state.group):
            raise BatchNotFound(  # the requests may be in flight at another Redis
                f"{output_path}: this Redis knows no request of the run; no request was cancelled. If the run used "
                "another Redis, name it with --redis. If Redis has lost its data, no request is in flight."
            )
        return cancelled


def _is_there(client: Client, group: str) -> bool:
    """Return whether Redis knows a run's group, which lives from the first request to a day after the last end."""
    return client.group(group).progress().total > 0


def close(
    input_path: PathLike,
    output_path: PathLike,
    errors_path: PathLike | None = None,
    *,
    client: Client,
    code: str = "batch_cancelled",
    reason: str = "The batch was cancelled before this request was done.",
    url: str | None = None,
    grace_s: float = GRACE_S,
    progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> BatchReport:
    """End a stopped or killed run for good: cancel its requests in flight, and give every request its line.

    Results that are there become lines as in a run, also of requests that end while they are being cancelled. Every
    other request without a line, submitted or not, gets an error line with `code` and `reason`. A close that was killed
    or stopped is continued by the same call; a close of complete outputs changes nothing and does not ask Redis.

    Args:
        code: `batch_cancelled` or `batch_expired`.
        reason: message of the error lines, and reason of the cancels.
        url: the URL that every line must have, as for `run`.
        grace_s: seconds to wait for the ends of the requests that run. A request that has not ended by then gets its
            error line too; its worker, if there is any, stops it when it sees the cancel.
        progress: called on this thread, after every write and about once a second.
        stop: an event that ends the call soon after it is set. The report is then not `complete`.

    Raises:
        ValueError: `code` is neither of the two.
        BatchInvalid: the input is not a batch file; no file was changed.
        BatchStopped: `stop` was set before the input was checked, or while Redis was away.
        BatchError: the requests went to another queue; or as `run`.
        redis.RedisError: Redis stayed away. Call again to continue.
    """
    if code not in ENDINGS:
        raise ValueError(f"code: must be one of {', '.join(ENDINGS)}")
    stop = stop or threading.Event()
    with opened(input_path, output_path, errors_path, stop, url) as files:
        state = files.outputs.state
        if state.root is not None and not files.report.complete:
            files.outputs.require_begun(client.keys.root)
            reach(client, stop)  # before the first file is made
        files.outputs.begin(state.root)
        flights = Flights(client, state.group, 0, "normal", stop)
        return _Close(files, flights, code, reason, progress, stop).go(grace_s)


class _Close:
    """A close over opened files."""

    def __init__(
        self,
        files: Files,
        flights: Flights,
        code: str,
        reason: str,
        progress: OnProgress | None,
        stop: threading.Event,
    ) -> None:
        self._files, self._flights, self._progress, self._stop = files, flights, progress, stop
        self._code, self._reason = code, clean(reason) or code
        self._writer = Writer(files.outputs, flights)
        self._resumed = files.report.done

    def go(self, grace_s: float) -> BatchReport:
        self._report_progress()
        try:
            self._cancel()
            self._wait(grace_s)
        except BatchStopped:
            self._stop.set()
        if not self._stop.is_set():
            for flight in self._flights.drop():
                self._give_up(flight.asked)
        self._writer.close()
        self._report_progress()
        return self._files.report

    def _cancel(self) -> None:
        """Cancel the requests that Redis knows, and hold them; the other requests get their error line."""
        state, lines = self._files.outputs.state, self._files.index.plan()
        while not self._stop.is_set() and (some := [self._flight(line) for line in islice(lines, CHUNK)]):
            known = self._flights.cancel(some, self._reason) if state.root is not None else [False] * len(some)
            for flight, there in zip(some, known, strict=True):
                if not there:
                    self._give_up(flight.asked)
            self._writer.flush()
            self._report_progress()

    def _flight(self, line: Line) -> Flight:
        job_id = self._files.outputs.state.job_id(line.number)
        return Flight(Asked(job_id, line.custom_id, self._files.url), line, 0)

    def _wait(self, grace_s: float) -> None:
        """Write the lines of the requests that end, up to `grace_s` seconds."""
        end = time.monotonic() + grace_s
        looked = False
        while len(self._flights) and not self._stop.is_set() and not (looked and time.monotonic() >= end):
            for flight, result in self._flights.collect():
                self._end(flight.asked, result)
            for flight in self._flights.lost():
                self._give_up(flight.asked)
            self._writer.flush()
            self._report_progress()
            looked = True

    def _end(self, asked: Asked, result: Result) -> None:
        if result.status is Status.CANCELLED and result.cancel_reason == self._reason:
            result = self._ending(asked)
        self._writer.add(*response_line(asked, result), asked.job_id)

    def _give_up(self, asked: Asked) -> None:
        self._writer.add(*response_line(asked, self._ending(asked)))

    def _ending(self, asked: Asked) -> Result:
        return Result(asked.job_id, ENDINGS[self._code], error=ErrorInfo(self._code, self._reason))

    def _report_progress(self) -> None:
        if self._progress is not None:
            done = self._files.report
            flying = len(self._flights)
            self._progress(Progress(done.total, done.succeeded, done.failed, self._resumed, in_flight=flying))
