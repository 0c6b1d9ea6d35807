"""Check Redis URLs. redis-py ignores some mistakes in a URL, and raises TypeErrors for others when it connects.

url = check_url(text)     # ValueError: one line that never contains what may be a password
redact(url) -> str        # for logs
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

import redis
from redis.exceptions import RedisError

SCHEMES: Final = ("redis", "rediss", "unix")
_TLS: Final = frozenset(
    {"ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname"}
    | {"ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password"}
)
_FILES: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_OPTIONS: Final = _TLS | {
    *(
        "client_name",
        "db",
        "decode_responses",
        "health_check_interval",
        "max_connections",
        "password",
        "protocol",
        "retry_on_timeout",
    ),
    *("socket_connect_timeout", "socket_keepalive", "socket_read_size", "socket_timeout", "username"),
}
"""The options that may follow the `?`. Time-outs, protocol and retries are accepted, but have no effect."""
_QUOTE: Final = "in a user's name or password, % / ? # [ ] : and @ are written as %25 %2F %3F %23 %5B %5D %3A and %40"


def check_url(text: str) -> str:
    """Return `text` without white space around it.

    Raises:
        ValueError: `text` is not a URL of Redis, or redis-py does not accept it.
    """
    url = text.strip()
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise ValueError("the URL must begin with redis://, rediss:// or unix://, such as redis://localhost:6379/0")
    try:
        url.encode()
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
    except ValueError:  # its message may contain the password
        raise ValueError(f"the URL is malformed; {_QUOTE}") from None
    if re.search(r"\s", url):
        raise ValueError("the URL must not hold white space")
    if parts.fragment or url.endswith("#"):
        raise ValueError(f"the URL must not hold a #; {_QUOTE}")
    if scheme == "unix":
        if host or parts.path in ("", "/"):
            raise ValueError(
                "the URL must have the absolute path of a socket, with three slashes: unix:///run/redis.sock"
            )
    else:
        _check_place(parts)
    _check_options(parts)
    _try(url)
    return url


def _check_place(parts: SplitResult) -> None:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or (port is None and parts.netloc.endswith(":")):
        raise ValueError(f"the URL's port must be a number from 1 to 65535; {_QUOTE}")
    if not re.fullmatch(r"/?|/[0-9]+/?", unquote(parts.path), re.ASCII):
        raise ValueError("the URL may have only the number of a database, such as /0, behind the host")


def _check_options(parts: SplitResult) -> None:
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            shown = f" {name}" if re.fullmatch("[a-z_]{1,40}", name) else ""  # other text may be part of the password
            near = get_close_matches(name, _OPTIONS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"the URL has an unknown option{shown}{hint}")
        if not value:
            raise ValueError(f"the URL's option {name} has no value")
        if name in _TLS and parts.scheme != "rediss":
            raise ValueError(f"the URL's option {name} is for TLS: rediss://")
        if name == "db" and not re.fullmatch(r"[0-9]+", value, re.ASCII):
            raise ValueError("the URL's option db must be a number, such as 0")
        if name in _FILES and not Path(value).exists():
            raise ValueError(f"the URL's option {name} names a file that is not there")


def _try(url: str) -> None:
    """Let redis-py parse the values of the options, without connecting."""
    try:
        redis.ConnectionPool.from_url(url).make_connection()
    except (RedisError, TypeError, ValueError, LookupError, AttributeError) as error:
        found = re.search(r"'(\w+)'|\"(\w+)\"", str(error))
        name = next((word for word in (found.groups() if found else ()) if word in _OPTIONS), None)
        raise ValueError("the URL has an option with a wrong value" + (f": {name}" if name else "")) from None


def redact(url: str) -> str:
    """Return `url` without its password and query."""
    try:
        parts = urlsplit(url)
        password, user = parts.password, parts.username
    except ValueError:
        return "a malformed URL"
    if password is None:
        return url.partition("?")[0]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user or ''}:***@{host}", query=""))
