"""The live workers of a queue, as each publishes itself in `worker:<name>`: the call that reads them, without I/O.

The script finds the workers as consumers of the lanes, so its cost depends on the number of workers and not on the
number of keys in Redis. Only where it finds no live worker, the keyspace is scanned now and then: a worker that may not
create its consumer becomes a consumer with the first entry that it reads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenmill.protocol.calls import Call
from tokenmill.protocol.keys import GROUP, Keys
from tokenmill.protocol.lua import encode

SCAN_S: Final = 5.0
"""Minimum number of seconds between two scans of the keyspace by one client."""
SCAN_SHARE: Final = 0.01
"""Maximum share of the time in which a client scans."""
FAILED_S: Final = 60.0
"""Seconds between a scan that failed, perhaps since it took too long, and the next one."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker: its hash expires one lease after the worker's last sign of life."""

    name: str
    """`host:pid:random`, the worker's consumer name."""
    fields: Mapping[str, str]
    """What the worker publishes of itself; docs/protocol.md names the fields."""

    @property
    def models(self) -> tuple[str, ...]:
        """The model names that the worker serves; empty while the worker loads its model."""
        return tuple(name for name in self.fields.get("model", "").split(",") if name)


class Roster:
    """The keys of workers that one client has seen: the next call names them, and then needs one round trip."""

    def __init__(self) -> None:
        self.known: tuple[bytes, ...] = ()
        self._began = self._scan_from = 0.0

    def begin_scan(self) -> bool:
        """Return whether the keyspace may be scanned now; a scan then has begun, and `end_scan` is called after it."""
        now = time.monotonic()
        if now < self._scan_from:
            return False
        self._began, self._scan_from = now, now + FAILED_S
        return True

    def end_scan(self) -> None:
        """Note that the scan has succeeded."""
        now = time.monotonic()
        self._scan_from = now + max(SCAN_S, (now - self._began) / SCAN_SHARE)


def workers_call(keys: Keys, known: Sequence[bytes]) -> Call:
    """Make the call that reads the workers which are consumers of a lane, and the hashes `known`."""
    request = encode(consumer_group=GROUP, root=keys.worker(""))
    return Call("workers", [*keys.lanes, *known], [request])


def workers_reply(keys: Keys, reply: Any, roster: Roster) -> tuple[WorkerInfo, ...]:
    """Read the reply of `workers_call`, ordered by name, and note the keys of the live workers in `roster`."""
    roster.known = tuple(key for key, _ in reply)
    root, found = keys.worker(""), []
    for key, flat in reply:
        texts = [part.decode("utf-8", "replace") for part in flat]
        fields = dict(sorted(zip(texts[::2], texts[1::2], strict=True)))
        found.append(WorkerInfo(key.decode("utf-8", "replace").removeprefix(root), fields))
    return tuple(sorted(found, key=lambda worker: worker.name))
