"""Finds out whether the schemas of a `oneOf` exclude each other, as those of a tagged union do.

llguidance follows no references to find this out, and most tagged unions are written with references.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
"""Values of the keyword `type`."""
MAX_REFERENCES = 16
"""Maximum length of a chain of references that is followed."""

Resolve = Callable[[Any], Any]
"""Returns the subschema to which a reference points; None if there is none."""


def exclude_each_other(branches: list[Any], resolve: Resolve) -> bool:
    """Return whether types and constants show that no value is valid under two of these schemas."""
    facts = [_Facts() for _ in branches]
    for found, branch in zip(facts, branches, strict=True):
        found.learn(branch, resolve)
    return all(first.excludes(second) for first, second in itertools.combinations(facts, 2))


def words_of(schema: Any, resolve: Resolve, depth: int = 0) -> frozenset[str] | None:
    """Return the strings that a schema allows; None if it allows anything beside listed strings.

    Args:
        schema: the schema, or a reference to it.
        resolve: follows references.
        depth: number of references that were followed already.
    """
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return frozenset(values)
    return words_of(resolve(schema["$ref"]), resolve, depth + 1) if "$ref" in schema else None


class _Facts:
    """What holds for every value that is valid under a schema: it has one of `types` and the properties `required`, and
    each property in `words` is one of these strings."""

    def __init__(self) -> None:
        self.types = frozenset(TYPES) - {"integer"}
        self.required: set[str] = set()
        self.words: dict[str, frozenset[str]] = {}

    def learn(self, schema: Any, resolve: Resolve, depth: int = 0) -> None:
        """Add what follows from a schema and the schemas to which it refers."""
        if not isinstance(schema, dict) or depth > MAX_REFERENCES:
            return
        self._learn_types(schema)
        if isinstance(schema.get("required"), list):
            self.required.update(schema["required"])
        properties = schema.get("properties")
        for name, value in properties.items() if isinstance(properties, dict) else ():
            words = words_of(value, resolve, depth)
            if words is not None:
                self.words[name] = words & self.words.get(name, words)
        if "$ref" in schema:
            self.learn(resolve(schema["$ref"]), resolve, depth + 1)

    def _learn_types(self, schema: dict[str, Any]) -> None:
        """Keep only the types that a schema allows; every integer is a number."""
        given = schema.get("type")
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list):
            self.types &= {"number" if name == "integer" else name for name in names}

    def excludes(self, other: _Facts) -> bool:
        """Return whether no value satisfies these facts and `other`."""
        shared = self.types & other.types
        return not shared or (
            shared == {"object"}
            and any(
                name in other.words and self.words[name].isdisjoint(other.words[name])
                for name in self.words.keys() & self.required & other.required
            )
        )
