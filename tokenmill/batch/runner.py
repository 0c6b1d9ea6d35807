"""Runs a batch file: check it, plan the order, keep a window of requests in flight, write their lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import orjson

from tokenmill.batch.files import Files, PathLike, opened
from tokenmill.batch.flight import Flight, Flights, Ready, reach
from tokenmill.batch.index import Line
from tokenmill.batch.report import BatchError, BatchReport, BatchStopped, OnProgress, Progress
from tokenmill.batch.response import Asked, refusal_line, response_line
from tokenmill.batch.writer import Writer
from tokenmill.client.sync import Client
from tokenmill.openai.request import URLS, Unsupported, translate
from tokenmill.protocol.keys import LANES, check_name

WINDOW = 512
"""Default maximum number of requests in flight."""
CHUNK_BYTES = 8 << 20
"""Maximum size of the bodies that are submitted in one round trip."""


def run(
    input_path: PathLike,
    output_path: PathLike,
    errors_path: PathLike | None = None,
    *,
    client: Client,
    url: str | None = None,
    window: int = WINDOW,
    priority: str = "normal",
    tenant: str | None = None,
    progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> BatchReport:
    """Run every request of a file that has no line in the outputs yet, and return when each has one.

    Args:
        errors_path: file for the lines of failed requests; None: the output.
        url: the URL that every line must have; None: either URL, the same in every line.
        window: maximum number of requests in flight.
        priority: lane of the jobs.
        tenant: the tenant whose quota counts the jobs; while the quota is full, the run waits.
        progress: called on this thread, after every write and about once a second.
        stop: an event that ends the run soon after it is set: no more requests are submitted, requests in flight stay
            in the queue, and the next run over the same files takes their results. The report is then not `complete`.

    Raises:
        ValueError: `window` is below 1, or `url`, `priority` or `tenant` is not valid.
        BatchInvalid: the input is not a batch file; nothing was submitted.
        BatchStopped: `stop` was set before the input was checked, or while Redis was away.
        BatchError: the outputs belong to another input or to a running run; a file cannot be read or written.
        redis.RedisError: Redis stayed away. Run again to continue.
    """
    if window < 1:
        raise ValueError("window: must be at least 1")
    if priority not in LANES:
        raise ValueError(f"priority: must be one of {', '.join(LANES)}")
    if url is not None and url not in URLS:
        raise ValueError(f"url: must be one of {', '.join(URLS)}")
    if tenant is not None:
        check_name("tenant", tenant)
    stop = stop or threading.Event()
    with opened(input_path, output_path, errors_path, stop, url) as files:
        if not files.report.complete:
            reach(client, stop)  # before the first file is made
        files.outputs.begin(client.keys.root)
        flights = Flights(client, files.outputs.state.group, window, priority, stop, tenant)
        return _Run(files, flights, progress or _ignore, stop).go()


def _ignore(_: Progress) -> None:
    return None


class _Run:
    """A run over opened files."""

    def __init__(self, files: Files, flights: Flights, progress: OnProgress, stop: threading.Event) -> None:
        self._files, self._flights, self._progress, self._stop = files, flights, progress, stop
        self._writer = Writer(files.outputs, flights)
        self._resumed = files.report.done

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
                self._report_progress()
        except BatchStopped:
            self._stop.set()
        self._writer.close()
        self._report_progress()
        report = self._files.report
        if not report.complete and not self._stop.is_set():
            raise BatchError(f"{report.total - report.done} requests have no line. Run the file again to continue.")
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
        for line in self._files.index.plan():
            ready = self._ready(line)
            if ready is not None:
                yield ready
            if self._stop.is_set():
                return

    def _ready(self, line: Line) -> Ready | None:
        source = self._files.source
        try:
            request: Any = orjson.loads(source.read(line.offset, line.length))
            custom_id, url, body = request["custom_id"], request["url"], request["body"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            custom_id = None
        if custom_id != line.custom_id:
            raise BatchError(f"{source.path}: line {line.number} was changed while the batch ran; restore it")
        asked = Asked(self._files.outputs.state.job_id(line.number), line.custom_id, url)
        try:
            raw = orjson.dumps(translate(url, body))
        except Unsupported as refused:
            self._refuse(asked, str(refused))
        except TypeError:  # deeper than orjson writes
            self._refuse(asked, "body: nested too deeply")
        else:
            return Ready(Flight(asked, line, len(raw)), raw)
        return None

    def _refuse(self, asked: Asked, message: str) -> None:
        if self._writer.add(refusal_line(asked, message), ok=False):
            self._report_progress()

    def _write(self) -> None:
        """Write the lines of requests that have ended."""
        for flight, result in self._flights.collect():
            self._writer.add(*response_line(flight.asked, result), flight.asked.job_id)
        self._writer.flush()

    def _report_progress(self) -> None:
        done = self._files.report
        self._progress(Progress(done.total, done.succeeded, done.failed, self._resumed, in_flight=len(self._flights)))
