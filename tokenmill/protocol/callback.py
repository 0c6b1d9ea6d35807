"""Check callback URLs: whether they are well formed, and whether they may be called. For producer, worker and clerk.

    parse_callback(url) -> CallbackUrl                     # raises CallbackError: malformed or ambiguous
    AllowList.of(["hooks.example.org", "http://collector.internal:8080"]).check(url) -> Target    # raises CallbackError

The URL comes from a job and is not trusted: a URL that two parsers could read differently is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

LONGEST_URL: Final = 2048
PORTS: Final = {"https": 443, "http": 80}
_CHARACTERS = re.compile(r"[!-\[\]-~]+")
"""Printable ASCII without the space, and without the backslash, which some parsers read as a slash."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?P<port>:[0-9]*)?")
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


class CallbackError(ValueError):
    """A URL that must not be called. The message says why, and continues the prefix `callback: `."""


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """The parts of a callback URL."""

    scheme: str
    host: str
    """In lower case, without a trailing dot; an IP address in its canonical form, without brackets."""
    port: int
    path: str
    """Path and query of the request; a fragment is dropped."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be called; its host is not resolved yet."""

    url: CallbackUrl
    may_be_private: bool
    """Whether the host's addresses may be loopback or private addresses."""


def parse_callback(url: str) -> CallbackUrl:
    """Split a URL into its parts.

    Raises:
        CallbackError: `url` is not an http or https URL, or could be read in more than one way.
    """
    if len(url) > LONGEST_URL:
        raise CallbackError(f"the URL is longer than {LONGEST_URL} characters")
    if not _CHARACTERS.fullmatch(url):
        raise CallbackError("the URL may hold printable ASCII characters only, no blank and no backslash")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise CallbackError("not a URL") from None
    if parts.scheme not in PORTS:
        raise CallbackError("must be an https URL")
    if "@" in parts.netloc:
        raise CallbackError("the URL must not name a user")
    host, port = _authority(parts.netloc)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CallbackUrl(parts.scheme, host, PORTS[parts.scheme] if port is None else port, path)


def _authority(text: str) -> tuple[str, int | None]:
    """Split `host[:port]` into the host in its normal form, and the port."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise CallbackError("the URL names no host" if text in ("", ":") else "the URL's host is malformed")
    digits = (match["port"] or ":")[1:]
    if digits and not (len(digits) <= 5 and 1 <= int(digits) <= 65535):
        raise CallbackError("the URL's port must be from 1 to 65535")
    return _host(match["host"]), int(digits) if digits else None


def _host(text: str) -> str:
    try:
        if text.startswith("["):
            return ipaddress.IPv6Address(text[1:-1]).compressed
    except ValueError:
        raise CallbackError("the URL's host is no IPv6 address") from None
    name = text.lower().removesuffix(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise CallbackError("the URL's host is malformed")
    return name


@dataclass(frozen=True, slots=True)
class _Entry:
    scheme: str
    host: str
    port: int | None
    """None: any port."""
    is_origin: bool
    """Whether the entry was written with a scheme: it allows this origin only, which may be a private address."""

    @classmethod
    def of(cls, text: str) -> Self:
        try:
            if "://" in text:
                url = parse_callback(text)
                if url.path != "/" or "#" in text:
                    raise CallbackError("an entry has no path")
                return cls(url.scheme, url.host, url.port, True)
            host, port = _authority(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
        except CallbackError as error:
            raise ValueError(
                f"{text!r} is not an entry such as hooks.example.org, hooks.example.org:8443 or "
                f"http://collector.internal:8080 ({error})"
            ) from None
        return cls("https", host, port, False)

    def allows(self, url: CallbackUrl, any_scheme: bool) -> bool:
        same_scheme = url.scheme == self.scheme or (any_scheme and not self.is_origin)
        return same_scheme and url.host == self.host and self.port in (None, url.port)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The URLs that an operator lets jobs name.

    An entry `host` or `host:port` allows https to that host, on any port or on that port, if its addresses are public.
    An entry with a scheme, such as `http://collector.internal:8080`, allows only that origin, whatever its addresses.
    """

    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Parse the entries.

        Raises:
            ValueError: an entry is malformed; the message shows it.
        """
        return cls(tuple(_Entry.of(text) for text in texts))

    def check(self, url: str, any_scheme: bool = False) -> Target:
        """Check that a URL may be called, and return its parts.

        Args:
            any_scheme: whether entries without a scheme allow http, too.

        Raises:
            CallbackError: the URL is malformed, or no entry allows it.
        """
        parsed = parse_callback(url)
        found = [entry for entry in self.entries if entry.allows(parsed, any_scheme)]
        if not found:
            raise CallbackError(
                "must be an https URL whose host is in --callback-hosts (TOKENMILL_CALLBACK_HOSTS), or an origin that "
                "is listed there"
            )
        return Target(parsed, any(entry.is_origin for entry in found))
