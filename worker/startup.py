"""What a worker asks of Redis before it serves: whether the queue is for it, and with its model loaded, to join it."""

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
    """Both steps return False where Redis cannot be asked now, and raise `Fatal` where asking again would not help."""

    def __init__(self, settings: Settings, scripts: Scripts) -> None:
        """`scripts`: over a client that does not retry."""
        self._settings = settings
        self._scripts = scripts

    def check(self) -> bool:
        """Check that Redis takes our credentials and that the queue's lease, where it has one, is ours.

        Made before the model is loaded, which may take minutes; whether this worker will ever serve is not known yet.
        """
        return self._ask(self._check)

    def join(self, keeper: Keeper) -> bool:
        """Check once more, set the queue's lease where it has none, publish its settings, and show up there."""

        def join() -> None:
            self._scripts.client.hsetnx(self._scripts.keys.meta, "lease_ms", str(self._settings.lease_ms))
            self._check()
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
        """All workers of a queue agree on the lease: a shorter one would take entries that are not abandoned."""
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
