"""The `tokenmill worker` command. Its options are generated from `Settings`."""

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


def settings_from(given: Mapping[str, object]) -> Settings:
    """Make settings from the given values (by field) and from the environment; None counts as not given.

    Raises:
        ValueError: with one line for each wrong value, which names its option if the value is in `given`, else its
            variable. A line never holds the value, which may be a password.
    """
    given = {field: value for field, value in given.items() if value is not None}
    names = {
        field: variable(field) if field not in given and os.environ.get(variable(field)) else option(field)
        for field in Settings.model_fields
    }
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError("\n".join(_complaint(dict(item), names) for item in error.errors(include_url=False))) from None


def _complaint(error: dict[str, Any], names: Mapping[str, str]) -> str:
    """Format an error of pydantic with the option or variable that was given; `names`: field → that name."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"must match {error['ctx']['pattern']}"
    if error["loc"]:
        field = str(error["loc"][0])
        return f"{names.get(field, option(field))}: {message}"
    by_option = {option(field): name for field, name in names.items()}
    return re.sub(r"--[a-z-]+", lambda found: by_option.get(found[0], found[0]), message)


def _metavar(info: FieldInfo) -> str:
    """Return the placeholder of a value in the help: `a|b|c`, INTEGER, FLOAT, SIZE, NAMES or TEXT."""
    kinds = [a for a in get_args(info.annotation) if a is not type(None)] or [info.annotation]
    literal = next((kind for kind in (info.annotation, *kinds) if get_origin(kind) is Literal), None)
    if literal is not None:
        return "|".join(map(str, get_args(literal)))
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


def _from_command_line(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Return a parameter's value; None for a value from the environment, which `Settings` reads itself."""
    source = context.get_parameter_source(parameter.name or "")
    return None if source is not None and source.name == "ENVIRONMENT" else value


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    """Make the command's parameter of a field; its default is None, since pydantic alone knows defaults and ranges."""
    flag = info.annotation is bool
    names = f"{option(name)}/--no-{option(name)[2:]}" if flag else option(name)
    spec = typer.Option(
        names,
        envvar=variable(name),
        callback=_from_command_line,
        help=_help(info),
        metavar=None if flag else _metavar(info),
        show_default=False,
    )
    kind = bool if flag else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, spec]
    )


def worker(**given: object) -> None:
    """Serve a model: read jobs from a queue, run them in one continuous batch, publish text and results."""
    try:
        settings = settings_from(given)
    except ValueError as error:
        # A required setting may be missing because its variable is misspelt.
        warn_of_variables(os.environ, COMMANDS | CLERK | VARIABLES)
        print(error, file=sys.stderr)
        raise typer.Exit(Exit.USAGE) from None
    from worker.service import main  # late: signals are caught before torch is imported, and `--help` stays fast

    raise typer.Exit(main(settings))


worker.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, info) for name, info in Settings.model_fields.items()]
)
worker.__annotations__ = {name: p.annotation for name, p in inspect.signature(worker).parameters.items()}


def run(argv: list[str] | None = None) -> None:
    """Run the command alone: `python -m worker.cli`."""
    app = typer.Typer(add_completion=False)
    app.command("worker")(worker)
    app(args=argv)


if __name__ == "__main__":
    run()
