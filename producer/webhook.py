"""Posts one webhook over HTTPS, to allowed and public hosts only.

    post(settings, url, job_id, body)      # returns once the receiver has answered 2xx

The URL comes from a job, so it is not trusted: `tokenmill.protocol.callback` checks that it may be called. The host
name is resolved once, all its addresses must be public (unless the operator allowed the whole origin), and the
connection goes to one of these addresses, so that a name that changes between check and use (DNS rebinding) has no
effect. Redirects are not followed, and no proxy is used. Certificate, SNI and `Host` are those of the name.

One deadline holds for the whole exchange; an answer that is incomplete by then, or breaks off, counts as no answer.

The signature is that of https://www.standardwebhooks.com: HMAC-SHA256 over `<webhook-id>.<webhook-timestamp>.<body>`.
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
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO, Final, Self

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from tokenmill.protocol.callback import AllowList, CallbackError, Target

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ALSO_INSIDE = [ipaddress.ip_network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20")]
"""Special-purpose networks in IANA's registries that some of the supported Python versions count as global."""
GONE: Final = 410
"""Status code of a receiver that wants no more webhooks."""
_PLACEHOLDERS: Final = ("<", ">", "...", "change-me", "changeme", "change_me", "your-secret", "placeholder")
"""Parts of a secret that show that it was copied from a page of documentation."""
SCHEDULE_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Pauses between tries in the Standard Webhooks specification: the tenth try is three days after the first."""
LONGEST_PAUSE_S: Final = 86_400.0
"""Longest pause, whatever the `Retry-After` of a receiver asks for."""
READ_BYTES: Final = 65536
"""Maximum number of bytes read of an answer's body, to check that it is complete; a longer body is not read to its
end."""

_STEPS: Final = 20
"""Maximum number of times that a pause is tripled: it exceeds `LONGEST_PAUSE_S` by then, and must not overflow."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(Exception):
    """A webhook must not be delivered; a retry would not help."""


class Undelivered(Exception):
    """The receiver did not take a webhook; a later try may succeed.

    Args:
        silent: the host did not answer at all, so that further webhooks to the same host need not be tried now.
        retry_after_s: seconds that the receiver asked to wait before the next try, at most `LONGEST_PAUSE_S`.
    """

    def __init__(self, reason: str, silent: bool = False, retry_after_s: float = 0.0) -> None:
        self.silent = silent
        self.retry_after_s = retry_after_s
        super().__init__(reason)


@dataclass(frozen=True)
class WebhookSettings:
    """Settings of webhooks from the clerk's environment; docs/reference.md explains each variable.

    Raises:
        ValueError: a value is wrong; the message begins with the variable's name.
    """

    hosts: frozenset[str] = frozenset()
    """Entries of the list of allowed hosts, see `AllowList`."""
    secrets: tuple[bytes, ...] = ()
    """Signing keys. Each adds a signature, so that a receiver can move from one key to the next."""
    ca_file: str | None = None
    max_attempts: int = 10
    backoff_s: float | None = None
    """Pause before the second try; three times as long before each further try, at most a day; None: `SCHEDULE_S`."""
    timeout_s: float = 15.0
    """Time limit of the whole call, from the look-up of the name to the end of the answer."""
    lease_s: float = 60.0
    """Seconds after which another clerk takes over a call that a clerk has begun and not ended."""
    dangerously_allow_http: bool = False
    dangerously_allow_private: bool = False
    allowed: AllowList = field(init=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "allowed", AllowList.of(self.hosts))
        except ValueError as error:
            raise ValueError(f"TOKENMILL_CALLBACK_HOSTS: {error}") from None
        if self.lease_s < 2 * self.timeout_s:
            raise ValueError(
                "TOKENMILL_CALLBACK_LEASE_SECONDS: must be at least twice TOKENMILL_CALLBACK_TIMEOUT_SECONDS"
            )
        if self.max_attempts < 1:
            raise ValueError("TOKENMILL_CALLBACK_MAX_ATTEMPTS: must be at least 1")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings from environment variables, not from arguments: a queued job must not choose its own."""
        hosts = environ.get("TOKENMILL_CALLBACK_HOSTS", "").split(",")
        return cls(
            hosts=frozenset(host.strip().lower() for host in hosts if host.strip()),
            secrets=tuple(_secret(word) for word in environ.get("TOKENMILL_CALLBACK_SECRET", "").split()),
            ca_file=_authority(environ, "TOKENMILL_CALLBACK_CA_FILE"),
            max_attempts=_whole(environ, "TOKENMILL_CALLBACK_MAX_ATTEMPTS", cls.max_attempts),
            backoff_s=_number(environ, "TOKENMILL_CALLBACK_BACKOFF_SECONDS", 0.0) or None,
            timeout_s=_number(environ, "TOKENMILL_CALLBACK_TIMEOUT_SECONDS", cls.timeout_s),
            lease_s=_number(environ, "TOKENMILL_CALLBACK_LEASE_SECONDS", cls.lease_s),
            dangerously_allow_http=_switch(environ, "TOKENMILL_DANGEROUSLY_ALLOW_HTTP_CALLBACKS"),
            dangerously_allow_private=_switch(environ, "TOKENMILL_DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS"),
        )

    def pause_s(self, attempts: int) -> float:
        """Return the pause in seconds after `attempts` tries."""
        if self.backoff_s is None:
            return SCHEDULE_S[min(attempts, len(SCHEDULE_S)) - 1]
        return min(LONGEST_PAUSE_S, self.backoff_s * 3.0 ** min(attempts - 1, _STEPS))

    def target(self, url: str) -> Target:
        """Parse and check a URL.

        Raises:
            Refused: the URL may not be called.
        """
        try:
            return self.allowed.check(url, any_scheme=self.dangerously_allow_http)
        except CallbackError as error:
            raise Refused(str(error)) from None

    def check_complete(self) -> None:
        """Check that no setting is missing that a delivery needs.

        Raises:
            ValueError: a setting is missing; the message begins with the variable's name.
        """
        if not self.hosts:
            raise ValueError("TOKENMILL_CALLBACK_HOSTS: not set, and a callback waits; set it to deliver callbacks")
        if not self.secrets:
            raise ValueError("TOKENMILL_CALLBACK_SECRET: not set, and a callback waits; set it to deliver callbacks")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    if not environ.get(name):
        return default
    try:
        value = float(environ[name])
    except ValueError:
        raise ValueError(f"{name}: not a number") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be a finite number above 0")
    return value


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9):
        raise ValueError(f"{name}: must be a whole number of at least 1")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}: must be 1 or 0")
    return text == "1"


def _authority(environ: Mapping[str, str], name: str) -> str | None:
    """Return the path of a file of certificates; read it first, so that an unreadable file is reported at the start."""
    path = environ.get(name)
    if not path:
        return None
    try:
        ssl.create_default_context().load_verify_locations(path)
    except (OSError, ValueError) as error:  # an `SSLError` is an `OSError`
        raise ValueError(f"{name}: {path} is not readable as certificates in PEM: {error}") from None
    return path


def _secret(word: str) -> bytes:
    plain = word.removeprefix("whsec_").lower()
    if not plain or not word.isascii() or any(mark in plain for mark in _PLACEHOLDERS):
        raise ValueError(
            "TOKENMILL_CALLBACK_SECRET: is a placeholder; put whsec_ and the base64 of 32 random bytes there"
        )
    if not word.startswith("whsec_"):
        return word.encode()
    try:
        return base64.b64decode(word.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise ValueError("TOKENMILL_CALLBACK_SECRET: what follows whsec_ is not base64") from None


def is_public(address: str) -> bool:
    """Return whether an IP address is public.

    False for private, loopback, link-local, shared (CGNAT), multicast and reserved addresses, and for IPv6 addresses
    that contain such an IPv4 address (mapped, 6to4, Teredo, NAT64).
    """
    return all(
        ip.is_global and not ip.is_multicast and not ip.is_reserved and not any(ip in net for net in _ALSO_INSIDE)
        for ip in _inside(address)
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


def resolve(settings: WebhookSettings, target: Target) -> list[str]:
    """Return the IP addresses of a host.

    Raises:
        Refused: an address is not public.
        Undelivered: the host has no address.
    """
    host, port = target.url.host, target.url.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Undelivered(f"{host}: {error}", silent=True) from None
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    for address in addresses:
        if not (target.may_be_private or settings.dangerously_allow_private or is_public(address)):
            raise Refused(f"{host} has the address {address}, which is not public")
    return addresses


class _Lines:
    """A stream that remembers the last line that was read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._stream.readline(limit)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _WholeResponse(HTTPResponse):
    """A response that checks that its headers are complete.

    `http.client` takes a connection that ends within the headers for the end of the headers.
    """

    def begin(self) -> None:
        self.fp: Any = _Lines(self.fp)
        lines = self.fp
        super().begin()
        if lines.last not in (b"\r\n", b"\n"):
            raise HTTPException("the answer ended within its headers")


class _PinnedHttp(HTTPConnection):
    """An HTTP connection over a socket that is already connected."""

    pinned: socket.socket
    response_class = _WholeResponse

    def _new_conn(self) -> socket.socket:
        return self.pinned


class _PinnedHttps(HTTPSConnection):
    """An HTTPS connection over a connected socket; the certificate is checked against the host's name."""

    pinned: socket.socket
    response_class = _WholeResponse

    def _new_conn(self) -> socket.socket:
        return self.pinned


def _connect(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """Connect to the first address that accepts; all addresses must have been checked."""
    share, failure = timeout / len(addresses), OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), share)
        except OSError as error:
            failure = error
    raise failure


@contextmanager
def _cut_off(connected: socket.socket, seconds: float) -> Iterator[threading.Event]:
    """Shut a connection down after `seconds`, and set the yielded event.

    Time-outs of single reads would not end an answer that comes byte by byte.
    """
    # On a duplicate of the descriptor, since TLS takes the original over.
    with connected.dup() as line:
        over = threading.Event()

        def cut() -> None:
            over.set()
            with suppress(OSError):  # the peer has closed the connection
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(0.0, seconds), cut)
        timer.start()
        try:
            yield over
        finally:
            timer.cancel()
            timer.join()


def webhook_id(job_id: str) -> str:
    """Return the value of `webhook-id`: the job's id with each dot as a tilde, since dots separate the signed parts."""
    return job_id.replace(".", "~")


def signature(settings: WebhookSettings, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: one `v1,<base64>` for each secret."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in settings.secrets)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def post(settings: WebhookSettings, url: str, job_id: str, body: bytes) -> None:
    """Post `body` to `url`; return once the receiver has answered 2xx.

    Raises:
        Refused: the webhook must not be delivered, or the receiver wants no more webhooks (410).
        Undelivered: the receiver did not take the webhook this time.
    """
    target = settings.target(url)
    host, end = target.url.host, time.monotonic() + settings.timeout_s
    addresses = resolve(settings, target)
    message_id, timestamp = webhook_id(job_id), int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": "tokenmill",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(settings, message_id, timestamp, body),
    }
    late = Undelivered(f"{host} did not answer in full within {settings.timeout_s:g} s", silent=True)
    if time.monotonic() >= end:
        raise late
    over = threading.Event()
    try:
        connected = _connect(addresses, target.url.port, end - time.monotonic())
        with connected, _cut_off(connected, end - time.monotonic()) as over:
            status, wait_s = _exchange(settings, target, connected, headers, body)
    except (OSError, HTTPError, HTTPException) as error:
        raise late if over.is_set() else Undelivered(f"{host}: {error}", silent=True) from error
    if over.is_set():
        raise late
    if status == GONE:
        raise Refused(f"{host} answered {status}")
    if not 200 <= status < 300:
        raise Undelivered(f"{host} answered {status}", retry_after_s=wait_s)


def _exchange(
    settings: WebhookSettings, target: Target, connected: socket.socket, headers: Mapping[str, str], body: bytes
) -> tuple[int, float]:
    """Send the request and read the answer to its end; return its status and its `Retry-After` in seconds."""
    url = target.url
    connection: _PinnedHttp | _PinnedHttps
    if url.scheme == "http":
        connection = _PinnedHttp(url.host, url.port, timeout=settings.timeout_s)
    else:
        context = ssl.create_default_context()
        if settings.ca_file is not None:
            context.load_verify_locations(settings.ca_file)
        connection = _PinnedHttps(url.host, url.port, timeout=settings.timeout_s, ssl_context=context)
    connection.pinned = connected
    try:
        connection.request("POST", url.path, body=body, headers=headers, preload_content=False, decode_content=False)
        answer = connection.getresponse()
        left = READ_BYTES
        while left > 0 and (piece := answer.read(left, decode_content=False)):
            left -= len(piece)
        return answer.status, retry_after_s(answer.headers.get("retry-after"))
    finally:
        connection.close()


def retry_after_s(value: str | None) -> float:
    """Return the seconds that a `Retry-After` asks for, at most `LONGEST_PAUSE_S`; 0 if it is absent or malformed."""
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        return min(LONGEST_PAUSE_S, float(text[:12])) if len(text) <= 12 else LONGEST_PAUSE_S
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(LONGEST_PAUSE_S, max(0.0, seconds))
