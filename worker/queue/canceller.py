"""The cancellation thread: one MGET of the cancel keys of all held jobs, every poll."""

from __future__ import annotations

import threading
import time

import redis

from tokenmill.protocol.keys import Keys
from worker.jobs.held import Held
from worker.loop import Cancel, EngineLoop
from worker.ops.links import Contact, passing

_REASON_BYTES = 256


class Canceller:
    """Tells the engine of every held job whose cancel key exists.

    It says so again at each poll until the job has ended: a message that overtakes its job's own way into the engine
    is lost on nobody.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        held: Held,
        loop: EngineLoop,
        contact: Contact,
        stop: threading.Event,
        poll_s: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._held = held
        self._loop = loop
        self._contact = contact
        self._stop = stop
        self._poll_s = poll_s

    def run(self) -> None:
        """Poll until `stop` is set."""
        while not self._stop.wait(self._poll_s):
            try:
                self.poll()
            except redis.RedisError as error:
                if not passing(error):
                    raise
                self._contact.failed("cancel", error)

    def poll(self) -> None:
        """One look at all cancel keys."""
        jobs = self._held.all()
        if not jobs:
            return
        for job, reason in zip(jobs, self._client.mget([self._keys.cancel(job.id) for job in jobs]), strict=True):
            if reason is not None:
                job.cancel_reason = _text(reason)
                job.cancel_seen_at = job.cancel_seen_at or time.monotonic()
                self._loop.post(Cancel(job.handle))


def _text(reason: bytes | str) -> str:
    raw = reason if isinstance(reason, bytes) else reason.encode()
    return raw[:_REASON_BYTES].decode("utf-8", "replace")
