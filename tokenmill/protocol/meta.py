"""The hash `meta`: settings of a queue, written by its operator and its workers.

    Meta.of(client.hgetall(keys.meta)) -> Meta(paused=…, problems=("unknown field `max_dept`; did you mean …",))

A flag is on as `1`, `true`, `yes` or `on`, off as `0`, `false`, `no` or `off`, in any case. Misspelt fields and values
have no effect; `problems` lists them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import redis

from tokenmill.protocol.errors import clean
from tokenmill.protocol.keys import Keys

ON: Final = ("1", "true", "yes", "on")
OFF: Final = ("0", "false", "no", "off")
FLAGS: Final = ("paused",)
PUBLISHED: Final = ("lease_ms", "result_ttl_seconds", "stream_ttl_seconds")
"""Fields that workers write: the names of their settings."""
NUMBERS: Final = ("max_depth", "max_per_tenant", "max_running_per_tenant", *PUBLISHED)
SHOWN: Final = 5
"""Maximum number of problems that are listed; a foreign hash may have any number of fields."""
_WHOLE = re.compile(r"\s*[0-9]{1,15}\s*")


def is_on(value: bytes | str | None) -> bool:
    """Return whether a flag of `meta` is on."""
    return value is not None and _text(value).strip().lower() in ON


def whole(value: bytes | str | None) -> int | None:
    """Read a number of `meta`; None if it is absent or not a whole number."""
    if value is None or not _WHOLE.fullmatch(_text(value)):
        return None
    return int(value)


@dataclass(frozen=True, slots=True)
class Meta:
    """The checked content of the hash."""

    paused: bool = False
    """Whether workers read no entries."""
    problems: tuple[str, ...] = ()
    """Fields and values that have no effect, each as a message for the operator."""

    @classmethod
    def of(cls, raw: Mapping[bytes, bytes]) -> Self:
        """Check the hash's fields."""
        found = [_problem(_text(name), _text(value)) for name, value in sorted(raw.items())]
        problems = [problem for problem in found if problem is not None]
        if len(problems) > SHOWN:
            problems[SHOWN:] = [f"and {len(problems) - SHOWN} more"]
        return cls(is_on(raw.get(b"paused")), tuple(problems))


def paused(client: redis.Redis, keys: Keys) -> bool:
    """Ask Redis whether the queue is paused. Reads that field only: clients may read no other field."""
    reply: Any = client.hmget(keys.meta, ["paused"])
    return is_on(reply[0])


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8", "replace")


def _problem(name: str, value: str) -> str | None:
    shown = clean(value, 64)
    if name in FLAGS:
        known = value.strip().lower() in (*ON, *OFF)
        return None if known else f"{name} is {shown!r}: write 1 or 0"
    if name in NUMBERS:
        return None if _WHOLE.fullmatch(value) else f"{name} is {shown!r}: write a whole number"
    close = difflib.get_close_matches(name.lower(), (*FLAGS, *NUMBERS), 1)
    return f"unknown field {clean(name, 64)!r}" + (f": did you mean {close[0]}?" if close else "")
