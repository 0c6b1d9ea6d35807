"""Make a command line of a settings class: one option a field, with help, variable and placeholder.

def worker(**given: object) -> None:
    settings = settings_of(Settings, given)
    …
take_options(worker, Settings)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from tokenmill.cli.console import Exit, end, warn_of_variables
from tokenmill.cli.settings import CommandSettings, option, variable

S = TypeVar("S", bound=CommandSettings)


def settings_of(kind: type[S], given: Mapping[str, object], variables: Collection[str]) -> S:
    """Make the settings of a command; end the command with status 2 and one line for each wrong value.

    Args:
        given: the command's arguments by field.
        variables: the known environment variables, to warn of misspelt variables if a setting is wrong or missing.
    """
    try:
        return kind.of(given)
    except ValueError as error:
        # A required setting may be missing because its variable is misspelt.
        warn_of_variables(os.environ, variables)
        end(Exit.USAGE, str(error))


def take_options(command: Callable[..., None], kind: type[CommandSettings]) -> None:
    """Give a command that takes `**given` one option for each field of a settings class."""
    parameters = [_parameter(name, info) for name, info in kind.model_fields.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


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
    """Return a parameter's value; None for a value from the environment, which the settings class reads itself."""
    source = context.get_parameter_source(parameter.name or "")
    return None if source is not None and source.name == "ENVIRONMENT" else value


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    """Make the command's parameter of a field; its default is None, since pydantic alone knows defaults and ranges."""
    flag = info.annotation is bool
    negatable = flag and not name.startswith("no_")
    names = f"{option(name)}/--no-{option(name)[2:]}" if negatable else option(name)
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
