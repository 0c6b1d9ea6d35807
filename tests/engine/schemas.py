"""JSON schemas for tests: written by hand, and generated from the same parts."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 8}


def obj(properties: Schema, required: bool = True, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties) if required else [], **more}


def closed(properties: Schema, **more: Any) -> Schema:
    return obj(properties, additionalProperties=False, **more)


def array(items: Any, least: int = 0, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


FORMATS = ["date", "time", "date-time", "duration", "uuid", "email", "ipv4", "ipv6", "hostname", "uri"]
PATTERNS = [
    r"^[a-z]{3}$",
    r"^\d{3}-\d{4}$",
    r"^(red|green|blue)$",
    r"^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5}){0,2}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})$",
    r"^.{2,5}$",
    r"^\w+@\w+\.(com|org)$",
    r"^[äöü]{1,4}$",
    r'^["\\/]{1,3}$',
    r"^(?:a|b|){3}c?$",
    r"^\S{1,6}$",
]
NUMBERS: list[Schema] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -17, "maximum": 1234},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 5},
    {"type": "integer", "maximum": -5},
    {"type": "integer", "minimum": 7, "maximum": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "minimum": 0.001, "maximum": 0.002},
    {"type": "number", "minimum": -1000.5},
]
STRINGS: list[Schema] = [
    STRING,
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 20},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 2},
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": "string", "pattern": "^[a-f]+$", "minLength": 2, "maxLength": 4},
]
CONSTANTS: list[Schema] = [
    {"const": 5},
    {"const": 'a "quoted" \\ value\n'},
    {"const": {"a": [1, None, True], "b": {"c": "é🔥"}}},
    {"const": None},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "1", 1.5, None, True, [1], {"a": 1}]},
    {"type": "string", "enum": ["one", "only"]},
    {"type": "integer", "enum": [3, 1, 2]},
    {"enum": [f"value {i}" for i in range(500)]},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean", "null"]},
    {"type": ["string", "array"], "maxLength": 3, "items": {"type": "integer"}, "maxItems": 2},
]
ARRAYS: list[Schema] = [
    array({"type": "integer"}),
    array({"type": "boolean"}, 2, 2),
    array(array({"type": "null"}, 1, 2), 1, 2),
    array({"enum": ["a", "b"]}, 0, 0),
    array(obj({"x": {"type": "integer"}}), 1, 2),
    array(STRING, 3, 5),
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [{"const": "head"}], "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}], "items": False, "minItems": 1},
    {"type": "array", "maxItems": 0},
]
OBJECTS: list[Schema] = [
    closed({}),
    closed({"a": {"type": "integer"}}),
    closed({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "ok": {"type": "boolean"}}),
    closed({"a": closed({"b": closed({"c": closed({"d": {"type": "null"}})})})}),
    closed({"ünïcode 🔥": {"type": "null"}, 'quote"d': {"type": "null"}, "": {"type": "null"}}),
    obj({"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, False, additionalProperties=False),
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]}
    | {"additionalProperties": False},
    obj({"a": {"type": "integer"}}, additionalProperties={"type": "boolean"}),
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"enum": [1, 2]}, "required": ["k"]},
    {"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    {"type": "object"},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(30)}, "additionalProperties": False},
    closed({f"p{i}": {"type": "boolean"} for i in range(20)}),
    closed({"a": array(closed({"b": array({"type": "integer"}, 1, 2)}), 1, 2)}),
]
COMBINED: list[Schema] = [
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"anyOf": [closed({"kind": {"const": "a"}, "x": {"type": "integer"}}), closed({"kind": {"const": "b"}})]},
    {"oneOf": [closed({"kind": {"const": "cat"}, "lives": {"enum": [9]}}), closed({"kind": {"const": "dog"}})]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [obj({"a": {"type": "integer"}}), obj({"b": {"type": "null"}})]},
    {"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"anyOf": [{"type": "null"}, array({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, 1, 2)]},
    closed({"a": {"anyOf": [{"type": "null"}, closed({"b": {"type": "integer"}})]}}),
    obj({"a": {"type": "integer"}}, anyOf=[obj({"b": {"type": "null"}}), obj({"c": {"type": "null"}})]),
]
REFERENCES: list[Schema] = [
    {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"},
    {"$defs": {"n": {"enum": [1, 2]}}, **array({"$ref": "#/$defs/n"}, 2, 3)},
    {"definitions": {"p": closed({"x": {"type": "integer"}})}, **closed({"a": {"$ref": "#/definitions/p"}})},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "boolean"}}, **closed({"v": {"$ref": "#/$defs/a"}})},
    # Recursive: a tree, a list, an expression.
    {
        "$defs": {"tree": closed({"v": {"type": "boolean"}, "kids": array({"$ref": "#/$defs/tree"}, 0, 2)})},
        "$ref": "#/$defs/tree",
    },
    closed({"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    {
        "$defs": {
            "e": {"anyOf": [{"type": "integer"}, closed({"op": {"enum": ["+", "-"]}, "l": {"$ref": "#/$defs/e"}})]}
        },
        **closed({"e": {"$ref": "#/$defs/e"}}),
    },
]
ANYTHING: list[Any] = [{}, {"type": "array"}, obj({"a": {}, "b": True}, additionalProperties=False), {"title": "t"}]
DESCRIBED: list[Schema] = [
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/person",
        "title": "Person",
        "description": "Somebody",
        **closed(
            {
                "name": {"type": "string", "description": "the name", "maxLength": 10, "examples": ["Ann"]},
                "born": {"type": "string", "format": "date"},
                "mail": {"type": ["string", "null"], "format": "email"},
                "tags": array({"type": "string", "pattern": "^[a-z]{1,5}$"}, 0, 2),
                "home": closed({"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": STRING}),
            }
        ),
    },
    closed(
        {
            "tool": {"const": "search"},
            "arguments": closed({"query": STRING, "limit": {"type": "integer", "minimum": 1, "maximum": 50}}),
        }
    ),
]
BY_HAND: list[Any] = [
    *NUMBERS,
    *STRINGS,
    *CONSTANTS,
    *ARRAYS,
    *OBJECTS,
    *COMBINED,
    *REFERENCES,
    *ANYTHING,
    *DESCRIBED,
]

UNSUPPORTED: list[tuple[Schema, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "if"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}}}, "min/maxProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "format": "colour"}, "colour"),
    ({"type": "objekt"}, "objekt"),
    ({"$ref": "http://example.com/other.json"}, "example.com"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    (closed({"a": {"type": "string", "pattern": "(?<=x)y"}}), "look-around"),
    (closed({"a": {"not": {}}}), "not"),
]
IMPOSSIBLE: list[Schema] = [
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#"},
]


def generated(count: int, seed: int = 0) -> list[Schema]:
    """`count` objects and arrays with parts of all kinds in them, nested up to four deep."""
    dice = random.Random(seed)
    return [_nested(dice, 3) for _ in range(count)]


def _nested(dice: random.Random, depth: int) -> Schema:
    kind = dice.choice(["object", "object", "array", "tuple", "choice", "leaf"] if depth < 3 else ["object", "array"])
    if depth == 0 or kind == "leaf":
        return dice.choice(dice.choice([NUMBERS, STRINGS, CONSTANTS]))
    if kind == "array":
        least = dice.randrange(3)
        return array(_nested(dice, depth - 1), least, least + dice.randrange(3))
    if kind == "tuple":
        parts = [_nested(dice, depth - 1) for _ in range(dice.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": dice.randint(0, len(parts))}
    if kind == "choice":
        return {"anyOf": [_nested(dice, depth - 1), {"type": "null"}]}
    names = dice.sample(["id", "name", "value", "items", "ok", "note", "größe", "x y"], dice.randint(1, 4))
    made = closed({name: _nested(dice, depth - 1) for name in names})
    made["required"] = [name for name in names if dice.random() < 0.7]
    return made
