"""A lane entry: the flat fields around the JSON body.

    parse_entry(fields: Mapping[bytes, bytes]) -> JobEntry      # raises JobError
    identify(fields) -> Identity | None                         # never raises; also of a broken entry
    JobEntry.fields() -> dict[str, str | bytes]                 # for producers: the fields to XADD

A worker first calls `identify`; None means `no_id` (`Scripts.reject`). Then it calls `parse_entry`; a `JobError` ends
the job (`Scripts.end_all` without a fence).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenmill.protocol.callback import LONGEST_URL, CallbackError, parse_callback
from tokenmill.protocol.errors import ErrorCode, JobError, clean
from tokenmill.protocol.keys import is_name

VERSION: Final = 1
MAX_TTL_MS: Final = 10 * 365 * 86_400_000
MAX_ATTEMPTS: Final = 1000
MAX_SECONDS: Final = MAX_TTL_MS / 1000
_INTEGER = re.compile(rb"[0-9]{1,15}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")
_FIELDS = frozenset(
    {b"id", b"body", b"v", b"ttl_ms", b"stream", b"group", b"tenant", b"traceparent", b"callback", b"max_attempts"}
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of an entry that its ending needs; broken fields are None."""

    id: str
    stream: bool = True
    group: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    callback: str | None = None
    """The URL to which the result is posted, even if other fields are broken."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """A well-formed entry. The body is not parsed (see `body.parse_body`)."""

    id: str
    body: bytes
    v: int = VERSION
    ttl_ms: int | None = None
    """Budget in ms from the entry ID's own timestamp."""
    stream: bool = True
    group: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    callback: str | None = None
    """A well-formed URL; the worker checks it against its list of allowed hosts."""
    max_attempts: int | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.id, self.stream, self.group, self.tenant, self.traceparent, self.callback)

    def fields(self) -> dict[str, str | bytes]:
        """Return the fields to XADD, without those that have their default."""
        fields: dict[str, str | bytes] = {"id": self.id, "body": self.body}
        if self.ttl_ms is not None:
            fields["ttl_ms"] = str(self.ttl_ms)
        if not self.stream:
            fields["stream"] = "0"
        if self.max_attempts is not None:
            fields["max_attempts"] = str(self.max_attempts)
        for name in ("group", "tenant", "traceparent", "callback"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return fields


def milliseconds(name: str, seconds: float) -> int:
    """Convert a producer's `ttl` or `delay` (its `name`) from seconds to milliseconds.

    Raises:
        JobError: `invalid_request`: `seconds` is not a finite number, or is longer than ten years.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= MAX_SECONDS:
        raise _bad(name, f"must be a number of seconds, at most {MAX_SECONDS:.0f}")
    return round(seconds * 1000)


def is_traceparent(text: str) -> bool:
    """Return whether `text` is a W3C trace context that an entry may have."""
    return _match(_TRACEPARENT, text.encode("utf-8", "replace")) is not None


def identify(fields: Mapping[bytes, bytes]) -> Identity | None:
    """Read the identity of an entry whose other fields may be broken; None if its id is not usable."""
    job_id = _name(fields.get(b"id"))
    if job_id is None:
        return None
    return Identity(
        id=job_id,
        stream=fields.get(b"stream") != b"0",
        group=_name(fields.get(b"group")),
        tenant=_name(fields.get(b"tenant")),
        traceparent=_match(_TRACEPARENT, fields.get(b"traceparent")),
        callback=_callback(fields.get(b"callback"), lenient=True),
    )


def parse_entry(fields: Mapping[bytes, bytes]) -> JobEntry:
    """Check an entry's fields.

    Raises:
        JobError: `no_id`, `unsupported_version`, or `invalid_request` naming the field.
    """
    identity = identify(fields)
    if identity is None:
        raise JobError(ErrorCode.NO_ID, "id: must match [A-Za-z0-9_.-]{1,128}")
    version = fields.get(b"v", b"1")
    if version != b"1":
        raise JobError(ErrorCode.UNSUPPORTED_VERSION, f"v: {_show(version)} is not supported, this is version 1")
    for name in fields:
        if name not in _FIELDS:
            raise JobError(ErrorCode.INVALID_REQUEST, f"unknown field {_show(name)}")
    body = fields.get(b"body")
    if body is None:
        raise _bad("body", "is missing")
    for key, value in (("group", identity.group), ("tenant", identity.tenant)):
        if key.encode() in fields and value is None:
            raise _bad(key, "must match [A-Za-z0-9_.-]{1,128}")
    if b"traceparent" in fields and identity.traceparent is None:
        raise _bad("traceparent", "must be a W3C trace context")
    callback = _callback(fields.get(b"callback"))
    if fields.get(b"stream", b"1") not in (b"0", b"1"):
        raise _bad("stream", "must be 0 or 1")
    return JobEntry(
        id=identity.id,
        body=body,
        ttl_ms=_integer(fields, "ttl_ms", 1, MAX_TTL_MS),
        stream=identity.stream,
        group=identity.group,
        tenant=identity.tenant,
        traceparent=identity.traceparent,
        callback=callback,
        max_attempts=_integer(fields, "max_attempts", 1, MAX_ATTEMPTS),
    )


def _bad(name: str, what: str) -> JobError:
    return JobError(ErrorCode.INVALID_REQUEST, f"{name}: {what}")


def _show(raw: bytes) -> str:
    return repr(clean(raw[:80].decode("utf-8", "replace"), 64))


def _name(raw: bytes | None) -> str | None:
    if raw is None or len(raw) > 128:
        return None
    text = raw.decode("utf-8", "replace")
    return text if is_name(text) else None


def _match(pattern: re.Pattern[str], raw: bytes | None) -> str | None:
    if raw is None or len(raw) > 2048:
        return None
    text = raw.decode("utf-8", "replace")
    return text if pattern.fullmatch(text) else None


def _callback(raw: bytes | None, lenient: bool = False) -> str | None:
    if raw is None:
        return None
    url = raw[: LONGEST_URL + 1].decode("utf-8", "replace")
    try:
        parse_callback(url)
    except CallbackError as error:
        if lenient:
            return None
        raise _bad("callback", str(error)) from None
    return url


def _integer(fields: Mapping[bytes, bytes], name: str, low: int, high: int) -> int | None:
    raw = fields.get(name.encode())
    if raw is None:
        return None
    if not _INTEGER.fullmatch(raw) or not low <= int(raw) <= high:
        raise _bad(name, f"must be an integer from {low} to {high}")
    return int(raw)
