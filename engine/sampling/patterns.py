"""Rewrites the regular expressions of requests so that llguidance reads them as ECMA-262 does.

JSON schema takes its patterns from ECMA-262; llguidance compiles Rust's syntax. Where both accept a pattern but read it
differently, the Rust reading would pass texts that other validators refuse: `\\d` takes the digits of all scripts, `.`
takes carriage returns, and `&&`, `--` and `[` inside a class compute with sets.
"""

from __future__ import annotations

import re

_DIGIT = "0-9"
_WORD = "0-9A-Za-z_"
_SPACE = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_SETS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_NO_LINE_END = r"[^\n\r\u2028\u2029]"

_ESCAPE = re.compile(
    r"\\(?:(?P<set>[dDwWsS])"
    r"|(?P<plain>[tnrfvbB])"
    r"|(?P<null>0(?![0-9]))"
    r"|c(?P<control>[A-Za-z])"
    r"|(?P<code>x[0-9A-Fa-f]{2}|[ux]\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4})"
    r"|(?P<property>[pP](?:[A-Za-z]|\{[A-Za-z0-9_=: -]+\}))"
    r"|(?P<literal>[^A-Za-z0-9]))",
    re.DOTALL,
)
_REPEAT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
"""A quantifier: the number of repeats of the item before it, as many as possible or (`?`) as few as possible."""
_CLASS_SYNTAX = frozenset("[]&~^-\\")
"""Characters that may have a meaning inside a class in the syntax of Rust."""


class PatternError(ValueError):
    """A pattern is invalid, or cannot be rewritten with the same meaning; the message says why."""


def translate(pattern: str) -> str:
    """Rewrite `pattern` for llguidance: `\\d`, `\\w` and `\\b` are ASCII, `\\s` and `.` are ECMA-262's.

    Raises:
        PatternError: an escape that ECMA-262 does not know, a class without end, a repetition of a repetition, another
            flag than `i`.
    """
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            text, at = _escape(pattern, at)
            out.append(text)
        elif char == "[":
            text, at = _class(pattern, at)
            out.append(text)
        elif char == ".":
            out.append(_NO_LINE_END)
            at += 1
        elif (repeat := _REPEAT.match(pattern, at)) is not None:
            out.append(repeat[0])
            at = repeat.end()
            if (again := _REPEAT.match(pattern, at)) is not None:
                raise PatternError(f"{repeat[0]}{again[0]}: nothing to repeat")
        elif char == "(" and pattern.startswith("(?", at):
            text, at = _group(pattern, at)
            out.append(text)
        else:
            out.append(char)
            at += 1
    return "".join(out)


def exactly(text: str) -> str:
    """Write a pattern of llguidance that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _escape(pattern: str, at: int) -> tuple[str, int]:
    """Translate the escape at `at`, outside of a class; return its translation and the index after it."""
    match = _match_escape(pattern, at)
    name = match["set"]
    if name is not None:
        return f"[{'^' if name.isupper() else ''}{_SETS[name.lower()]}]", match.end()
    if match["plain"] in ("b", "B"):
        raise PatternError(f"\\{match['plain']} is not supported")
    return _character(match), match.end()


def _match_escape(pattern: str, at: int) -> re.Match[str]:
    match = _ESCAPE.match(pattern, at)
    if match is None:
        found = pattern[at : at + 2]
        if found[1:].isdigit() or found[1:] == "k":
            raise PatternError(f"{found} is a back-reference, which is not supported")
        raise PatternError(f"{found} is not an escape of ECMA-262")
    return match


def _character(match: re.Match[str]) -> str:
    """Translate an escape of a character or a Unicode property, inside or outside of a class."""
    if match["null"] is not None:
        return r"\x00"
    if match["control"] is not None:
        return f"\\x{ord(match['control']) % 32:02x}"
    if match["property"] is not None or match["code"] is not None:
        return match[0]
    if match["plain"] is not None:
        return {"v": r"\x0b", "f": r"\x0c", "b": r"\x08"}.get(match["plain"], match[0])
    return _literal(match["literal"])


def _literal(char: str) -> str:
    return f"\\{char}" if char.isascii() and not char.isalnum() and char.isprintable() and char != " " else char


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Translate the class that begins at `at`; return its translation and the index after it."""
    if pattern.startswith("[[:", at):
        raise PatternError(f"{pattern[at : at + 10]}: named classes are not supported, write [0-9] or \\d")
    begin = at
    at += 1
    negated = pattern.startswith("^", at)
    at += negated
    items: list[str] = []
    while at < len(pattern) and pattern[at] != "]":
        text, at = _class_item(pattern, at)
        items.append(text)
    if at >= len(pattern):
        raise PatternError(f"the class {pattern[begin : begin + 20]} has no end")
    if not items:
        raise PatternError(
            f"{pattern[begin : at + 1]} is read differently by different tools: write \\] for the bracket"
        )
    return f"[{'^' if negated else ''}{''.join(items)}]", at + 1


def _class_item(pattern: str, at: int) -> tuple[str, int]:
    """Translate a character, set or range of a class; return its translation and the index after it."""
    first, after, is_set = _class_atom(pattern, at)
    if not pattern.startswith("-", after) or pattern.startswith("-]", after) or after + 1 >= len(pattern):
        return first, after
    last, end, last_is_set = _class_atom(pattern, after + 1)
    if is_set or last_is_set:
        return rf"{first}\-{last}", end  # as browsers read it: no range, three items
    return f"{first}-{last}", end


def _class_atom(pattern: str, at: int) -> tuple[str, int, bool]:
    """Translate a character or set in a class; return its translation, the index after it, and whether it is a set."""
    char = pattern[at]
    if char != "\\":
        return (f"\\{char}" if char in _CLASS_SYNTAX else char), at + 1, False
    match = _match_escape(pattern, at)
    name = match["set"]
    if name is not None:
        text = _SETS[name.lower()]
        return (f"[^{text}]" if name.isupper() else text), match.end(), True
    if match["plain"] == "B":
        raise PatternError(r"\B has no meaning inside a class")
    return _character(match), match.end(), match["property"] is not None


_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_PLAIN_GROUP = re.compile(r"\(\?(?:-?i)?:|\(\?-?i\)")
"""Beginning of a group without a name, or with the flag `i`, the only flag that other tools read alike."""


def _group(pattern: str, at: int) -> tuple[str, int]:
    """Copy the beginning of a group without its name; return it and the index after it."""
    match = _PLAIN_GROUP.match(pattern, at)
    if match is not None:
        return match[0], match.end()
    match = _NAMED_GROUP.match(pattern, at)
    if match is not None:
        return "(?:", match.end()
    if re.match(r"\(\?<?[=!]", pattern[at:]):
        raise PatternError(f"look-around ({pattern[at : at + 4]}…) is not supported")
    raise PatternError(f"{pattern[at : at + 4]}… begins a group that is not supported; the only supported flag is i")
