"""Shared by all commands: exit statuses, options, and a client whose errors become exit statuses."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from redis.exceptions import AuthenticationError, RedisError

import tokenmill
from tokenmill.cli.interrupt import INTERRUPTED, interruptible
from tokenmill.client.core import JobLost
from tokenmill.client.sync import Client
from tokenmill.protocol.calls import EnqueueRefused, JobExists
from tokenmill.protocol.connection import command_client, redact
from tokenmill.protocol.environment import KNOWN, Misspelt, misspelt
from tokenmill.protocol.errors import JobError
from tokenmill.protocol.keys import NAME, is_name
from tokenmill.protocol.url import check_url


class Exit(enum.IntEnum):
    """Exit statuses of the commands that use a queue; the worker has its own, `worker.ops.exits.Exit`."""

    SUCCEEDED = 0
    FAILED = 1
    """The job failed, or Redis lost it."""
    USAGE = 2
    """The arguments are wrong, or a worker would refuse the request."""
    CANCELLED = 3
    EXPIRED = 4
    """The job's `ttl` or the command's `--timeout` is over."""
    UNAVAILABLE = 5
    """Redis cannot be reached, or the queue has no room."""
    INTERRUPTED = INTERRUPTED
    """Ctrl-C, or the reader of the command's output has ended; `submit` cancels its job first."""


EPILOG = (
    "Exit status: 0 succeeded, 1 failed, 2 wrong usage, 3 cancelled, 4 expired or timed out, "
    "5 Redis away or queue full, 130 Ctrl-C."
)


def end(status: Exit, note: str | None = None) -> NoReturn:
    """End the command with an exit status, after printing `note` on stderr."""
    if note is not None:
        print(note, file=sys.stderr)
    raise typer.Exit(int(status))


def called(context: Any, parameter: Any) -> str:
    """Return how a parameter was given: the name of its environment variable, or of its option."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return str(parameter.envvar)
    return str(parameter.opts[0])


def checked(check: Callable[[str], str]) -> Callable[[typer.Context, typer.CallbackParam, str | None], str | None]:
    """Return a callback of a parameter that ends the command with one line, before it starts, if `check` raises."""

    def callback(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
        try:
            return None if value is None else check(value)
        except ValueError as error:
            end(Exit.USAGE, f"{called(context, parameter)}: {error}")

    return callback


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"must match {NAME.pattern}")
    return text


Url = Annotated[str, typer.Option("--redis", envvar="TOKENMILL_REDIS", help="Redis URL.", callback=checked(check_url))]
Queue = Annotated[
    str, typer.Option("--queue", envvar="TOKENMILL_QUEUE", help="Name of the queue.", callback=checked(_name))
]
Prefix = Annotated[
    str,
    typer.Option("--prefix", envvar="TOKENMILL_PREFIX", help="Prefix of every Redis key.", callback=checked(_name)),
]


def warn_of_variables(environ: Mapping[str, str], known: Collection[str] | None = None) -> None:
    """Print on stderr which environment variables look like misspelt settings.

    Args:
        known: names of all settings; None: those of every command and service.
    """
    for note in unknown_variables(environ) if known is None else misspelt(environ, known):
        print(note, file=sys.stderr)


def unknown_variables(environ: Mapping[str, str]) -> list[Misspelt]:
    """Return the variables that look like misspelt settings of any command or service of this project."""
    notes = list(misspelt(environ, KNOWN))
    if notes:  # some may be settings of the worker, whose names take a while to import
        notes = list(misspelt(environ, KNOWN | _variables_of_the_worker()))
    return notes


def _variables_of_the_worker() -> frozenset[str]:
    """Return the names of the worker's settings; none if they cannot be imported, or `worker` is a service's module."""
    try:
        spec = importlib.util.find_spec("worker")
    except ValueError:  # a module without a spec was put into `sys.modules`
        spec = None
    if spec is None or spec.origin != str(Path(tokenmill.__file__).parents[1] / "worker" / "__init__.py"):
        return frozenset()
    with suppress(ModuleNotFoundError):  # a package of an extra is missing
        return frozenset(importlib.import_module("worker.settings").VARIABLES)
    return frozenset()


@contextmanager
def connected(url: str, queue: str, prefix: str) -> Iterator[Client]:
    """Connect a client for a command, and turn errors within the block into exit statuses.

    If Redis cannot be reached at the start the command ends at once; if it goes away later the command waits for it.
    """
    try:
        with interruptible(), Client(url, queue, prefix=prefix, fail_fast=True) as client:
            yield client
    except TimeoutError as late:
        away = isinstance(late.__cause__, RedisError)
        end(Exit.UNAVAILABLE if away else Exit.EXPIRED, str(late))
    except RedisError as error:
        end(Exit.UNAVAILABLE, f"Redis at {redact(url)}: {_advice(error, url)}")
    except JobLost as error:
        end(Exit.FAILED, str(error))
    except JobExists as error:
        end(Exit.USAGE, str(error))
    except EnqueueRefused as error:
        end(Exit.UNAVAILABLE, str(error))
    except JobError as error:
        end(Exit.USAGE, error.message)
    except ValueError as error:
        end(Exit.USAGE, str(error))
    except KeyboardInterrupt:
        end(Exit.INTERRUPTED)


def _advice(error: RedisError, url: str) -> str:
    """Return the text of a Redis error, with what to do for errors that a first try meets."""
    text = str(error)
    # A client that has not logged in and sends a long command, such as a script, is disconnected by Redis instead of
    # getting "Authentication required".
    cut_off = "unauthenticated" in text or "closed" in text
    if "Authentication required" in text or (cut_off and _wants_login(url)):
        return "Redis requires a login; use --redis redis://USER:PASSWORD@HOST:PORT/0"
    if "refused" in text:
        return f"{text.rstrip('.')}; start a Redis there, or name another Redis with --redis"
    return text


def _wants_login(url: str) -> bool:
    try:
        with command_client(url, retries=0) as client:
            client.ping()
    except AuthenticationError:
        return True
    except RedisError:
        return False  # the first error is reported, not this error
    return False
