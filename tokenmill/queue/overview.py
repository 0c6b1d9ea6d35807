"""A queue at a glance: its numbers of jobs, the operator's settings, and the workers that serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from tokenmill.protocol.keys import LANES, Keys
from tokenmill.protocol.meta import Meta
from tokenmill.queue.workers import WorkerInfo, read_workers


@dataclass(frozen=True, slots=True)
class Overview:
    """A queue at one moment."""

    lanes: Mapping[str, int]
    """Jobs in each lane (`high`, `normal`, `low`), waiting and running together."""
    delayed: int
    """Jobs that have not joined their lane yet."""
    dead: int
    """Dead letters that Redis keeps."""
    meta: Meta
    workers: tuple[WorkerInfo, ...]


def read_overview(client: redis.Redis, keys: Keys) -> Overview:
    """Read the numbers and settings of a queue in one round trip, then its workers.

    Raises:
        redis.RedisError: Redis is away, or refuses a command.
    """
    pipe = client.pipeline(transaction=False)
    for lane in keys.lanes:
        pipe.xlen(lane)
    pipe.zcard(keys.delayed)
    pipe.xlen(keys.dead)
    pipe.hgetall(keys.meta)
    workers = read_workers(client, keys)
    *depths, delayed, dead, meta = pipe.execute()
    return Overview(dict(zip(LANES, depths, strict=True)), delayed, dead, Meta.of(meta), workers)
