"""The canceller's thread: reads the cancel keys of all held jobs with one MGET, every poll."""

from __future__ import annotations

import threading
import time

import redis

from tokenmill.protocol.keys import Keys
from worker.inbox import Cancel, Inbox
from worker.jobs.held import Held
from worker.ops.links import Contact, passing

_REASON_BYTES = 256


class Canceller:
    """Makes the engine cancel every held job whose cancel key exists.

    The message is sent again at each poll until the job has ended, since it may reach the engine before the job does.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        held: Held,
        inbox: Inbox,
        contact: Contact,
        stop: threading.Event,
        poll_s: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._held = held
        self._inbox = inbox
        self._contact = contact
        self._stop = stop
        self._poll_s = poll_s

    def run(self) -> None:
        """Poll the cancel keys until `stop` is set."""
        while not self._stop.wait(self._poll_s):
            try:
                self.poll()
            except redis.RedisError as error:
                if not passing(error):
                    raise
                self._contact.failed("cancel", error)

    def poll(self) -> None:
        """Read all cancel keys once."""
        jobs = self._held.all()
        if not jobs:
            return
        for job, reason in zip(jobs, self._client.mget([self._keys.cancel(job.id) for job in jobs]), strict=True):
            if reason is not None:
                job.note_cancel(_text(reason), seen_at=time.monotonic())
                self._inbox.post(Cancel(job.handle))


def _text(reason: bytes | str) -> str:
    raw = reason if isinstance(reason, bytes) else reason.encode()
    return raw[:_REASON_BYTES].decode("utf-8", "replace")
