"""A worker's first calls of Redis: check that the queue fits before the model is loaded, then join the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
import structlog

from tokenmill.protocol.connection import redact
from tokenmill.protocol.errors import clean
from tokenmill.protocol.faults import refused
from tokenmill.protocol.meta import whole
from tokenmill.protocol.scripts import Scripts
from worker.ops.exits import Exit
from worker.ops.links import passing
from worker.ops.threads import Fatal
from worker.queue.keeper import Keeper
from worker.settings import Settings

log = structlog.get_logger()


class Startup:
    """Both steps return False if Redis cannot be reached now, and raise `Fatal` if another try would not help."""

    def __init__(self, settings: Settings, scripts: Scripts) -> None:
        """Make no call yet. `scripts`: over a client that does not retry."""
        self._settings = settings
        self._scripts = scripts

    def check(self) -> bool:
        """Check that Redis accepts the credentials, and that the queue has no lease yet or this worker's.

        Writes no setting of the queue: whether this worker will ever serve is not known before its model is loaded.
        """
        return self._ask(self._check)

    def join(self, keeper: Keeper) -> bool:
        """Check the queue again, set its lease if it has none, publish the settings, and write `worker:<name>`."""

        def join() -> None:
            self._scripts.client.hsetnx(self._scripts.keys.meta, "lease_ms", str(self._settings.lease_ms))
            self._check()
            self._scripts.ensure_consumer()
            self._scripts.client.hset(self._scripts.keys.meta, mapping=self._settings.published)
            keeper.sync_clock()
            keeper.show()

        return self._ask(join)

    def _ask(self, question: Callable[[], None]) -> bool:
        try:
            question()
        except redis.RedisError as error:
            if refused(error):
                raise Fatal.refused(error) from error
            if not passing(error):
                raise Fatal(Exit.REFUSED, f"the queue cannot be used: {error}") from error
            log.warning("redis_unreachable", redis=redact(self._settings.redis), message=str(error))
            return False
        return True

    def _check(self) -> None:
        """Raise `Fatal` if the queue has another lease: with a shorter one, live workers would lose jobs."""
        scripts, ours = self._scripts, self._settings.lease_ms
        scripts.ensure_groups()
        theirs: Any = scripts.client.hget(scripts.keys.meta, "lease_ms")
        if theirs is not None and whole(theirs) != ours:
            shown = clean(theirs.decode("utf-8", "replace"), 32)
            raise Fatal(
                Exit.REFUSED,
                f"the lease_ms of queue {scripts.keys.queue} is {shown}, this worker's is {ours}: change "
                f"--lease-seconds, or with no worker running the field lease_ms of {scripts.keys.meta}",
            )
