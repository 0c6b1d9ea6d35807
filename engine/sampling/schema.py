"""Checks the JSON schemas of requests keyword by keyword, and rewrites them for llguidance.

llguidance ignores keywords that it does not know, reads options of its own from the schema, and enforces some keywords
less strictly than the standard. So a keyword that is not listed here is refused by its name, at every level, and a
keyword that llguidance enforces only in part is rewritten so that it is enforced, or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf
from typing import Any
from urllib.parse import quote, unquote

from engine.request import GrammarError
from engine.sampling.formats import LENGTHS, PATTERNS
from engine.sampling.patterns import PatternError, translate
from engine.sampling.unions import MAX_REFERENCES, TYPES, exclude_each_other, words_of

Path = tuple[str, ...]

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated"}
    | {"readOnly", "writeOnly", "contentEncoding", "contentMediaType", "discriminator"}
)
"""Keywords that describe and do not restrict; they are removed."""
MAX_NUMBER = 2**53
"""Largest number: above it, most JSON readers, and llguidance, cannot tell neighbouring integers apart."""
LEAST_STEP = 1e-9
"""Distance of an inclusive bound from the exclusive integer bound that it replaces."""
MAX_STEPPED = 2**20
"""Largest integer to which `LEAST_STEP` can be added without losing digits."""
MAX_SPELT_OUT = 256 * 1024
"""Maximum number of characters of the schemas into which a list of names is expanded."""
MAX_COUNT = 2**31 - 1
"""Maximum of a length, or of a number of items or properties, in a schema; texts are far shorter."""
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that a JSON string can only contain as `\\uXXXX`. Such escapes are never generated, since the name of a
listed property could be written with an escape, and its schema would not apply."""


def prepare(schema: Any) -> dict[str, Any]:
    """Check a JSON schema and rewrite it for llguidance; equal schemas give equal results.

    Raises:
        GrammarError: the schema is invalid or not supported; the message begins with a JSON pointer to the
            subschema and names the keyword.
        RecursionError: the schema is nested too deeply.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object, true or false")
    if schema is False:
        raise GrammarError("no value is valid under the schema false")
    walk = _Walk(schema)
    prepared = walk.schema(schema, ())
    walk.check_references()
    walk.step_off_integers()
    return prepared if isinstance(prepared, dict) else {}


class _Walk:
    """One pass over a schema, which collects the paths of subschemas and references."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bounded: list[tuple[Path, dict[str, Any]]] = []
        identity = root.get("$id") if isinstance(root, dict) else None
        self._id = identity.rstrip("#") if isinstance(identity, str) else None
        self._places: set[Path] = set()
        self._references: list[tuple[Path, str, Path]] = []

    def schema(self, schema: Any, at: Path) -> Any:
        """Check and rewrite the subschema at `at`."""
        self._places.add(at)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _wrong(at, "a schema is an object, true or false")
        out: dict[str, Any] = {}
        names: list[str] | None = None
        for key, value in schema.items():
            handler = _KEYWORDS.get(key)
            if key == "propertyNames":
                names = self._property_names(value, schema, (*at, key))
            elif handler is not None:
                out[key] = handler(self, value, (*at, key))
            elif key not in ANNOTATIONS:
                raise _wrong(at, f"{key} is not supported")
        self._check_identity(schema, at)
        _check_combinations(schema, at)
        _replace_format(out)
        if names is not None:
            _spell_out(out, names, at)
        if any(key in out for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")):
            self._bounded.append((at, out))
        if "oneOf" in out and exclude_each_other(schema["oneOf"], self._resolve):
            out["allOf"] = [*out.get("allOf", ()), {"anyOf": out.pop("oneOf")}]
        return out

    def step_off_integers(self) -> None:
        """Replace exclusive integer bounds by inclusive ones where llguidance would accept the integer itself.

        llguidance accepts it if another bound is less than 1 away, as in 0 < x < 0.5. The two may be in different
        subschemas, so all bounds of the schema are compared.
        """
        for low, high, up in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
            opposite = [value for _, out in self._bounded for value in _bounds(out, high)]
            for at, out in self._bounded:
                bound = _exclusive_bound(out, low)
                if bound is None or bound != int(bound) or not any(0 < (end - bound) * up < 1 for end in opposite):
                    continue
                if abs(bound) > MAX_STEPPED:
                    raise _wrong(at, f"{bound} as an exclusive bound less than 1 from another is not supported")
                out.pop(f"exclusive{low.title()}")
                out[low] = max(out.get(low, bound) * up, bound * up + LEAST_STEP) * up

    def _property_names(self, names: Any, schema: dict[str, Any], at: Path) -> list[str] | None:
        """Check `propertyNames`; return the names that it lists, in order; None if it allows every name.

        Raises:
            GrammarError: `names` is anything but `type: string` or a list of names in a schema without other names.
        """
        self.schema(names, at)
        for _ in range(MAX_REFERENCES):
            if isinstance(names, dict) and names.keys() - ANNOTATIONS == {"$ref"}:
                names = self._resolve(names["$ref"])
        if names is True:
            return None
        allows_strings = isinstance(names, dict) and "string" in _listed(names.get("type", "string"))
        keys = names.keys() - ANNOTATIONS - {"type"} if allows_strings else {"type"}
        if not keys:
            return None
        words = words_of(names, self._resolve) if len(keys) == 1 and keys <= {"const", "enum"} else None
        if words is None:
            raise _wrong(at, "is supported as type string or as a list of names (enum, const) only")
        if "properties" in schema or "patternProperties" in schema:
            raise _wrong(at, "a list of names is not supported beside properties or patternProperties")
        return list(dict.fromkeys([names["const"]] if "const" in names else names["enum"]))

    def _resolve(self, reference: Any) -> Any:
        """Return the subschema to which a reference points; None if there is none."""
        try:
            target = self._target(reference)
        except GrammarError:
            return None
        found = self._root
        for part in target:
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return None
        return found

    def check_references(self) -> None:
        """Raise `GrammarError` for a `$ref` that does not point to a subschema."""
        for at, reference, target in self._references:
            if target not in self._places:
                raise _wrong(at, f"{reference} does not point to a subschema of this schema")

    def _check_identity(self, schema: dict[str, Any], at: Path) -> None:
        if at:
            for key in ("$id", "$schema"):
                if key in schema:
                    raise _wrong(at, f"{key} is supported at the top only")
        draft = schema.get("$schema")
        if draft is not None and not (isinstance(draft, str) and _DRAFT.fullmatch(draft)):
            raise _wrong(at, "$schema is not a draft of json-schema.org from 4 to 2020-12")

    # ── keywords ──────────────────────────────────────────────────────────────────────────────────────────────────

    def list_(self, value: Any, at: Path) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(at, "must be a list of schemas")
        return [self.schema(one, (*at, str(i))) for i, one in enumerate(value)]

    def map_(self, value: Any, at: Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(at, "must be an object of schemas")
        for name in value:
            _check_text(name, at)
        return {name: self.schema(one, (*at, name)) for name, one in value.items()}

    def pattern_map(self, value: Any, at: Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(at, "must be an object of schemas")
        out: dict[str, Any] = {}
        for pattern, one in value.items():
            key = self.pattern(pattern, at)
            if key in out:
                raise _wrong(at, f"{pattern} is equal to another pattern")
            out[key] = self.schema(one, (*at, pattern))
        return out

    def items(self, value: Any, at: Path) -> Any:
        return self.list_(value, at) if isinstance(value, list) else self.schema(value, at)

    def reference(self, value: Any, at: Path) -> str:
        target = self._target(value, at)
        self._references.append((at, value, target))
        return "/".join(["#", *(quote(part.replace("~", "~0").replace("/", "~1"), safe="~$") for part in target)])

    def _target(self, value: Any, at: Path = ()) -> Path:
        """Return the path to which a reference points."""
        if not isinstance(value, str):
            raise _wrong(at, "must be a string")
        local = value.removeprefix(self._id) if self._id and value.startswith(f"{self._id}#") else value
        if local != "#" and not local.startswith("#/"):
            raise _wrong(at, f"{value} does not begin with #/: only references inside the schema are supported")
        return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in local.split("/")[1:])

    def pattern(self, value: Any, at: Path) -> str:
        if not isinstance(value, str):
            raise _wrong(at, "must be a string")
        try:
            return translate(value)
        except PatternError as error:
            raise _wrong(at, str(error)) from None

    def type_(self, value: Any, at: Path) -> Any:
        for one in _listed(value):
            if one not in TYPES:
                raise _wrong(at, f"{one!r} is not one of {', '.join(TYPES)}")
        return value

    def value(self, value: Any, at: Path) -> Any:
        """Check a value of `const` or `enum`: it must be possible to generate all strings and numbers in it."""
        if isinstance(value, dict):
            for name, one in value.items():
                _check_text(name, at)
                self.value(one, at)
        elif isinstance(value, list):
            for one in value:
                self.value(one, at)
        elif isinstance(value, str):
            _check_text(value, at)
        elif isinstance(value, int | float):
            _check_number(value, at)
        return value

    def values(self, value: Any, at: Path) -> Any:
        if not isinstance(value, list):
            raise _wrong(at, "must be a list of values")
        return self.value(value, at)

    def names(self, value: Any, at: Path) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(at, "must be a list of names")
        return self.value(value, at)

    def number(self, value: Any, at: Path) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(at, "must be a number")
        _check_number(value, at)
        return value

    def exclusive(self, value: Any, at: Path) -> Any:
        """Check an exclusive bound, or in draft 4 the flag that makes `minimum` or `maximum` exclusive."""
        return value if isinstance(value, bool) else self.number(value, at)

    def step(self, value: Any, at: Path) -> Any:
        if self.number(value, at) <= 0:
            raise _wrong(at, "must be above 0")
        return value

    def count(self, value: Any, at: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf or value != int(value):
            raise _wrong(at, "must be an integer of at least 0")
        if value > MAX_COUNT and at[-1].startswith("min"):
            raise _wrong(at, f"must be at most {MAX_COUNT}")
        return min(int(value), MAX_COUNT)

    def format_(self, value: Any, at: Path) -> str:
        if not isinstance(value, str) or value not in PATTERNS:
            raise _wrong(at, f"{value!r} is not one of {', '.join(sorted(PATTERNS))}")
        return str(value)


_Handler = Callable[[_Walk, Any, Path], Any]
_KEYWORDS: dict[str, _Handler] = {
    "$defs": _Walk.map_,
    "definitions": _Walk.map_,
    "$ref": _Walk.reference,
    "allOf": _Walk.list_,
    "anyOf": _Walk.list_,
    "oneOf": _Walk.list_,
    "type": _Walk.type_,
    "const": _Walk.value,
    "enum": _Walk.values,
    "items": _Walk.items,
    "prefixItems": _Walk.list_,
    "additionalItems": _Walk.schema,
    "minItems": _Walk.count,
    "maxItems": _Walk.count,
    "properties": _Walk.map_,
    "patternProperties": _Walk.pattern_map,
    "additionalProperties": _Walk.schema,
    "required": _Walk.names,
    "minProperties": _Walk.count,
    "maxProperties": _Walk.count,
    "minLength": _Walk.count,
    "maxLength": _Walk.count,
    "pattern": _Walk.pattern,
    "format": _Walk.format_,
    "minimum": _Walk.number,
    "maximum": _Walk.number,
    "exclusiveMinimum": _Walk.exclusive,
    "exclusiveMaximum": _Walk.exclusive,
    "multipleOf": _Walk.step,
}
"""The keywords that restrict and are enforced, with their checks."""


def _spell_out(schema: dict[str, Any], names: list[str], at: Path) -> None:
    """Give an object these properties and no others, each with the schema of `additionalProperties`.

    A pattern of the names would do, too, but llguidance lets a comma follow the last name that it allows.
    """
    values = schema.get("additionalProperties", True)
    if len(names) * len(json.dumps(values)) > MAX_SPELT_OUT:
        raise _wrong(at, "propertyNames lists too many names for the size of additionalProperties")
    schema["properties"] = dict.fromkeys(names, values)
    schema["additionalProperties"] = False


def _check_combinations(schema: dict[str, Any], at: Path) -> None:
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _wrong(at, "additionalItems is supported only where items is a list")
    least = schema.get("minProperties", 0)
    sure = len(set(schema.get("required", ())))
    if least > sure + 1:
        # A grammar does not remember keys, so a key that is there twice would count twice.
        raise _wrong(at, f"minProperties above the number of required properties + 1 ({sure + 1}) is not supported")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bounds(schema: dict[str, Any], name: str) -> list[float]:
    """Return the inclusive and exclusive bounds `name` (`minimum` or `maximum`) of a schema."""
    values = (schema.get(name), schema.get(f"exclusive{name.title()}"))
    return [value for value in values if value is not None and not isinstance(value, bool)]


def _exclusive_bound(schema: dict[str, Any], name: str) -> float | None:
    """Return the exclusive bound `name` of a schema, if any; in draft 4 a flag makes `name` exclusive."""
    value = schema.get(f"exclusive{name.title()}")
    if value is True:
        value = schema.get(name)
    return None if value is None or value is False else float(value)


def _replace_format(schema: dict[str, Any]) -> None:
    """Replace a format by its pattern, since the formats of llguidance are less strict."""
    name = schema.pop("format", None)
    if name is None:
        return
    schema["allOf"] = [*schema.get("allOf", ()), {"pattern": f"^(?:{PATTERNS[name]})$"}]
    if name in LENGTHS:
        schema["maxLength"] = min(schema.get("maxLength", LENGTHS[name]), LENGTHS[name])


def _check_text(text: str, at: Path) -> None:
    found = _UNWRITABLE.search(text)
    if found is not None:
        raise _wrong(at, f"the character U+{ord(found[0]):04X} cannot be generated in a string")


def _check_number(value: float, at: Path) -> None:
    if abs(value) > MAX_NUMBER:
        raise _wrong(at, f"{value} is beyond ±2^53, where numbers lose their last digits")


def _wrong(at: Path, problem: str) -> GrammarError:
    pointer = "".join(f"/{part}" for part in at)
    return GrammarError(f"{pointer[:200]}: {problem[:300]}" if pointer else problem[:300])
