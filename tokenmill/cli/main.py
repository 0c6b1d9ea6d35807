"""The `tokenmill` command: `app` joins the groups of commands that the other modules of this package hold."""

from __future__ import annotations

if __name__ == "__main__":
    # `python -m tokenmill.cli.main` is the same as the command: it handles Ctrl-C before it imports anything slow.
    from tokenmill.__main__ import main as start

    start()

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokenmill.cli.batch import app as batch
from tokenmill.cli.console import EPILOG, Exit, called, end, warn_of_variables
from tokenmill.cli.interrupt import guard
from tokenmill.cli.jobs import cancel, result, submit, tail
from tokenmill.cli.packages import prefer_ours
from tokenmill.cli.queue import info
from tokenmill.cli.streams import drop_output, written
from tokenmill.cli.workers import LAZY, LazyCommand
from tokenmill.protocol.version import version


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, lazy in LAZY.items():
            self.commands[name] = LazyCommand(name, help=lazy.help, callback=lambda: None)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; report a wrong value of an environment variable under the variable's name."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            parameter, context = getattr(error, "param", None), error.ctx
            if parameter is None or context is None or called(context, parameter) != parameter.envvar:
                raise
            end(Exit.USAGE, f"{parameter.envvar}: {error.message}")
        except BrokenPipeError:  # click would end with status 1, which means a failed job
            drop_output()
            end(Exit.INTERRUPTED)


app = typer.Typer(
    cls=_Group,
    help="Batch LLM inference over a Redis queue.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (submit, tail, result, cancel, info):
    app.command(epilog=EPILOG)(command)
app.add_typer(batch, name="batch")


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
    """Handle the options that stand before the command."""
    prefer_ours()
    if context.invoked_subcommand not in ("worker", "gateway"):  # they log the warnings themselves
        warn_of_variables(os.environ)


def main() -> None:
    """Run the command that the arguments name; `tokenmill.__main__` is the entry point."""
    guard()
    with written():
        app()
