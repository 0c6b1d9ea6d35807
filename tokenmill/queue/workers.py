"""The workers of a queue, as each publishes itself in `worker:<name>`."""

from __future__ import annotations

import redis

from tokenmill.protocol.keys import Keys
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.workers import Roster, WorkerInfo, workers_call, workers_reply

__all__ = ["WorkerInfo", "read_workers"]


def read_workers(client: redis.Redis, keys: Keys) -> tuple[WorkerInfo, ...]:
    """Read the workers of a queue, ordered by name. Scans the keyspace if no consumer of the lanes is a live worker.

    Raises:
        redis.RedisError: Redis is away, or refuses a command.
    """
    runner = Runner(client)
    reply = runner.run(*workers_call(keys, ()))
    if not reply:
        found = list(client.scan_iter(match=keys.worker("*"), count=1000))
        reply = runner.run(*workers_call(keys, found)) if found else []
    return workers_reply(keys, reply, Roster())
