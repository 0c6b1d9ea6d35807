"""The run of a batch file: check, plan, submit a window, write what comes."""

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
from tokenmill.batch.report import BatchError, BatchReport, BatchStopped, OnProgress, Progress
from tokenmill.batch.request import Unsupported, translate
from tokenmill.batch.response import Asked, refusal_line, response_line
from tokenmill.batch.source import Source
from tokenmill.batch.validate import Validator
from tokenmill.client.sync import Client
from tokenmill.protocol.keys import LANES

WINDOW = 512
SYNC_S = 1.0
"""How often what was written is put on the disk and then forgotten in Redis."""
CHUNK_BYTES = 8 << 20
"""Bodies submitted in one round trip."""
FLUSH_LINES = 256
FLUSH_BYTES = 4 << 20
CANCEL_CHUNK = 1024
CANCEL_EMPTY = 16
"""Chunks without a job that Redis knows, after which there are no more."""
PathLike = str | Path


@dataclass(frozen=True)
class Files:
    """The three files of a run, opened, with what is left to do."""

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
        errors_path: where lines of failed requests go; None: into the output, too.
        window: requests in flight at most.
        progress: called about every second at least, and after every write, on this thread.
        stop: set it to make the run end soon: nothing more is submitted, what is in flight goes on in the queue, and
            the next run over the same files takes its results. The report is then not `complete`.

    Raises:
        ValueError: a window below 1, an unknown priority.
        BatchInvalid: the input is not a batch file; nothing was submitted.
        BatchStopped: told to stop before the input was checked, or while Redis was away.
        BatchError: the outputs belong to another input or another run holds them; a file cannot be read or written.
        redis.RedisError: Redis stayed away. Run again to go on.
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
    """Cancel what a run that has ended, or was killed, left in flight; returns how many requests that were.

    They have no line in the outputs; a later run over the same files submits them anew.

    Raises:
        BatchError: no run has begun with these files and this queue, or Redis knows no request of the run, so that it
            may be another Redis; otherwise as `run`, in particular while the run still goes on. No file was changed.
        redis.RedisError: Redis is away; call it again.
    """
    with _files(input_path, output_path, errors_path, threading.Event()) as files:
        files.outputs.require_begun(client.keys.root)
        lines, cancelled, empty, known = files.index.plan(), 0, 0, False
        state = files.outputs.state
        # Lines are submitted in the plan's order, so what is in flight comes early in what is left of it; there are
        # gaps where the queue had no room for some.
        while empty < CANCEL_EMPTY and (some := [state.job_id(line.number) for line in islice(lines, CANCEL_CHUNK)]):
            states = client.states(some)
            for job_id, told in zip(some, states, strict=True):
                if told in ("queued", "running"):
                    client.job(job_id).cancel(reason)
                    cancelled += 1
            empty = 0 if any(states) else empty + 1
            known = known or any(states)
        if known:
            files.outputs.next_generation()
        elif state.root is not None and _lines_left(files) and not _is_there(client, state.group):
            raise BatchError(  # at the run's Redis they may be in flight
                f"{output_path}: this Redis knows no request of the run; no request was cancelled. If the run used "
                "another Redis, name that one (--redis). If Redis has lost its data, nothing is in flight"
            )
        return cancelled


def _is_there(client: Client, group: str) -> bool:
    """Whether Redis knows a run: its group lives from the first request on until a day after the last end."""
    return client.group(group).progress().total > 0


def _lines_left(files: Files) -> bool:
    return files.outputs.succeeded + files.outputs.failed < files.index.total


@contextmanager
def _files(
    input_path: PathLike, output_path: PathLike, errors_path: PathLike | None, stop: threading.Event
) -> Iterator[Files]:
    """Open, check and recover everything; no file is changed."""
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
        raise BatchError(f"the temporary index: {error}; TMPDIR says where it grows") from None


def _ignore(_: Progress) -> None:
    return None


class _Run:
    """One run over opened files."""

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
        """Bytes in both."""
        self._unsynced: list[str] = []
        """Jobs whose lines may not be on the disk yet."""
        self._synced = time.monotonic()

    def go(self) -> BatchReport:
        ready = self._prepare()
        waiting: list[Ready] = []
        self._tell()
        try:
            while not self._stop.is_set():
                more = self._fill(ready, waiting)
                if not more and not len(self._flights):
                    break
                self._write()
                if time.monotonic() - self._synced > SYNC_S:
                    self._sync()
                self._tell()
        except BatchStopped:
            self._stop.set()
        self._sync()
        report = BatchReport(self._index.total, self._outputs.succeeded, self._outputs.failed)
        if not report.complete and not self._stop.is_set():
            raise BatchError(f"{report.total - report.succeeded - report.failed} requests got no line; run again")
        return report

    def _fill(self, ready: Iterator[Ready], waiting: list[Ready]) -> bool:
        """Submit what there is room for; False when nothing is left. `waiting`: for what the queue had no room."""
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
        while len(batch) < count and size < CHUNK_BYTES and (one := next(ready, None)) is not None:
            batch.append(one)
            size += one.flight.size
        return batch

    def _prepare(self) -> Iterator[Ready]:
        """What the plan still holds; requests that we cannot do are answered on the way."""
        for line in self._index.plan():
            ready = self._ready(line)
            if ready is not None:
                yield ready
            elif len(self._bad) >= FLUSH_LINES:
                self._flush()
                self._tell()
            if self._stop.is_set():
                return

    def _ready(self, line: Line) -> Ready | None:
        try:
            request: Any = orjson.loads(self._source.read(line.offset, line.length))
            custom_id, url, body = request["custom_id"], request["url"], request["body"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            custom_id = None
        if custom_id != line.custom_id:
            raise BatchError(f"{self._source.path}: line {line.number} was changed while the batch ran")
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
        """Write what has ended."""
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
        """What is on the disk may be forgotten in Redis."""
        self._flush()
        self._outputs.sync()
        self._flights.forget(self._unsynced)
        self._unsynced = []
        self._synced = time.monotonic()

    def _tell(self) -> None:
        done = self._outputs
        self._progress(
            Progress(self._index.total, done.succeeded, done.failed, self._resumed, in_flight=len(self._flights))
        )
