"""The `tokenmill worker` command, generated from `Settings`: no option is written twice."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from tokenmill.cli.console import warn_of_variables
from tokenmill.protocol.environment import CLERK, COMMANDS
from worker.ops.exits import Exit
from worker.settings import VARIABLES, Settings, option, variable


def settings_from(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Settings:
    """Validate what the command line and the environment gave; None means not given.

    Raises:
        ValueError: with one line for each bad value, naming its option, or its variable where it is the one that
            `environ` has; never holds a value, which may be a password.
    """
    given = {name: value for name, value in given.items() if value is not None}
    names = {
        field: variable(field) if field in given and environ.get(variable(field)) == given[field] else option(field)
        for field in Settings.model_fields
    }
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise ValueError("\n".join(_complaint(dict(item), names) for item in error.errors(include_url=False))) from None


def settings_from_environment(environ: Mapping[str, str] = os.environ, **given: object) -> Settings:
    """As `settings_from`, with `TOKENMILL_…` variables under what is given; for those who embed a worker."""
    found = {name: environ.get(variable(name)) or None for name in Settings.model_fields}
    return settings_from({**found, **given}, environ)


def _complaint(error: dict[str, Any], names: Mapping[str, str]) -> str:
    """What is wrong, with the name under which it was given; `names`: of each field."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"must match {error['ctx']['pattern']}"
    if error["loc"]:
        field = str(error["loc"][0])
        return f"{names.get(field, option(field))}: {message}"
    by_option = {option(field): name for field, name in names.items()}
    return re.sub(r"--[a-z-]+", lambda found: by_option.get(found[0], found[0]), message)


def _metavar(info: FieldInfo) -> str:
    """What a value looks like: `a|b|c`, INTEGER, FLOAT or TEXT."""
    kinds = [a for a in get_args(info.annotation) if a is not type(None)] or [info.annotation]
    if get_origin(info.annotation) is Literal:
        return "|".join(map(str, get_args(info.annotation)))
    if info.annotation == tuple[str, ...]:
        return "NAMES"
    if info.metadata and info.annotation is int and any(isinstance(m, BeforeValidator) for m in info.metadata):
        return "SIZE"
    if get_origin(kinds[0]) is Annotated:
        return "SIZE"
    return {int: "INTEGER", float: "FLOAT"}.get(kinds[0] if isinstance(kinds[0], type) else str, "TEXT")


def _help(info: FieldInfo) -> str:
    text = info.description or ""
    plain = info.default_factory is None and not info.is_required() and info.default not in (None, (), False)
    return f"{text} Default: {info.default}." if plain and not isinstance(info.default, bool) else text


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    """One keyword of the command; None means not given, so that pydantic alone knows defaults and ranges."""
    flag = info.annotation is bool
    names = f"{option(name)}/--no-{option(name)[2:]}" if flag else option(name)
    spec = typer.Option(
        names, envvar=variable(name), help=_help(info), metavar=None if flag else _metavar(info), show_default=False
    )
    kind = bool if flag else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, spec]
    )


def worker(**given: object) -> None:
    """Serve a model: read jobs of a queue, run them in one continuous batch, publish text and results."""
    try:
        settings = settings_from(given)
    except ValueError as error:
        warn_of_variables(
            os.environ, COMMANDS | CLERK | VARIABLES
        )  # a setting may be missing because its variable is misspelt
        print(error, file=sys.stderr)
        raise typer.Exit(Exit.USAGE) from None
    from worker.service import main  # late: signals are caught before torch is imported, `--help` stays fast

    raise typer.Exit(main(settings))


worker.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, info) for name, info in Settings.model_fields.items()]
)
worker.__annotations__ = {name: p.annotation for name, p in inspect.signature(worker).parameters.items()}


def run(argv: list[str] | None = None) -> None:
    """`python -m worker.cli`: the command alone."""
    app = typer.Typer(add_completion=False)
    app.command("worker")(worker)
    app(args=argv)


if __name__ == "__main__":
    run()
