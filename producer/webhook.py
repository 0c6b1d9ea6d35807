"""One webhook: an HTTPS POST that reaches only who may be reached.

    post(settings, url, job_id, body)      # returns once the receiver has answered 2xx

A job names the URL, so it is not trusted. The scheme is HTTPS and the host is on a list; the name is resolved once,
all its addresses must be public, and the connection goes to one of these, so that a name that changes between check
and use (DNS rebinding) gains nothing. No redirect is followed and no proxy used. Certificate, SNI and Host are the
name's.

Signed as https://www.standardwebhooks.com says: HMAC-SHA256 over `<webhook-id>.<webhook-timestamp>.<body>`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Final, Self
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

HTTPS_ONLY = frozenset({"https"})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ALSO_INSIDE = [ipaddress.ip_network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20")]
"""Special by IANA's registries, and global to some of the Python versions that we run on."""
GONE: Final = 410

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(Exception):
    """This URL is never called: trying again would not help."""


class Undelivered(Exception):
    """The receiver did not take it; a later try may do.

    Args:
        silent: it did not answer at all, so that others for the same host need not be tried now.
    """

    def __init__(self, reason: str, silent: bool = False) -> None:
        self.silent = silent
        super().__init__(reason)


@dataclass(frozen=True)
class WebhookSettings:
    """What the clerk's environment says; see docs/operations.md.

    Raises:
        ValueError: a value makes no sense; the message begins with the variable.
    """

    hosts: frozenset[str] = frozenset()
    secrets: tuple[bytes, ...] = ()
    """Signing keys; each signs, so that a receiver can move from one to the next."""
    ca_file: str | None = None
    max_attempts: int = 10
    backoff_s: float = 5.0
    """Before the second try; three times as long before each further one, an hour at most."""
    timeout_s: float = 15.0
    """For the whole call, from the connection to the answer's status."""
    lease_s: float = 60.0
    """A call that a clerk began and did not end is another's after so long."""
    dangerously_allow_http: bool = False
    dangerously_allow_private: bool = False

    def __post_init__(self) -> None:
        if self.lease_s < 2 * self.timeout_s:
            raise ValueError("TOKENMILL_CALLBACK_LEASE_SECONDS: must be at least twice the time-out")
        if self.max_attempts < 1:
            raise ValueError("TOKENMILL_CALLBACK_MAX_ATTEMPTS: must be at least 1")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment. Security is set there, never by arguments of a queued job."""
        hosts = environ.get("TOKENMILL_CALLBACK_HOSTS", "").split(",")
        return cls(
            hosts=frozenset(host.strip().lower() for host in hosts if host.strip()),
            secrets=tuple(_secret(word) for word in environ.get("TOKENMILL_CALLBACK_SECRET", "").split()),
            ca_file=environ.get("TOKENMILL_CALLBACK_CA_FILE") or None,
            max_attempts=round(_number(environ, "TOKENMILL_CALLBACK_MAX_ATTEMPTS", cls.max_attempts)),
            backoff_s=_number(environ, "TOKENMILL_CALLBACK_BACKOFF_SECONDS", cls.backoff_s),
            timeout_s=_number(environ, "TOKENMILL_CALLBACK_TIMEOUT_SECONDS", cls.timeout_s),
            lease_s=_number(environ, "TOKENMILL_CALLBACK_LEASE_SECONDS", cls.lease_s),
            dangerously_allow_http=environ.get("TOKENMILL_DANGEROUSLY_ALLOW_HTTP_CALLBACKS") == "1",
            dangerously_allow_private=environ.get("TOKENMILL_DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS") == "1",
        )

    def check_complete(self) -> None:
        """Raises ValueError where a callback could not be delivered for lack of a setting."""
        if not self.hosts:
            raise ValueError("TOKENMILL_CALLBACK_HOSTS: not set, and a callback waits")
        if not self.secrets:
            raise ValueError("TOKENMILL_CALLBACK_SECRET: not set, and a callback waits")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ.get(name) or default)
    except ValueError:
        raise ValueError(f"{name}: not a number") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be above 0")
    return value


def _secret(word: str) -> bytes:
    if not word.startswith("whsec_"):
        return word.encode()
    try:
        return base64.b64decode(word.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise ValueError("TOKENMILL_CALLBACK_SECRET: what follows whsec_ is not base64") from None


def is_public(address: str) -> bool:
    """False for private, loopback, link-local, shared (CGNAT), multicast and reserved addresses, and for those of
    IPv6 that carry such a one of IPv4 (mapped, 6to4, Teredo, NAT64)."""
    return all(
        one.is_global and not one.is_multicast and not one.is_reserved and not any(one in net for net in _ALSO_INSIDE)
        for one in _inside(address)
    )


def _inside(address: str) -> Iterator[Address]:
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        yield ip
        return
    if ip.ipv4_mapped is not None:
        yield ip.ipv4_mapped
        return
    if ip in _NAT64:
        yield ipaddress.IPv4Address(ip.packed[-4:])
        return
    if ip.sixtofour is not None:
        yield ip.sixtofour
    if ip.teredo is not None:
        yield from ip.teredo
    yield ip


@dataclass(frozen=True)
class Target:
    """A URL whose host may be called; nothing is resolved yet."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, settings: WebhookSettings, url: str) -> Self:
        """Take a URL apart, once for all who use it.

        Raises:
            Refused: it is not one that may be called.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise Refused("not a URL") from None
        allowed = HTTPS_ONLY | {"http"} if settings.dangerously_allow_http else HTTPS_ONLY
        if parts.scheme not in allowed:
            raise Refused("the scheme is not https")
        if parts.username is not None or parts.password is not None:
            raise Refused("the URL names a user")
        if not host or host not in settings.hosts:
            raise Refused("the host is not on the list of TOKENMILL_CALLBACK_HOSTS")
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise Refused("the URL holds characters that it must not")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)


def resolve(settings: WebhookSettings, target: Target) -> list[str]:
    """The addresses of a host.

    Raises:
        Refused: one of them is not public.
        Undelivered: there is none.
    """
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Undelivered(f"{target.host}: {error}", silent=True) from None
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    for address in addresses:
        if not settings.dangerously_allow_private and not is_public(address):
            raise Refused(f"{target.host} has the address {address}, which is not public")
    return addresses


class _PinnedHttp(HTTPConnection):
    """Speaks over a socket that is connected already."""

    pinned: socket.socket

    def _new_conn(self) -> socket.socket:
        return self.pinned


class _PinnedHttps(HTTPSConnection):
    """The same; the certificate is checked for the host's name."""

    pinned: socket.socket

    def _new_conn(self) -> socket.socket:
        return self.pinned


def _connect(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """To the first that takes the connection; all of them have been checked."""
    share, failure = timeout / len(addresses), OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), share)
        except OSError as error:
            failure = error
    raise failure


@contextmanager
def _cut_off(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Shut a connection down after `seconds`: time-outs of single reads do not end one that drips."""
    # A duplicate, since TLS takes the descriptor over.
    with connected.dup() as line:

        def cut() -> None:
            with suppress(OSError):  # closed by its peer
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def signature(settings: WebhookSettings, job_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one `v1,<base64>` for each secret."""
    signed = f"{job_id}.{timestamp}.".encode() + body
    digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in settings.secrets)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def post(settings: WebhookSettings, url: str, job_id: str, body: bytes) -> None:
    """Deliver `body`.

    Raises:
        Refused: it must not be delivered, or the receiver wants no more (410).
        Undelivered: it was not taken, this time.
    """
    target = Target.of(settings, url)
    end = time.monotonic() + settings.timeout_s
    addresses = resolve(settings, target)
    timestamp = int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": "tokenmill",
        "webhook-id": job_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(settings, job_id, timestamp, body),
    }
    try:
        left = max(0.1, end - time.monotonic())
        with _connect(addresses, target.port, left) as connected, _cut_off(connected, left):
            status = _status(settings, target, connected, headers, body)
    except (OSError, HTTPError, HTTPException) as error:
        raise Undelivered(f"{target.host}: {error}", silent=True) from error
    if status == GONE:
        raise Refused(f"{target.host} answered {status}")
    if not 200 <= status < 300:
        raise Undelivered(f"{target.host} answered {status}")


def _status(
    settings: WebhookSettings, target: Target, connected: socket.socket, headers: Mapping[str, str], body: bytes
) -> int:
    connection: _PinnedHttp | _PinnedHttps
    if target.scheme == "http":
        connection = _PinnedHttp(target.host, target.port, timeout=settings.timeout_s)
    else:
        context = ssl.create_default_context()
        if settings.ca_file is not None:
            context.load_verify_locations(settings.ca_file)
        connection = _PinnedHttps(target.host, target.port, timeout=settings.timeout_s, ssl_context=context)
    connection.pinned = connected
    try:
        connection.request("POST", target.path, body=body, headers=headers, preload_content=False)
        return connection.getresponse().status
    finally:
        connection.close()
