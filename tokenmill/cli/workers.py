"""The commands that need an extra of the package, `worker`, `gateway` and `demo`: imported when they are called.

So a producer's machine needs neither torch nor a web server, and `tokenmill --help` imports neither.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from tokenmill.cli.console import Exit, end
from tokenmill.cli.packages import NAMES


class Lazy(NamedTuple):
    """A command that is imported when it is called."""

    target: str
    """`module:function`."""
    help: str
    extras: str
    """The extras of the package that the command needs, as pip takes them."""


LAZY = {
    "worker": Lazy("worker.cli:worker", "Serve a model: take jobs from a queue and answer them.", "worker"),
    "gateway": Lazy("producer.gateway.cli:gateway", "Serve OpenAI's API over HTTP, through the queue.", "gateway"),
    "demo": Lazy("worker.demo.demo:demo", "Run real prompts through a real worker, to see it work.", "worker,demo"),
}


class LazyCommand(TyperCommand):
    """Stands in for a command of `LAZY` until that is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and return the context of its own arguments."""
        return _load(str(self.name)).make_context(info_name, args, parent=parent, **extra)


def _load(name: str) -> Any:
    module, _, attribute = LAZY[name].target.partition(":")
    with _missing_extras(name):
        function: Callable[..., None] = getattr(importlib.import_module(module), attribute)

    @functools.wraps(function)
    def guarded(**given: Any) -> None:
        with _missing_extras(name):  # the command imports more while it runs
            function(**given)

    # Plain help: a table of 80 columns would cut off the names of the worker's options.
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    holder.command(name)(guarded)
    return typer.main.get_command(holder)


@contextmanager
def _missing_extras(name: str) -> Iterator[None]:
    """End the command with the name of a package that is missing, and of the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.partition(".")[0] in NAMES:
            raise
        hint = f"in a clone of tokenmill, pip install '.[{LAZY[name].extras}]'"
        end(Exit.USAGE, f"`tokenmill {name}` needs {missing.name}: {hint}")
