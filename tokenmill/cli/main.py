"""The `tokenmill` command.

Worker commands are imported when they are called, so that a producer's machine needs neither torch nor the worker.
"""

from __future__ import annotations

if (
    __name__ == "__main__"
):  # `python -m tokenmill.cli.main`: the same as the command, ready for Ctrl-C before what follows
    from tokenmill.__main__ import main as start

    start()

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
import typer
from redis.exceptions import RedisError
from typer.core import TyperCommand, TyperGroup

from tokenmill.cli.batch import app as batch
from tokenmill.cli.console import EPILOG, Exit, Prefix, Queue, Url, called, connected, end, warn_of_variables
from tokenmill.cli.interrupt import guard
from tokenmill.cli.packages import NAMES, prefer_ours
from tokenmill.client.core import TextFollower, TextRestarted, new_id
from tokenmill.client.patience import BRIEF_S, Deadline
from tokenmill.client.sync import Client, Job
from tokenmill.protocol.body import Body
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.events import FinalEvent
from tokenmill.protocol.keys import LANES
from tokenmill.protocol.meta import Meta, paused
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.version import version

T = TypeVar("T")

_BY_STATUS = {
    Status.SUCCEEDED: Exit.SUCCEEDED,
    Status.FAILED: Exit.FAILED,
    Status.CANCELLED: Exit.CANCELLED,
    Status.EXPIRED: Exit.EXPIRED,
}

LAZY = {
    "worker": ("worker.cli:worker", "Serve a model: take jobs from a queue and answer them.", "worker"),
    "demo": ("worker.demo.demo:demo", "Run real prompts through a real worker, to see it work.", "worker,demo"),
}
"""Command: where it lives, its help, and the pip extra that it needs."""


class _LazyCommand(TyperCommand):
    """Stands in for a command until it is called: listing commands must not import torch."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _load(str(self.name)).make_context(info_name, args, parent=parent, **extra)


def _load(name: str) -> Any:
    target = LAZY[name][0]
    module, _, attribute = target.partition(":")
    prefer_ours()
    with _extras(name):
        function: Callable[..., None] = getattr(importlib.import_module(module), attribute)

    @functools.wraps(function)
    def guarded(**given: Any) -> None:
        with _extras(name):  # the command itself imports late, too
            function(**given)

    # Plain help: a table of 80 columns cuts the names of the worker's options off.
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    holder.command(name)(guarded)
    return typer.main.get_command(holder)


@contextmanager
def _extras(name: str) -> Iterator[None]:
    """A package that is missing is named, with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.partition(".")[0] in NAMES:
            raise
        hint = f"in a clone of tokenmill, pip install '.[{LAZY[name][2]}]'"
        end(Exit.USAGE, f"`tokenmill {name}` needs {missing.name}: {hint}")


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, (_, told, _) in LAZY.items():
            self.commands[name] = _LazyCommand(name, help=told, callback=lambda: None)

    def invoke(self, ctx: Any) -> Any:
        """Name a variable with a wrong value as the variable that it is, not as an option that nobody gave."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            parameter, context = getattr(error, "param", None), error.ctx
            if parameter is None or context is None or called(context, parameter) != parameter.envvar:
                raise
            end(Exit.USAGE, f"{parameter.envvar}: {error.message}")


app = typer.Typer(
    cls=_Group,
    help="Batch LLM inference over a Redis queue.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(batch, name="batch")

PATIENCE_S = 10.0
"""After so long without a word from a job, `submit`, `tail` and `result` say what they wait for."""

CTRL_C_S = 3.0
"""How long Redis may take for the cancel that Ctrl-C sends."""

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds to wait; the job itself goes on.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {version()}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What is before the command."""
    prefer_ours()
    if context.invoked_subcommand != "worker":  # which tells it in its log
        warn_of_variables(os.environ)


@app.command(epilog=EPILOG)
def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.", show_default=False)],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="The chat's system message; implies --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="Any other parameter of the body; may be repeated.")
    ] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id. Default: a random one.")] = None,
    priority: Annotated[str, typer.Option(help=f"Lane: {', '.join(LANES)}.")] = "normal",
    ttl: Annotated[float | None, typer.Option(help="Seconds after which the job expires.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Without waiting, the id is printed.")] = True,
    timeout: Timeout = None,
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Submit a prompt and print its text as it comes. Ctrl-C cancels the job."""
    text = sys.stdin.read() if prompt == "-" else prompt
    request: dict[str, Any] = {"prompt": text}
    if chat or system is not None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        request = {"messages": [*messages, {"role": "user", "content": text}]}
    request |= {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, **_params(param or [])}
    with connected(redis, queue, prefix) as client:
        begun = time.monotonic()
        # A job with an id of ours is cancelled even if Ctrl-C comes while it is submitted; another may be somebody's.
        ours = new_id() if job_id is None else None
        job = None if ours is None else client.job(ours)
        try:
            job = client.submit(
                **request,
                id=ours or job_id,
                priority=priority,
                ttl=ttl,
                timeout=BRIEF_S if timeout is None else timeout,
            )
            _say_if_paused(client)
            if not wait:
                print(job.id)
                return
            _follow(client, job, None if timeout is None else max(0.0, begun + timeout - time.monotonic()))
        except (KeyboardInterrupt, BrokenPipeError) as left:
            if job is None:
                raise
            job.cancel(timeout=CTRL_C_S)
            if isinstance(left, BrokenPipeError):  # `| head`: nobody reads what is still in the buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            end(Exit.INTERRUPTED, f"\njob {job.id} cancelled")


@app.command(epilog=EPILOG)
def tail(
    job_id: JobId,
    timeout: Timeout = None,
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Print a job's text from its beginning, as it comes, until the job ends."""
    with connected(redis, queue, prefix) as client:
        _follow(client, client.job(job_id), timeout)


@app.command(epilog=EPILOG)
def result(
    job_id: JobId,
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    timeout: Timeout = None,
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Wait for a job's result and print its text."""
    with connected(redis, queue, prefix) as client:
        with _patience(client, job_id):
            found = client.job(job_id).result(timeout)
        if json:
            print(orjson.dumps(orjson.loads(found.to_json()), option=orjson.OPT_INDENT_2).decode())
        else:
            _print_choices(found, 0)
        _finish(found, quiet=json)


@app.command(epilog=EPILOG)
def cancel(
    job_id: JobId,
    reason: Annotated[str, typer.Option(help="Kept in the result.")] = "user",
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Cancel a job, wherever it is."""
    with connected(redis, queue, prefix) as client:
        match client.job(job_id).cancel(reason):
            case CancelReply.LATE:
                print(f"{job_id}: had ended already")
            case CancelReply.DONE:
                print(f"{job_id}: cancelled before it ran")
            case CancelReply.ASKED if client.states([job_id])[0] is not None:
                print(f"{job_id}: asked to stop")
            case _:
                print(f"Job {job_id} is not known to queue {queue}; the cancel is kept in case it arrives later.")


@app.command(epilog=EPILOG)
def info(redis: Url = DEFAULT_URL, queue: Queue = "default", prefix: Prefix = "tokenmill") -> None:
    """Show how many jobs wait or run in each lane, and who serves the queue."""
    with connected(redis, queue, prefix) as client:
        (*depths, delayed, dead, raw), workers = client.patiently(lambda: _survey(client), outage_s=BRIEF_S)
        for name, depth in zip(LANES, depths, strict=True):
            print(f"{name:8}{depth}")
        print(f"{'delayed':8}{delayed}\n{'dead':8}{dead}")
        meta = Meta.of(raw)
        if meta.paused:
            print(f"paused: workers read nothing; to resume: HDEL '{client.keys.meta}' paused")
        for problem in meta.problems:
            print(f"meta is not understood: {problem}")
        if not workers:
            print("no worker serves this queue")
        for key, told in workers.items():
            fields = " ".join(f"{name.decode()}={value.decode()}" for name, value in sorted(told.items()))
            print(f"worker {key.decode().removeprefix(client.keys.worker(''))} {fields}")


def _survey(client: Client) -> tuple[list[Any], dict[bytes, dict[Any, Any]]]:
    """What `info` shows: depths, delayed, dead and `meta`; each worker's key with its fields."""
    keys, pipe = client.keys, client.redis.pipeline(transaction=False)
    for lane in keys.lanes:
        pipe.xlen(lane)
    pipe.zcard(keys.delayed)
    pipe.xlen(keys.dead)
    pipe.hgetall(keys.meta)
    workers: list[Any] = sorted(client.redis.scan_iter(match=keys.worker("*"), count=1000))
    return pipe.execute(), {key: client.redis.hgetall(key) for key in workers}


def _params(pairs: list[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in Body.model_fields:
            raise typer.BadParameter(f"--param {key}: must be KEY=JSON with a key of the body")
        try:
            found[key] = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise typer.BadParameter(f"--param {key}: the value is not JSON") from None
    return found


@contextmanager
def _patience(client: Client, job_id: str) -> Iterator[Callable[[], None]]:
    """Say on stderr why there may be nothing from a job: at once for a delayed one, else once and after `PATIENCE_S`.

    The usual reasons, no worker and a wrong id or queue, look alike otherwise: nothing happens. Yields what calls the
    note off.
    """

    def tell() -> None:
        queue = client.keys.queue
        found = _aside(client, lambda: (paused(client.redis, client.keys), client.states([job_id])[0]))
        if found is None:
            return
        held_up = "the queue is paused" if found[0] else None
        match found[1]:
            case None:
                note = f"queue {queue} has no such job, or no worker has read it yet"
            case "delayed":
                note = held_up or f"it is due; a worker or the clerk of queue {queue} moves it into its lane"
            case "queued":
                note = f"still queued; {held_up or f'`tokenmill info` tells who serves queue {queue}'}"
            case _:
                return
        print(f"job {job_id}: {note}; waiting", file=sys.stderr)

    if (due := _aside(client, lambda: _due_in_s(client, job_id))) is not None:
        print(f"job {job_id}: delayed, due in {due:.0f} s; waiting", file=sys.stderr)

    timer = threading.Timer(PATIENCE_S + (due or 0.0), tell)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _due_in_s(client: Client, job_id: str) -> float | None:
    """Seconds until a delayed job is due; None for any other."""
    if client.states([job_id])[0] != "delayed":
        return None
    due, (seconds, micros) = client.redis.zscore(client.keys.delayed, job_id), client.redis.time()
    return max(0.0, float(due) / 1000 - seconds - micros / 1e6) if due is not None else 0.0


def _say_if_paused(client: Client) -> None:
    if _aside(client, lambda: paused(client.redis, client.keys)):
        print(f"queue {client.keys.queue} is paused: the job waits until it is resumed", file=sys.stderr)


def _aside(client: Client, question: Callable[[], T]) -> T | None:
    """Ask once, for a note beside the command's work; None where Redis does not answer, which that work reports."""
    with suppress(RedisError, TimeoutError):
        return client.patiently(question, Deadline.after("no answer", 0))
    return None


def _follow(client: Client, job: Job, timeout: float | None) -> None:
    """Print the first choice as it comes, the others at the end; leaves with the job's status."""
    with _patience(client, job.id) as heard:
        _print_stream(job, timeout, heard)


def _print_stream(job: Job, timeout: float | None, heard: Callable[[], None]) -> None:
    follower = TextFollower()
    for event in job.stream(timeout=timeout):
        heard()
        try:
            piece = follower.feed(event)
        except TextRestarted:
            print()
            print("the worker was lost; another one begins anew:", file=sys.stderr)
            piece = follower.restart()
        print(piece, end="", flush=True)
        if isinstance(event, FinalEvent):
            print(flush=True)
            if event.result is None:
                end(_BY_STATUS[event.status], f"job {job.id} {event.status}; its result has expired")
            _print_choices(event.result, 1)
            _finish(event.result)


def _print_choices(found: Result, first: int) -> None:
    for choice in found.choices[first:]:
        if len(found.choices) > 1:
            print(f"--- choice {choice.index}")
        print(choice.text)


def _finish(found: Result, quiet: bool = False) -> NoReturn:
    note = None
    if not found.ok and not quiet:
        note = f"job {found.id} {found.status}"
        if found.error is not None:
            note += f": {found.error.code}: {found.error.message}"
        elif found.cancel_reason is not None:
            note += f": {found.cancel_reason}"
    end(_BY_STATUS[found.status], note)


def main() -> None:
    """Run the command that the arguments name; `tokenmill.__main__` is the entry point."""
    guard()
    app()
