"""The workers of a queue, as each publishes itself in `worker:<name>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from tokenmill.protocol.keys import Keys


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker: its hash expires one lease after the worker's last sign of life."""

    name: str
    """`host:pid:random`, the worker's consumer name."""
    fields: Mapping[str, str]
    """What the worker publishes of itself; docs/protocol.md names the fields."""


def read_workers(client: redis.Redis, keys: Keys) -> tuple[WorkerInfo, ...]:
    """Read the workers of a queue, ordered by name.

    Raises:
        redis.RedisError: Redis is away, or refuses a command.
    """
    found: list[WorkerInfo] = []
    for key in sorted(client.scan_iter(match=keys.worker("*"), count=1000)):
        fields: Any = client.hgetall(key)
        name = key.decode().removeprefix(keys.worker(""))
        found.append(WorkerInfo(name, {field.decode(): value.decode() for field, value in sorted(fields.items())}))
    return tuple(found)
