"""Callers of the gateway, and the file of API keys that names them.

Each line of the file is `<sha256 of the key> <tenant> [rpm=N] [tpm=N] [priority=low]`; `#` starts a comment. The file
has the hashes of keys only, but no message or log line quotes it: an operator may have pasted a key.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from tokenmill.protocol.keys import LANES, Priority, is_name

log = structlog.get_logger()

WATCH_SECONDS: Final = 1.0
"""Time between two looks at the file. A change is read once the file was the same at two looks."""
MAX_BYTES: Final = 16 * 1024**2
"""Maximum size of the file."""
SHOWN: Final = 16
"""Digits of a key's hash that name the key in logs and in Redis."""
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,12}")


@dataclass(frozen=True)
class Caller:
    """The sender of a request, as its API key says."""

    tenant: str | None
    """None: the gateway runs without API keys."""
    priority: Priority | None = None
    """The highest lane that the caller may use; None: any."""
    rpm: int | None = None
    """Requests a minute; None: any number."""
    tpm: int | None = None
    """Tokens a minute; None: any number."""
    key: str = ""
    """First 16 hex digits of the key's SHA-256, for logs and the rates in Redis."""

    @property
    def lane(self) -> Priority:
        """The lane of jobs that ask for none."""
        return self.priority or "normal"


class KeysError(ValueError):
    """The file of API keys cannot be used. The message names the file and the line, and quotes nothing."""


class _Entry(NamedTuple):
    digest: bytes
    caller: Caller


class _Signature(NamedTuple):
    """Differs after each change of the file."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class KeyRing:
    """The API keys of a gateway. `watch` reads the file again when it changes.

    Raises:
        KeysError: the file cannot be read, or a line is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tried, self._entries = self._read()
        self._seen = self._tried

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def shared(self) -> bool:
        """Whether the keys are of more than one tenant."""
        first = self._entries[0].caller.tenant
        return any(entry.caller.tenant != first for entry in self._entries)

    def find(self, key: bytes) -> Caller | None:
        """Return the caller that has this key; None for an unknown key.

        Compares the hash of `key` with those of all keys, each in constant time, which reveals nothing about the keys.
        """
        digest, entries = hashlib.sha256(key).digest(), self._entries
        equal = list(map(hmac.compare_digest, (entry.digest for entry in entries), repeat(digest)))
        return entries[equal.index(True)].caller if True in equal else None

    async def watch(self) -> None:
        """Look for changes of the file each second, for ever."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file if it has changed and is the same as at the last look, so that no half-written file is read.

        Where that fails, the error is logged, and the keys that were read before stay in force.
        """
        before, self._seen = self._seen, self._now()
        if self._seen == self._tried or self._seen != before:
            return
        try:
            signature, entries = self._read()
        except KeysError as error:
            log.error("api_keys_refused", message=f"{error}; the keys that were read before stay in force")
            self._tried = self._seen
            return
        if signature == self._seen:
            self._tried, self._entries = signature, entries
            log.info("api_keys_read", path=str(self.path), keys=len(entries))

    def _now(self) -> _Signature | str:
        """Return the present state of the file, or why it cannot be read."""
        try:
            return _signature(os.stat(self.path))
        except OSError as error:
            return _reason(error)

    def _read(self) -> tuple[_Signature | str, tuple[_Entry, ...]]:
        try:
            with open(self.path, "rb", opener=_open) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise KeysError(f"{self.path} is no regular file")
                data = file.read(MAX_BYTES + 1)
                after = _signature(os.fstat(file.fileno()))
        except OSError as error:
            raise KeysError(f"{self.path}: {_reason(error)}") from None
        if len(data) > MAX_BYTES:
            raise KeysError(f"{self.path} is larger than {MAX_BYTES >> 20} MiB")
        return after if after == _signature(status) else "changed while it was read", _parse(self.path, data)


def _open(path: str, flags: int) -> int:
    """Open without waiting for a writer, as a named pipe would."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _signature(status: os.stat_result) -> _Signature:
    return _Signature(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _parse(path: Path, data: bytes) -> tuple[_Entry, ...]:
    """Read the lines of the file.

    Raises:
        KeysError: a line is wrong, two lines have one hash, or no line has a key.
    """
    found: dict[bytes, _Entry] = {}
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        words = line.partition(b"#")[0].decode("ascii", "replace").split()
        if not words:
            continue
        try:
            entry = _entry(words)
            if entry.digest in found:
                raise KeysError("an earlier line has the same hash")
        except KeysError as error:
            raise KeysError(f"{path}, line {number}: {error}") from None
        found[entry.digest] = entry
    if not found:
        raise KeysError(f"{path} has no keys; write lines `<sha256 of the key> <tenant>`")
    return tuple(found.values())


def _entry(words: list[str]) -> _Entry:
    digest, tenant, *options = [*words, ""] if len(words) == 1 else words
    if not _HASH.fullmatch(digest):
        raise KeysError("the first word must be the SHA-256 of the key, 64 hexadecimal digits")
    if not is_name(tenant):
        raise KeysError("the second word must be the tenant, of [A-Za-z0-9_.-]{1,128}")
    caller = Caller(tenant, key=digest.lower()[:SHOWN])
    seen: set[str] = set()
    for option in options:
        name, _, value = option.partition("=")
        if name in seen:
            raise KeysError("an option is given twice")
        seen.add(name)
        caller = _with(caller, name, value)
    return _Entry(bytes.fromhex(digest), caller)


def _with(caller: Caller, name: str, value: str) -> Caller:
    match name:
        case "rpm" | "tpm":
            if not _NUMBER.fullmatch(value):
                raise KeysError(f"{name} must be a whole number from 1, of at most 13 digits")
            number = int(value)
            return replace(caller, rpm=number) if name == "rpm" else replace(caller, tpm=number)
        case "priority":
            for lane in LANES:
                if value == lane:
                    return replace(caller, priority=lane)
            raise KeysError(f"priority must be one of {', '.join(LANES)}")
    raise KeysError("an option must be rpm=N, tpm=N or priority=LANE")
