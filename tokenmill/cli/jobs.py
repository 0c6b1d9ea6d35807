"""The commands on one job: `submit`, `tail`, `result`, `cancel`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import orjson
import typer

from tokenmill.cli.console import Exit, Prefix, Queue, Url, connected, end
from tokenmill.cli.streams import drop_output
from tokenmill.cli.waiting import explained, note_pause
from tokenmill.client.core import new_id
from tokenmill.client.follow import TextFollower, TextRestarted
from tokenmill.client.patience import BRIEF_S
from tokenmill.client.sync import Client, Job
from tokenmill.protocol.body import Body
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.events import FinalEvent
from tokenmill.protocol.keys import LANES
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.state import JobStatus

_BY_STATUS = {
    Status.SUCCEEDED: Exit.SUCCEEDED,
    Status.FAILED: Exit.FAILED,
    Status.CANCELLED: Exit.CANCELLED,
    Status.EXPIRED: Exit.EXPIRED,
}

CTRL_C_S = 3.0
"""Time limit for the cancel that Ctrl-C sends."""

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds to wait; the job keeps running.")]


def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.", show_default=False)],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="The chat's system message; implies --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0: greedy decoding.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable.")] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="Any other parameter of the body; may be repeated.")
    ] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id. Default: a random id.")] = None,
    priority: Annotated[str, typer.Option(help=f"Lane: {', '.join(LANES)}.")] = "normal",
    ttl: Annotated[float | None, typer.Option(help="Seconds after which the job expires.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the text, or print the id and end.")] = True,
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
        # Ctrl-C during the submit cancels only a job whose id was made here: an id that the user named may belong to
        # an older job.
        made = new_id() if job_id is None else None
        job = None if made is None else client.job(made)
        try:
            job = client.submit(
                **request,
                id=made or job_id,
                priority=priority,
                ttl=ttl,
                timeout=BRIEF_S if timeout is None else timeout,
            )
            note_pause(client)
            if not wait:
                print(job.id, flush=True)
                return
            _follow(client, job, None if timeout is None else max(0.0, begun + timeout - time.monotonic()))
        except (KeyboardInterrupt, BrokenPipeError) as left:
            if job is None:
                raise
            job.cancel(timeout=CTRL_C_S)
            if isinstance(left, BrokenPipeError):  # `| head` has ended
                drop_output()
            end(Exit.INTERRUPTED, f"\njob {job.id} cancelled")


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
        with explained(client, job_id):
            found = client.job(job_id).result(timeout)
        if json:
            print(orjson.dumps(orjson.loads(found.to_json()), option=orjson.OPT_INDENT_2).decode())
        else:
            _print_choices(found, 0)
        _finish(found, quiet=json)


def cancel(
    job_id: JobId,
    reason: Annotated[str, typer.Option(help="Reason, which is stored in the result.")] = "user",
    redis: Url = DEFAULT_URL,
    queue: Queue = "default",
    prefix: Prefix = "tokenmill",
) -> None:
    """Cancel a job: a delayed or queued job ends at once, a running job within a step."""
    with connected(redis, queue, prefix) as client:
        match client.job(job_id).cancel(reason):
            case CancelReply.LATE:
                print(f"Job {job_id} had ended already; nothing changed.")
            case CancelReply.DONE:
                print(f"Job {job_id} was cancelled before it ran.")
            case CancelReply.ASKED if client.status(job_id) is not JobStatus.UNKNOWN:
                print(f"Job {job_id}: its worker was asked to stop it.")
            case _:
                print(f"Job {job_id} is not known to queue {queue}; the cancel is kept in case it arrives later.")


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


def _follow(client: Client, job: Job, timeout: float | None) -> None:
    """Print the first choice as it comes and further choices at the end; end with the job's exit status."""
    with explained(client, job.id) as started:
        _print_stream(job, timeout, started)


def _print_stream(job: Job, timeout: float | None, started: Callable[[], None]) -> None:
    follower = TextFollower()
    for event in job.stream(timeout=timeout):
        started()
        try:
            piece = follower.feed(event)
        except TextRestarted:
            print()
            print(f"job {job.id}: its worker was lost; another worker restarts the text:", file=sys.stderr)
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
