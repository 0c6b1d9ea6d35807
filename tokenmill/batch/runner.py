"""Runs a batch file: check it, plan the order, keep a window of requests in flight, write their lines."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from tokenmill.batch.flight import Flight, Flights, Ready, reach
from tokenmill.batch.index import Index, Line
from tokenmill.batch.output import Outputs, check_paths
from tokenmill.batch.report import BatchError, BatchNotFound, BatchReport, BatchStopped, OnProgress, Progress
from tokenmill.batch.response import Asked, refusal_line, response_line
from tokenmill.batch.source import Source
from tokenmill.batch.validate import Validator
from tokenmill.client.sync import Client
from tokenmill.openai.request import Unsupported, translate
from tokenmill.protocol.keys import LANES

WINDOW = 512
"""Default maximum number of requests in flight."""
SYNC_S = 1.0
"""How often the written lines are synced to the disk, and their jobs then deleted in Redis."""
CHUNK_BYTES = 8 << 20
"""Maximum size of the bodies that are submitted in one round trip."""
FLUSH_LINES = 256
FLUSH_BYTES = 4 << 20
"""Number of lines, and of bytes, from which on the waiting lines are written."""
CANCEL_CHUNK = 1024
"""Number of lines whose jobs `cancel` looks up in one round trip."""
CANCEL_EMPTY = 16
"""Number of consecutive chunks without a job that Redis knows after which `cancel` ends."""
PathLike = str | Path


@dataclass(frozen=True)
class Files:
    """The opened files of a run, with the index of the input's lines."""

    source: Source
    index: Index
    outputs: Outputs


def run(
    input_path: PathLike,
    output_path: PathLike,
    errors_path: PathLike | None = None,
    *,
    client: Client,
    window: int = WINDOW,
    priority: str = "normal",
    progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> BatchReport:
    """Run every request of a file that has no line in the outputs yet, and return when each has one.

    Args:
        errors_path: file for the lines of failed requests; None: the output.
        window: maximum number of requests in flight.
        priority: lane of the jobs.
        progress: called on this thread, after every write and about once a second.
        stop: an event that ends the run soon after it is set: no more requests are submitted, requests in flight stay
            in the queue, and the next run over the same files takes their results. The report is then not `complete`.

    Raises:
        ValueError: `window` is below 1, or `priority` is not a lane.
        BatchInvalid: the input is not a batch file; nothing was submitted.
        BatchStopped: `stop` was set before the input was checked, or while Redis was away.
        BatchError: the outputs belong to another input or to a running run; a file cannot be read or written.
        redis.RedisError: Redis stayed away. Run again to continue.
    """
    if window < 1:
        raise ValueError("window: must be at least 1")
    if priority not in LANES:
        raise ValueError(f"priority: must be one of {', '.join(LANES)}")
    stop = stop or threading.Event()
    with _files(input_path, output_path, errors_path, stop) as files:
        if files.outputs.succeeded + files.outputs.failed < files.index.total:
            reach(client, stop)  # before the first file is made
        files.outputs.begin(client.keys.root)
        return _Run(files, client, window, priority, progress or _ignore, stop).go()


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
    with _files(input_path, output_path, errors_path, threading.Event()) as files:
        files.outputs.require_begun(client.keys.root)
        lines, cancelled, empty, known = files.index.plan(), 0, 0, False
        state = files.outputs.state
        # Lines are submitted in the order of the plan, so the requests in flight are at its beginning, with gaps where
        # the queue had no room.
        while empty < CANCEL_EMPTY and (some := [state.job_id(line.number) for line in islice(lines, CANCEL_CHUNK)]):
            states = client.states(some)
            for job_id, job_state in zip(some, states, strict=True):
                if job_state in ("queued", "running"):
                    client.job(job_id).cancel(reason)
                    cancelled += 1
            empty = 0 if any(states) else empty + 1
            known = known or any(states)
        if known:
            files.outputs.next_generation()
        elif state.root is not None and _lines_left(files) and not _is_there(client, state.group):
            raise BatchNotFound(  # the requests may be in flight at another Redis
                f"{output_path}: this Redis knows no request of the run; no request was cancelled. If the run used "
                "another Redis, name it with --redis. If Redis has lost its data, no request is in flight."
            )
        return cancelled


def _is_there(client: Client, group: str) -> bool:
    """Return whether Redis knows a run's group, which lives from the first request to a day after the last end."""
    return client.group(group).progress().total > 0


def _lines_left(files: Files) -> bool:
    return files.outputs.succeeded + files.outputs.failed < files.index.total


@contextmanager
def _files(
    input_path: PathLike, output_path: PathLike, errors_path: PathLike | None, stop: threading.Event
) -> Iterator[Files]:
    """Open and check all files, and mark the requests that are done; changes no file."""
    source_path, output = Path(input_path), Path(output_path)
    errors = None if errors_path is None else Path(errors_path)
    check_paths(source_path, output, errors)
    try:
        with ExitStack() as opened:
            source = opened.enter_context(Source(source_path, output.parent))
            index = Validator(source, stop).index()
            opened.callback(index.close)
            outputs = opened.enter_context(Outputs(output, errors, source.digest))
            outputs.recover(index)
            yield Files(source, index, outputs)
    except sqlite3.Error as error:
        raise BatchError(f"the temporary index: {error}; TMPDIR names the folder for it") from None


def _ignore(_: Progress) -> None:
    return None


class _Run:
    """A run over opened files."""

    def __init__(
        self,
        files: Files,
        client: Client,
        window: int,
        priority: str,
        progress: OnProgress,
        stop: threading.Event,
    ) -> None:
        self._source, self._index, self._outputs = files.source, files.index, files.outputs
        self._flights = Flights(client, self._outputs.state.group, window, priority, stop)
        self._progress, self._stop = progress, stop
        self._resumed = self._outputs.succeeded + self._outputs.failed
        self._good: list[bytes] = []
        self._bad: list[bytes] = []
        self._pending = 0
        """Bytes of the lines in both."""
        self._unsynced: list[str] = []
        """Ids of jobs whose lines may not be on the disk yet."""
        self._synced = time.monotonic()

    def go(self) -> BatchReport:
        ready = self._prepare()
        waiting: list[Ready] = []
        self._report_progress()
        try:
            while not self._stop.is_set():
                more = self._fill(ready, waiting)
                if not more and not len(self._flights):
                    break
                self._write()
                if time.monotonic() - self._synced > SYNC_S:
                    self._sync()
                self._report_progress()
        except BatchStopped:
            self._stop.set()
        self._sync()
        report = BatchReport(self._index.total, self._outputs.succeeded, self._outputs.failed)
        if not report.complete and not self._stop.is_set():
            missing = report.total - report.succeeded - report.failed
            raise BatchError(f"{missing} requests have no line. Run the file again to continue.")
        return report

    def _fill(self, ready: Iterator[Ready], waiting: list[Ready]) -> bool:
        """Submit as many requests as there is room for; return False when none is left to submit.

        Args:
            ready: the remaining requests of the plan.
            waiting: requests that the queue had no room for; updated in place.
        """
        late = self._take((self._ready(line) for line in self._flights.overdue()), len(self._flights))
        if late:
            self._flights.submit(late)
        while (room := self._flights.room) > 0 and not self._stop.is_set():
            batch = waiting[:room] or self._take(ready, room)
            if not batch:
                return False
            waiting[: len(batch)] = self._flights.submit(batch)
        return True

    def _take(self, ready: Iterator[Ready | None], count: int) -> list[Ready]:
        batch: list[Ready] = []
        size = 0
        while len(batch) < count and size < CHUNK_BYTES and (request := next(ready, None)) is not None:
            batch.append(request)
            size += request.flight.size
        return batch

    def _prepare(self) -> Iterator[Ready]:
        """Yield the requests of the plan; a request that is not supported gets its error line instead."""
        for line in self._index.plan():
            ready = self._ready(line)
            if ready is not None:
                yield ready
            elif len(self._bad) >= FLUSH_LINES:
                self._flush()
                self._report_progress()
            if self._stop.is_set():
                return

    def _ready(self, line: Line) -> Ready | None:
        try:
            request: Any = orjson.loads(self._source.read(line.offset, line.length))
            custom_id, url, body = request["custom_id"], request["url"], request["body"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            custom_id = None
        if custom_id != line.custom_id:
            raise BatchError(f"{self._source.path}: line {line.number} was changed while the batch ran; restore it")
        asked = Asked(self._outputs.state.job_id(line.number), line.custom_id, url)
        try:
            raw = orjson.dumps(translate(url, body))
        except Unsupported as refused:
            self._bad.append(refusal_line(asked, str(refused)))
        except TypeError:  # deeper than orjson writes
            self._bad.append(refusal_line(asked, "body: nested too deeply"))
        else:
            return Ready(Flight(asked, line, len(raw)), raw)
        return None

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        """Write the lines of requests that have ended."""
        for flight, result in self._flights.collect():
            line, ok = response_line(flight.asked, result)
            (self._good if ok else self._bad).append(line)
            self._pending += len(line)
            self._unsynced.append(flight.asked.job_id)
            if len(self._good) + len(self._bad) >= FLUSH_LINES or self._pending > FLUSH_BYTES:
                self._flush()
        self._flush()

    def _flush(self) -> None:
        self._outputs.append(self._good, self._bad)
        self._good, self._bad, self._pending = [], [], 0

    def _sync(self) -> None:
        """Sync the outputs to the disk, then delete the jobs of their lines in Redis."""
        self._flush()
        self._outputs.sync()
        self._flights.forget(self._unsynced)
        self._unsynced = []
        self._synced = time.monotonic()

    def _report_progress(self) -> None:
        done = self._outputs
        self._progress(
            Progress(self._index.total, done.succeeded, done.failed, self._resumed, in_flight=len(self._flights))
        )
