"""What nobody else cleans up in a queue.

    clean_up(client, keys) -> {"consumers": …, "groups": …, "jobs": …}

Consumers that dead workers left behind, groups of jobs that will never be complete, and jobs whose entry somebody
deleted. A consumer that holds entries is never deleted: its entries would be lost with it.
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
"""A consumer that did nothing for so long and holds nothing is gone. One that comes back is created again by its
read."""


RECONCILED: Final = 1000
"""Jobs whose entries are looked for in one call; workers do so all the time, a few a second."""


def clean_up(client: redis.Redis, keys: Keys, idle_s: float = IDLE_S) -> dict[str, int]:
    """Clean up once; returns what was removed, given a time to live or ended. Safe beside workers, clerks and other
    janitors."""
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
                # The script looks at what is pending again: it may have read meanwhile.
                removed += runner.run(*remove_consumer_call(stream, group, consumer["name"]))
    return removed


def _groups(client: redis.Redis, keys: Keys) -> int:
    """Give groups that nothing will finish the life of a finished one.

    Where something waits, runs or is delayed it may belong to a group that looks abandoned, so that nothing is done
    then. An enqueue into such a group makes it permanent again.
    """
    if any(client.xlen(lane) for lane in keys.lanes) or client.zcard(keys.delayed):
        return 0
    ending, life = 0, whole(client.hmget(keys.meta, ["result_ttl_seconds"])[0]) or RESULT_TTL_S
    for pattern in (keys.group("*"), keys.group_out("*")):
        for key in client.scan_iter(match=pattern, count=1000):
            ending += client.expire(key, life, nx=True)
    return ending
