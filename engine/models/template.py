"""Renders chat templates: Jinja in a sandbox, with the functions that transformers offers to templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag `{% generation %}`, which marks answers for training; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One template, compiled when it is first used. Any thread may use it.

    Args:
        source: the template's text.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._compiled: jinja2.Template | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered text.

        Raises:
            jinja2.TemplateError: the template is invalid, or refuses the variables.
        """
        if self._compiled is None:
            self._compiled = self._environment.from_string(self._source)
        return self._compiled.render(variables)
