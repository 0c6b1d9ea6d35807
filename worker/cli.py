"""The `tokenmill worker` command. Its options are generated from `Settings`."""

from __future__ import annotations

import typer

from tokenmill.cli.options import settings_of, take_options
from tokenmill.protocol.environment import KNOWN
from worker.settings import VARIABLES, Settings

settings_from = Settings.of


def worker(**given: object) -> None:
    """Serve a model: read jobs from a queue, run them in one continuous batch, publish text and results."""
    settings = settings_of(Settings, given, KNOWN | VARIABLES)
    from worker.service import main  # late: signals are caught before torch is imported, and `--help` stays fast

    raise typer.Exit(main(settings))


take_options(worker, Settings)


def run(argv: list[str] | None = None) -> None:
    """Run the command alone: `python -m worker.cli`."""
    app = typer.Typer(add_completion=False)
    app.command("worker")(worker)
    app(args=argv)


if __name__ == "__main__":
    run()
