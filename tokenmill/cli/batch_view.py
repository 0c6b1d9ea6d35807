"""Shows the progress of a batch run on stderr: a bar on a terminal, a line every ten seconds anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console

from tokenmill.batch.report import OnProgress, Progress

LINE_S = 10.0
"""Time between two plain lines."""
SILENCE_S = 60.0
"""Time without a finished request after which a note says what may be missing."""


class Rate:
    """Measures the requests per second of this run, and estimates the time left. Lines of earlier runs don't count."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def of(self, now: Progress) -> tuple[float, float | None]:
        """Return (requests per second, seconds left); the latter is None while no request has finished."""
        rate = (now.done - now.resumed) / max(1e-3, time.monotonic() - self._start)
        return rate, (now.total - now.done) / rate if rate else None


class Silence:
    """Notices when no request finishes for `SILENCE_S`."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._done, self._since = -1, time.monotonic()

    def note(self, now: Progress) -> str | None:
        """Return a note for the user, once for each such period; None otherwise."""
        if now.done != self._done:
            self._done, self._since = now.done, time.monotonic()
        elif time.monotonic() - self._since > SILENCE_S:
            self._since = float("inf")
            return f"no result for {SILENCE_S:g} s; is there a worker on queue {self._queue}? See `tokenmill info`."
        return None


@contextmanager
def shown(queue: str) -> Iterator[OnProgress]:
    """Yield the function to pass to `tokenmill.batch.run` as `progress`."""
    rate, silence = Rate(), Silence(queue)
    if not sys.stderr.isatty():
        yield _Lines(rate, silence)
        return
    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[failed]} failed  {task.fields[rate]:.1f}/s  {task.fields[flying]} in flight"),
        rich.TextColumn("{task.fields[left]} left"),
    )
    with rich.Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as bar:
        task = bar.add_task("", total=None, failed=0, rate=0.0, flying=0, left="?")

        def show(now: Progress) -> None:
            speed, left = rate.of(now)
            bar.update(
                task,
                total=now.total,
                completed=now.done,
                failed=now.failed,
                rate=speed,
                flying=now.in_flight,
                left=clock(left),
            )
            if (note := silence.note(now)) is not None:
                bar.console.print(note)

        yield show


class _Lines:
    def __init__(self, rate: Rate, silence: Silence) -> None:
        self._rate, self._silence = rate, silence
        self._next, self._last = 0.0, -1

    def __call__(self, now: Progress) -> None:
        if (note := self._silence.note(now)) is not None:
            print(note, file=sys.stderr, flush=True)
        if time.monotonic() < self._next and (now.done < now.total or now.done == self._last):
            return
        self._next, self._last = time.monotonic() + LINE_S, now.done
        speed, left = self._rate.of(now)
        print(
            f"{now.done}/{now.total} done, {now.failed} failed, {now.in_flight} in flight, {speed:.1f}/s, "
            f"{clock(left)} left",
            file=sys.stderr,
            flush=True,
        )


def clock(seconds: float | None) -> str:
    """Return a duration as `1:02:03`; `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
