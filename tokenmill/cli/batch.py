"""The commands on files of requests: `batch run` and `batch cancel`."""

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
from tokenmill.cli.waiting import note_pause
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.keys import LANES

EPILOG = (
    "Exit status: 0 every request succeeded, 1 every request has its line and some failed, 2 the input is not a batch "
    "file or a file cannot be used, 5 Redis is away or does not know the run, 130 stopped by SIGINT or SIGTERM: run "
    "the same command to continue."
)

app = typer.Typer(help="Run files of requests in OpenAI's batch format.", no_args_is_help=True)

Input = Annotated[Path, typer.Argument(metavar="INPUT", help="Input file: JSONL, plain or gzip.", show_default=False)]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="File to which response lines are appended.", show_default=False)
]
Errors = Annotated[
    Path | None, typer.Option("--errors", help="File for the lines of failed requests. Default: the output.")
]


@app.command(epilog=EPILOG)
def run(
    input: Input,
    output: Output,
    errors: Errors = None,
    window: Annotated[int, typer.Option(min=1, help="Maximum number of requests in flight.")] = batch.WINDOW,
    priority: Annotated[str, typer.Option(help=f"Lane: {', '.join(LANES)}.")] = "normal",
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Run every request of a file that has no line in the outputs yet.

    After a kill or a stop, run the same command to continue. SIGINT or SIGTERM stops submitting: requests in flight
    stay in the queue; the next run takes their results, or `tokenmill batch cancel` cancels them.
    """
    with _ended(), _signals() as stop, connected(redis, queue, prefix) as client, shown(queue) as progress:
        note_pause(client, "the requests wait")
        report = batch.run(
            input, output, errors, client=client, window=window, priority=priority, progress=progress, stop=stop
        )
    if not report.complete:
        done = f"{report.succeeded + report.failed} of {report.total} done ({report.failed} failed)"
        end(Exit.INTERRUPTED, f"Stopped: {done}. Run the same command to continue.")
    counts = f"{report.succeeded} succeeded, {report.failed} failed of {report.total}"
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
    """Cancel the requests that a stopped or killed run left in flight. A later run of the file submits them again."""
    with _ended(), connected(redis, queue, prefix) as client:
        number = batch.cancel(input, output, errors, client=client)
    print(f"{number} requests in flight cancelled")


@contextmanager
def _ended() -> Iterator[None]:
    """Turn errors of a batch into exit statuses."""
    try:
        yield
    except batch.BatchStopped as stopped:
        end(Exit.INTERRUPTED, str(stopped))
    except batch.BatchNotFound as error:
        end(Exit.UNAVAILABLE, str(error))
    except batch.BatchInvalid as invalid:
        found = "1 error" if invalid.count == 1 else f"{invalid.count} errors"
        end(Exit.USAGE, f"{invalid}\n{found} found; nothing submitted.")
    except batch.BatchError as error:
        end(Exit.USAGE, str(error))


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second signal ends the process as usual."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(_number: int, _frame: FrameType | None) -> None:
        # On another thread: the main thread may be inside `stop.wait` and hold the lock that `set` needs.
        threading.Thread(target=stop.set, daemon=True).start()
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
