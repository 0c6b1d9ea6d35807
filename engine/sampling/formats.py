"""Patterns of the JSON schema `format`s that structured output supports.

Each pattern matches valid values only. Some leave out unusual spellings that are valid, too: lower-case `t` and `z` in
times, leap seconds at an offset, quoted local parts of addresses, `xn--` labels.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
"""Two digits of a number above 0 that is a multiple of 4."""
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    rf"|23:59:60{_FRACTION}(?:Z|[+-]00:00))"
)
_N = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:{_N}W|{_DURATION_TIME}|(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)(?:{_DURATION_TIME})?)"

_ALNUM = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
_LABEL = (
    f"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}{_ALNUM}{_INNER}{{0,59}}{_ALNUM}"
    f"|{_INNER}-{_ALNUM}(?:{_INNER}{{0,58}}{_ALNUM})?)?"
)
"""Label of a host name: up to 63 characters, no hyphen at either end, nor in both third and fourth place (RFC 5891)."""
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL_PART = rf"{_ATOM}(?:\.{_ATOM})*"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_LAST_32 = f"(?:{_HEX}:{_HEX}|{_IPV4})"


def _ipv6() -> str:
    """Return the nine forms of RFC 3986, section 3.2.2: `::` stands for one or more groups, at any place."""
    forms = [f"(?:{_HEX}:){{6}}{_LAST_32}"]
    for before in range(8):
        head = f"(?:{_HEX}(?::{_HEX}){{0,{before - 1}}})?" if before else ""
        after = 7 - before  # number of groups that may follow
        tail = {2: _LAST_32, 1: _HEX, 0: ""}.get(after, f"(?:{_HEX}:){{{after - 2}}}{_LAST_32}")
        forms.append(f"{head}::{tail}")
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()

_UNRESERVED = "A-Za-z0-9._~!$&'()*+,;=-"
"""Unreserved characters and sub-delimiters of RFC 3986, for a class (the hyphen is last)."""
_ESCAPED = "%[0-9A-Fa-f]{2}"
_PCHAR = f"(?:[:@{_UNRESERVED}]|{_ESCAPED})"
_AUTHORITY = rf"(?:(?:[:{_UNRESERVED}]|{_ESCAPED})*@)?(?:\[{_IPV6}\]|(?:[{_UNRESERVED}]|{_ESCAPED})*)(?::[0-9]{{0,5}})?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
    rf"(?:\?(?:[/?]|{_PCHAR})*)?(?:#(?:[/?]|{_PCHAR})*)?"
)

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": f"{_LOCAL_PART}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
"""Format → pattern of the whole string. Sources: RFC 3339 with its appendix A, 1123, 5321, 3986, 9562."""

LENGTHS: dict[str, int] = {"hostname": 253, "email": 254}
"""Format → maximum number of characters of a value."""
