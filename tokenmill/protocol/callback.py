"""Callback URLs: which ones are well formed, and which ones may be called. The one check of producer, worker and clerk.

    parse_callback(url) -> CallbackUrl                     # raises CallbackError: not a URL that anybody would call
    AllowList.of(["hooks.example.org", "http://collector.internal:8080"]).check(url) -> Target    # raises CallbackError

A job names the URL, so nothing in it is trusted, and what two parsers could read differently is refused.
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
"""Printable ASCII but the space and the backslash, which some parsers take for a slash."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?P<port>:[0-9]*)?")
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


class CallbackError(ValueError):
    """A URL that is not called; the message says why, and reads on from `callback: `."""


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """A URL taken apart."""

    scheme: str
    host: str
    """In lower case, without a trailing dot; an IP address in its canonical form, without brackets."""
    port: int
    path: str
    """Path and query, as they go into the request; a fragment does not."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be called; nothing is resolved yet."""

    url: CallbackUrl
    may_be_private: bool
    """Whether the host's addresses may be loopback or private ones."""


def parse_callback(url: str) -> CallbackUrl:
    """Take a URL apart.

    Raises:
        CallbackError: it is no http or https URL, or could be read in more than one way.
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
    """Host, in its normal form, and port of `host[:port]`."""
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
    """None: any."""
    is_origin: bool
    """Written with its scheme: exactly that origin, which may be a private address."""

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

    An entry `host` or `host:port` allows https to it, on any port or that one, where its addresses are public. An
    entry with a scheme, such as `http://collector.internal:8080`, allows that origin alone, wherever it is.
    """

    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Read the entries.

        Raises:
            ValueError: one of them makes no sense; the message shows it.
        """
        return cls(tuple(_Entry.of(text) for text in texts))

    def check(self, url: str, any_scheme: bool = False) -> Target:
        """Take a URL apart that may be called.

        Args:
            any_scheme: whether entries without a scheme allow http, too.

        Raises:
            CallbackError: it may not.
        """
        parsed = parse_callback(url)
        found = [entry for entry in self.entries if entry.allows(parsed, any_scheme)]
        if not found:
            raise CallbackError(
                "must be an https URL whose host is in --callback-hosts (TOKENMILL_CALLBACK_HOSTS), or an origin that "
                "is listed there"
            )
        return Target(parsed, any(entry.is_origin for entry in found))
