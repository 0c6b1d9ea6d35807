"""`tokenmill batch`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tokenmill import batch
from tokenmill.cli.batch_view import shown
from tokenmill.cli.console import Exit, Prefix, Queue, Url, connected, end
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.keys import LANES

EPILOG = (
    "Exit status: 0 every request succeeded, 1 every request has its line and some failed, 2 the input is no batch "
    "file or a file cannot be used, 5 Redis away, 130 stopped by SIGINT or SIGTERM: the same command goes on."
)

app = typer.Typer(help="Run files of requests in OpenAI's batch format.", no_args_is_help=True)

Input = Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL, plain or gzip.", show_default=False)]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where response lines are added.", show_default=False)]
Errors = Annotated[
    Path | None, typer.Option("--errors", help="Where lines of failed requests go. Default: into the output.")
]


@app.command(epilog=EPILOG)
def run(
    input: Input,
    output: Output,
    errors: Errors = None,
    window: Annotated[int, typer.Option(min=1, help="Requests in flight at most.")] = batch.WINDOW,
    priority: Annotated[str, typer.Option(help=f"Lane: {', '.join(LANES)}.")] = "normal",
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Run every request of a file that has no line in the outputs yet.

    Killed or stopped, the same command goes on where it was. On SIGINT or SIGTERM nothing more is submitted; what is in
    flight goes on, and its results are taken by the next run, or it is given up with `tokenmill batch cancel`.
    """
    with _ended(), _signals() as stop, connected(redis, queue, prefix) as client, shown(queue) as progress:
        report = batch.run(
            input, output, errors, client=client, window=window, priority=priority, progress=progress, stop=stop
        )
    counts = f"{report.succeeded} succeeded, {report.failed} failed of {report.total}"
    if not report.complete:
        end(Exit.INTERRUPTED, f"stopped: {counts}; the same command goes on")
    end(Exit.FAILED if report.failed else Exit.SUCCEEDED, counts)


@app.command(epilog=EPILOG)
def cancel(
    input: Input,
    output: Output,
    errors: Errors = None,
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Cancel what a stopped or killed run left in flight. Run the file again later, and it is submitted anew."""
    with _ended(), connected(redis, queue, prefix) as client:
        number = batch.cancel(input, output, errors, client=client)
    print(f"{number} requests in flight cancelled")


@contextmanager
def _ended() -> Iterator[None]:
    """Errors of a batch as exit statuses."""
    try:
        yield
    except batch.BatchStopped as stopped:
        end(Exit.INTERRUPTED, str(stopped))
    except batch.BatchInvalid as invalid:
        end(Exit.USAGE, f"{invalid}\n{invalid.count} faults; nothing was submitted")
    except batch.BatchError as error:
        end(Exit.USAGE, str(error))


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by the first SIGINT or SIGTERM; a second one ends the process as usual."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(_number: int, _frame: FrameType | None) -> None:
        # Not here: the main thread may be inside of `stop.wait`, with the lock that `set` wants.
        threading.Thread(target=stop.set, daemon=True).start()
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
