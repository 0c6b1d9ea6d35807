"""Schemas as llguidance is given them: what they accept is valid, and what cannot be enforced is refused by name."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import re
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from engine.request import GrammarError
from engine.sampling.formats import PATTERNS
from engine.sampling.patterns import PatternError, translate
from engine.sampling.schema import prepare
from engine.sampling.structured import Grammar, _source

EOS = 256


class _Bytes:
    """A tokenizer with one id for each byte."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def accepts(kind: Any, spec: Any, text: str) -> bool:
    """Whether a text of this grammar may be exactly `text`."""
    matcher = Grammar(TOKENIZER, _source(kind, spec)).matcher()._matcher
    return all(not matcher.is_stopped() and matcher.try_consume_tokens([byte]) for byte in text.encode()) and bool(
        matcher.is_accepting()
    )


DRAFT_4 = "http://json-schema.org/draft-04/schema#"
INT = {"type": "integer"}
WORD = {"type": "string"}
UNION: dict[str, Any] = {
    "$defs": {
        "Cat": {"type": "object", "properties": {"kind": {"$ref": "#/$defs/cat"}, "age": WORD}, "required": ["kind"]},
        "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "age": INT}, "required": ["kind"]},
        "cat": {"enum": ["cat", "lion"]},
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
}
"""A tagged union as pydantic writes it."""
RECORD: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"$ref": "#/$defs/Key"},
    "additionalProperties": INT,
    "required": ["a"],
    "$defs": {"Key": {"title": "Key", "type": "string", "enum": ["a", "b.c"]}},
}
"""A dictionary whose keys are an enumeration, as pydantic writes it."""
NOTHING: dict[str, Any] = {"not": {"minimum": 0}}

REFUSED: list[tuple[Any, str]] = [
    # Options of llguidance inside the schema.
    ({"x-guidance": {"lenient": True}, **NOTHING}, "x-guidance"),
    ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
    ({"x-guidance": {"item_separator": " ; "}}, "x-guidance"),
    ({"x-guidance": {"whitespace_pattern": "[ ]*"}}, "x-guidance"),
    ({"x-guidance": {"coerce_one_of": True}, "oneOf": [INT, {"type": "number"}]}, "x-guidance"),
    ({"x-guidance": {}}, "x-guidance"),
    ({"properties": {"a": {"x-guidance": {}}}}, "/properties/a: x-guidance"),
    # Keywords that restrict, or that are unknown, at every level.
    ({"allOf": [NOTHING]}, "/allOf/0: not"),
    ({"items": {"uniqueItems": True}}, "/items: uniqueItems"),
    ({"$defs": {"a": {"contains": {}}}}, "/$defs/a: contains"),
    ({"type": "object", "propertys": {}}, "propertys"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "string", "format": "password"}, "password"),
    ({"type": "integer", "format": "int32"}, "int32"),
    ({"type": "string", "format": ["date"]}, "/format"),
    ({"propertyNames": {"pattern": "^a"}}, "/propertyNames"),
    ({"propertyNames": {"type": "string", "maxLength": 3}}, "/propertyNames"),
    ({"propertyNames": {"x-guidance": {}}}, "/propertyNames: x-guidance"),
    ({"propertyNames": {"type": "integer"}}, "/propertyNames"),
    ({"propertyNames": {"enum": ["a"], "pattern": "b"}}, "/propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "properties": {"a": INT}}, "/propertyNames"),
    ({"propertyNames": {"enum": ["\x01"]}}, "U+0001"),
    ({"additionalItems": False, "items": INT}, "additionalItems"),
    ({"additionalItems": False, "prefixItems": [INT]}, "additionalItems"),
    # A repeated key would count twice.
    ({"type": "object", "minProperties": 2, "additionalProperties": INT}, "minProperties"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties"),
    # Numbers that lose their last digits.
    ({"type": "integer", "minimum": 2**53 + 1}, "2^53"),
    ({"type": "integer", "maximum": -(2**60)}, "2^53"),
    ({"type": "number", "exclusiveMaximum": 1e300}, "2^53"),
    ({"const": 2**53 + 1}, "2^53"),
    ({"enum": [{"a": [10**30]}]}, "2^53"),
    ({"multipleOf": 2**70}, "2^53"),
    # Values of the wrong kind.
    ({"minLength": -1}, "/minLength"),
    ({"minLength": 1.5}, "/minLength"),
    ({"minLength": 2**60}, "/minLength"),
    ({"minItems": 1e300}, "/minItems"),
    ({"maxItems": "3"}, "/maxItems"),
    ({"minimum": "5"}, "/minimum"),
    ({"minimum": True}, "/minimum"),
    ({"multipleOf": 0}, "/multipleOf"),
    ({"multipleOf": -1}, "/multipleOf"),
    ({"required": "a"}, "/required"),
    ({"properties": []}, "/properties"),
    ({"enum": 5}, "/enum"),
    ({"anyOf": {}}, "/anyOf"),
    ({"items": 5}, "/items"),
    ({"type": "objekt"}, "objekt"),
    ({"type": ["string", 5]}, "/type"),
    ({"pattern": 5}, "/pattern"),
    ({"$schema": "https://example.com/mine"}, "$schema"),
    ({"$defs": {"a": {"$id": "https://example.com/a"}}}, "$id"),
    # References to what is not a schema here.
    ({"$ref": "#/examples/0", "examples": [NOTHING]}, "#/examples/0"),
    ({"$ref": "#/enum/0", "enum": [{"uniqueItems": True}]}, "#/enum/0"),
    ({"$ref": "other.json"}, "other.json"),
    ({"$ref": "#anchor", "$anchor": "anchor"}, "#anchor"),
    ({"$ref": 5}, "/$ref"),
    # Characters that only an escape could write.
    ({"const": "\x01"}, "U+0001"),
    ({"properties": {"\x7f": INT}}, "U+007F"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(named)):
        prepare(schema)


def _union(first: Any, second: Any) -> Any:
    return {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": first, "b": second}}


@pytest.mark.parametrize(
    "schema",
    [
        _union(INT, {"type": "number"}),
        _union({"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}),
        _union({**UNION["$defs"]["Dog"], "required": []}, UNION["$defs"]["Dog"]),
        _union({"type": ["object", "null"], "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"type": "null"}),
        _union({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
    ],
)
def test_schemas_of_one_of_that_may_both_be_valid_are_refused_with_the_way_out(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"oneOf is supported only where .* write anyOf"):
        Grammar(TOKENIZER, _source("json", schema))


def test_no_number_beyond_its_bounds_can_be_generated() -> None:
    bounds = [-2.5, -2, -0.5, -0.05, 0, 0.05, 0.5, 1, 1.5, 2, 10, 10.5]
    texts = [
        f"{sign}{text}"
        for sign in ("", "-")
        for text in ("0", "0.0", "0.05", "0.5", "1", "1.5", "2", "2.0", "2.5", "10", "10.5")
    ]
    for low, high, least, most in itertools.product(bounds, bounds, ("m", "exclusiveM"), ("m", "exclusiveM")):
        if low >= high:
            continue
        schema = {"type": "number", f"{least}inimum": low, f"{most}aximum": high}
        valid = Draft202012Validator(schema).is_valid
        first = Grammar(TOKENIZER, _source("json", schema))
        for text in texts:
            matcher = first.matcher()._matcher
            taken = all(not matcher.is_stopped() and matcher.try_consume_tokens([byte]) for byte in text.encode())
            assert not (taken and matcher.is_accepting()) or valid(json.loads(text)), (schema, text)


ENFORCED: list[tuple[Any, str]] = [
    # A listed property cannot come again under an escaped name.
    ({"properties": {"a": INT}, "additionalProperties": WORD}, r'{"\u0061":"x"}'),
    ({"properties": {"a": INT}}, r'{"\u0061":"x"}'),
    ({"properties": {"a": INT}}, '{"a":1,"a":"x"}'),
    ({"properties": {"é": INT}}, r'{"\u00e9":"x"}'),
    ({"properties": {"a\n": INT}}, r'{"a\u000a":"x"}'),
    ({"properties": {"a\n": INT}}, r'{"a\n":"x"}'),
    ({"properties": {'"': INT}}, r'{"\u0022":"x"}'),
    ({"properties": {"a/b": INT}}, r'{"a\/b":"x"}'),
    ({"patternProperties": {"^a": INT}}, r'{"\u0061":"x"}'),
    (UNION, '{"kind":"dog","age":"x"}'),
    ({"properties": {"ab": {"minimum": 5}}, "patternProperties": {"^a": INT}}, '{"ab":"x"}'),
    (RECORD, '{"a":1,"bxc":2}'),
    (RECORD, '{"a":"x"}'),
    ({"propertyNames": {"enum": []}, "type": "object"}, '{"":1}'),
    # An older draft's name switches no keyword off.
    ({"$schema": DRAFT_4, "const": 5}, "6"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/a", "$defs": {"a": {}}, "const": 5}, "6"),
    ({"items": [INT], "additionalItems": False}, "[1,2]"),
    # An exclusive bound is not reached, however near the other one is, and wherever that one stands.
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2.25}, "2"),
    ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}, "-2"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0.0}, "-0"),
    ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0"),
    ({"$ref": "#/$defs/a", "exclusiveMinimum": 1, "$defs": {"a": {"type": "number", "maximum": 1.5}}}, "1"),
    ({"$schema": DRAFT_4, "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0"),
    # Patterns as ECMA-262 reads them.
    ({"type": "string", "pattern": r"^\d$"}, '"٣"'),
    ({"type": "string", "pattern": r"^\w$"}, '"é"'),
    ({"type": "string", "pattern": "^.$"}, r'"\r"'),
    ({"type": "string", "pattern": r"^[\d]$"}, '"٣"'),
    ({"type": "string", "pattern": r"^[^\D]$"}, '"٣"'),
    ({"type": "string", "pattern": "^[a&&b]$"}, '"c"'),
    ({"patternProperties": {r"^\d$": INT}, "additionalProperties": False}, '{"٣":1}'),
    *(
        ({"type": "string", "format": name}, json.dumps(text))
        for name, text in [
            ("date", "2023-02-29"),
            ("date", "1900-02-29"),
            ("date", "2024-04-31"),
            ("date", "2024-13-01"),
            ("time", "12:00:60Z"),
            ("time", "23:58:60Z"),
            ("time", "23:59:60+01:00"),
            ("time", "24:00:00Z"),
            ("time", "12:00:00"),
            ("time", "12:00:00+24:00"),
            ("date-time", "2023-02-29T12:00:00Z"),
            ("date-time", "2023-02-28T12:00:60Z"),
            ("date-time", "2023-02-28 12:00:00Z"),
            ("duration", "P"),
            ("duration", "PT"),
            ("duration", "P1YT"),
            ("duration", "P1Y2W"),
            ("duration", "PT1H2S"),
            ("duration", "P1D2H"),
            ("email", "a@b@c"),
            ("email", ".a@b.c"),
            ("email", "a..b@c.d"),
            ("email", "a@-b"),
            ("hostname", "-a"),
            ("hostname", "a-"),
            ("hostname", "a..b"),
            ("hostname", "a_b"),
            ("hostname", "a."),
            ("hostname", "x" * 64),
            ("hostname", "xn--X"),
            ("hostname", ".".join(["a" * 63] * 4)),
            ("ipv4", "256.0.0.1"),
            ("ipv4", "01.2.3.4"),
            ("ipv4", "1.2.3"),
            ("ipv6", "1::2::3"),
            ("ipv6", "12345::"),
            ("ipv6", "1:2:3:4:5:6:7"),
            ("ipv6", "::1%eth0"),
            ("uri", "//a.b/c"),
            ("uri", "abc"),
            ("uri", "http://a b"),
            ("uri", "http://a.b/%zz"),
            ("uri", "bar,baz:foo"),
            ("uri", "https://[@a.b/"),
            ("uuid", "2eb8aa08aa9811eab4aa73b441d16380"),
            ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"),
        ]
    ),
]


@pytest.mark.parametrize(("schema", "text"), ENFORCED)
def test_a_text_that_breaks_the_schema_cannot_be_generated(schema: Any, text: str) -> None:
    assert not accepts("json", schema, text)


ALLOWED: list[tuple[Any, str]] = [
    ({"minProperties": 1, "additionalProperties": INT, "type": "object"}, '{"a":1}'),
    ({"minProperties": 2, "required": ["a"], "type": "object"}, '{"a":1,"b":2}'),
    ({"minLength": 2.0, "type": "string"}, '"ab"'),
    ({"title": "t", "description": "d", "default": {"not": 1}, "examples": [{}], "deprecated": True, **INT}, "1"),
    ({"maxLength": 2**53 - 1, "type": "string"}, '"ab"'),
    ({"propertyNames": {"type": "string"}, "additionalProperties": INT, "type": "object"}, '{"a":1}'),
    (RECORD, '{"a":2,"b.c":1}'),
    ({"oneOf": [{"const": "a"}, {"const": "b"}], "discriminator": {"propertyName": "kind"}}, '"b"'),
    (UNION, '{"kind":"dog","age":7}'),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": INT}}, "null"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.001"),
    ({"exclusiveMinimum": 0, "type": "integer", "$defs": {"a": {"maximum": 0.5}}}, "1"),
    ({"$defs": {"é/~%": INT}, "$ref": "#/$defs/é~1~0%25"}, "7"),
    ({"$id": "https://example.com/s", "$defs": {"a": INT}, "$ref": "https://example.com/s#/$defs/a"}, "7"),
    ({"properties": {"a": INT}, "items": {"$ref": "#/properties/a"}}, "[7]"),
    ({"properties": {"$id": INT, "not": INT, "x-guidance": INT}, "type": "object"}, '{"$id":1,"not":2,"x-guidance":3}'),
    ({"$schema": DRAFT_4, "items": [INT], "additionalItems": {"type": "boolean"}, "type": "array"}, "[1,true]"),
    ({"$schema": DRAFT_4, "minimum": 5, "exclusiveMinimum": True, "type": "integer"}, "6"),
    ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, str(2**53)),
    ({"type": "string", "format": "date", "pattern": "^2024"}, '"2024-02-29"'),
    ({"type": "string", "pattern": r"^\d\w\s.\/$"}, '"1a x/"'),
    ({"type": "string", "pattern": r"^[\]\-[&]+$"}, '"]-[&"'),
    ({"format": "date"}, "5"),
    *(
        ({"type": "string", "format": name}, json.dumps(text))
        for name, text in [
            ("date", "2000-02-29"),
            ("date", "2024-12-31"),
            ("time", "23:59:60Z"),
            ("time", "08:30:06.283185+05:30"),
            ("date-time", "2024-02-29T23:59:59.5-08:00"),
            ("duration", "P4DT12H30M5S"),
            ("duration", "P4W"),
            ("duration", "PT36H"),
            ("email", "joe.bloggs+x@mail.example.com"),
            ("hostname", "www.a-b.example"),
            ("hostname", "x" * 63),
            ("ipv4", "192.168.0.255"),
            ("ipv6", "::ffff:192.168.0.1"),
            ("ipv6", "2001:db8::7"),
            ("uri", "http://user:pw@[::1]:80/a/b;c?d=e&f#g/h?i"),
            ("uri", "mailto:John.Doe@example.com"),
            ("uuid", "2EB8AA08-aa98-11ea-b4aa-73b441d16380"),
        ]
    ),
]


@pytest.mark.parametrize(("schema", "text"), ALLOWED)
def test_a_valid_text_can_be_generated(schema: Any, text: str) -> None:
    assert accepts("json", schema, text)
    assert validator_for(schema, default=Draft202012Validator)(schema).is_valid(json.loads(text))


def test_an_object_whose_names_are_listed_ends_after_the_last_of_them() -> None:
    matcher = Grammar(TOKENIZER, _source("json", RECORD)).matcher()._matcher
    assert matcher.consume_tokens(list(b'{"a":1,"b.c":2'))
    assert matcher.try_consume_tokens(list(b",")) == 0


def test_the_pattern_of_dates_knows_the_calendar() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year, month, day in itertools.product((1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999), range(14), range(33)):
        try:
            datetime.date(year, month, day)
            valid = True
        except ValueError:
            valid = False
        assert bool(pattern.fullmatch(f"{year:04}-{month:02}-{day:02}")) == valid


def test_the_pattern_of_ipv6_agrees_with_the_standard_library() -> None:
    pattern = re.compile(PATTERNS["ipv6"])
    for parts in itertools.product(["::", ":", "1", "ffff", "1.2.3.4"], repeat=7):
        text = "".join(parts)
        try:
            ipaddress.IPv6Address(text)
            valid = True
        except ValueError:
            valid = False
        assert bool(pattern.fullmatch(text)) == valid, text


@pytest.mark.parametrize(
    ("pattern", "matches", "other"),
    [
        (r"\d", "5", "٣"),
        (r"\D", "٣", "5"),
        (r"[\d]", "5", "٣"),
        (r"[^\d]", "٣", "5"),
        (r"\w", "_", "é"),
        (r"\s", "\u00a0", "\x85"),
        (r"\s", "\ufeff", "a"),
        (r".", "é", "\r"),
        (r".", "\u2027", "\u2028"),
        (r"[a&&b]", "&", "c"),
        (r"[+--]", ",", "."),
        (r"[a~~b]", "~", "c"),
        (r"[[]", "[", "a"),
        (r"[\w-.]", "-", "/"),
        (r"[\b]", "\x08", "b"),
        (r"\cA", "\x01", "A"),
        (r"\0", "\x00", "0"),
        (r"\x41\u0042\u{43}", "ABC", "abc"),
        (r"\/\-\.\$", "/-.$", "/-x$"),
        (r"(?<name>a)(?P<other>b)(?:c)", "abc", "ab"),
        (r"(?i)yes", "YeS", "no"),
        (r"\p{L}", "é", "5"),
        (r"a{2,3}?", "aa", "a"),
    ],
)
def test_a_pattern_means_what_ecma_262_says(pattern: str, matches: str, other: str) -> None:
    assert accepts("regex", pattern, matches)
    assert not accepts("regex", pattern, other)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"(a)\1", r"\1"),
        (r"\bword\b", r"\b"),
        (r"(?=a)b", "look-around"),
        (r"(?<!a)b", "look-around"),
        (r"(?x)a b", "(?x)"),
        (r"(?s).", "(?s)"),
        (r"\Aa\z", r"\A"),
        (r"[[:digit:]]", "[[:digit:"),
        (r"[]a]", "[]"),
        (r"[^]a]", "[^]"),
        (r"[a", "[a"),
        ("a\\", "\\"),
        ("a++", "nothing to repeat"),
        ("a{2}{3}", "nothing to repeat"),
    ],
)
def test_a_pattern_that_tools_read_differently_is_refused(pattern: str, named: str) -> None:
    with pytest.raises(PatternError, match=re.escape(named)):
        translate(pattern)
