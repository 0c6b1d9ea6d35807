"""Removes the leftovers of workers and clients from a queue.

    clean_up(client, keys) -> {"consumers": …, "groups": …, "jobs": …}

It removes consumers of dead workers, lets groups that will never be complete expire, and ends jobs whose entry was
deleted by hand. A consumer that holds entries is never deleted: its entries would be lost.
"""

from __future__ import annotations

from typing import Any, Final

import redis
from redis.exceptions import ResponseError

from producer.callbacks import CLERKS
from tokenmill.protocol.keys import GROUP, RESULT_TTL_S, Keys
from tokenmill.protocol.lua import Runner
from tokenmill.protocol.meta import whole
from tokenmill.protocol.scripts import Scripts
from tokenmill.protocol.worker_calls import remove_consumer_call

IDLE_S: Final = 3600.0
"""Idle time after which a consumer that holds no entry is removed. Its next read would create it again."""
RECONCILED: Final = 1000
"""Number of jobs whose entries are looked for in one call. Workers do the same all the time, a few jobs a second."""


def clean_up(client: redis.Redis, keys: Keys, idle_s: float = IDLE_S) -> dict[str, int]:
    """Clean up once; return how many consumers were removed, groups got a time to live, and jobs were ended.

    Safe beside workers, clerks and other janitors.

    Args:
        idle_s: seconds after which a consumer without entries is removed.
    """
    jobs = Scripts(client, keys).reconcile(RECONCILED)
    return {"consumers": _consumers(client, keys, idle_s), "groups": _groups(client, keys), "jobs": jobs}


def _consumers(client: redis.Redis, keys: Keys, idle_s: float) -> int:
    runner, removed = Runner(client), 0
    for stream, group in [*((lane, GROUP) for lane in keys.lanes), (keys.callbacks, CLERKS)]:
        try:
            consumers: Any = client.xinfo_consumers(stream, group)
        except ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
            continue
        for consumer in consumers:
            name = consumer["name"].decode("utf-8", "replace")
            alive = group == GROUP and client.exists(keys.worker(name))
            if consumer["idle"] >= idle_s * 1000 and consumer["pending"] == 0 and not alive:
                # The script checks the pending entries again: the consumer may have read meanwhile.
                removed += runner.run(*remove_consumer_call(stream, group, consumer["name"]))
    return removed


def _groups(client: redis.Redis, keys: Keys) -> int:
    """Give groups that will never be complete the time to live of a complete group; return the number of keys.

    Does nothing while any job waits, runs or is delayed, since it may belong to a group that looks abandoned. A later
    enqueue into such a group makes it permanent again.
    """
    if any(client.xlen(lane) for lane in keys.lanes) or client.zcard(keys.delayed):
        return 0
    ending, life = 0, whole(client.hmget(keys.meta, ["result_ttl_seconds"])[0]) or RESULT_TTL_S
    for pattern in (keys.group("*"), keys.group_out("*")):
        for key in client.scan_iter(match=pattern, count=1000):
            ending += client.expire(key, life, nx=True)
    return ending
