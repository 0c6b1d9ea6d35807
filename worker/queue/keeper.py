"""The keeper's thread: renews leases, shows that the worker lives, promotes delayed jobs, ends jobs without entry."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog

from tokenmill.protocol.faults import no_group
from tokenmill.protocol.keys import LANES
from tokenmill.protocol.meta import Meta
from tokenmill.protocol.scripts import Scripts
from worker.inbox import Drop, Inbox
from worker.jobs.held import Held
from worker.jobs.job import Job
from worker.loop import EngineLoop
from worker.ops import logs
from worker.ops.exits import Exit
from worker.ops.links import Contact, RedisClock, passing
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Fatal
from worker.settings import Settings

log = structlog.get_logger()

BEAT_SECONDS = 1.0
"""Interval of the signs of life; a third of the lease if that is shorter."""
PROMOTE_SECONDS = 0.5
"""How long delayed jobs are promoted in one beat, at most a sixth of the lease: renewals wait meanwhile."""


class Keeper:
    """Renews leases over a Redis client of its own, so that no lease is lost because a connection is busy."""

    def __init__(
        self,
        settings: Settings,
        scripts: Scripts,
        held: Held,
        loop: EngineLoop,
        inbox: Inbox,
        telemetry: Telemetry,
        clock: RedisClock,
        contact: Contact,
        stop: threading.Event,
        describe: Callable[[], Mapping[Any, Any]],
        each_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect the parts.

        Args:
            loop: watched for steps that hang.
            describe: returns the fields of `worker:<name>`.
            each_beat: called at the end of each beat.
        """
        self._settings = settings
        self._scripts = scripts
        self._held = held
        self._loop = loop
        self._inbox = inbox
        self._telemetry = telemetry
        self._clock = clock
        self._contact = contact
        self._stop = stop
        self._describe = describe
        self._each_beat = each_beat
        self._renew_at = 0.0
        self._aborted: queue.SimpleQueue[Job] = queue.SimpleQueue()
        """Jobs whose lease ran out here and that are no longer computed; Redis may still name this worker as owner."""
        self._meta = Meta()

    def run(self) -> None:
        """Call `beat` every second, or every third of a lease if that is shorter, until `stop` is set.

        Raises:
            Fatal: the engine hangs; from then on no lease is renewed.
        """
        beat = min(BEAT_SECONDS, self._settings.lease_seconds / 3)
        while not self._stop.wait(beat):
            self._check_engine()
            try:
                self.beat()
            except redis.RedisError as error:
                if not (passing(error) or no_group(error)):
                    raise
                self._contact.failed("renew", error)
                self._telemetry.depth = {}
                self._renew_at = 0.0

    def _check_engine(self) -> None:
        since = self._loop.step_since
        if since is not None and time.monotonic() - since > self._settings.stall_seconds:
            raise Fatal(
                Exit.STALLED,
                f"one engine step has taken longer than --stall-seconds ({self._settings.stall_seconds:g} s)",
            )

    def abort_expired(self) -> None:
        """Stop computing jobs whose lease has run out by this worker's clock: other workers may hold them by now.

        Any thread may call it. When Redis is back, jobs that no other worker has taken over are handed back.
        """
        now = time.monotonic()
        for job in self._held.take(lambda job: job.computed and job.lease_until < now):
            self._telemetry.leases_lost.inc()
            message = "the lease could not be renewed in time, so another worker may hold the job; this worker drops it"
            log.warning("lease_ran_out", **job.log_fields, message=message)
            self._inbox.post(Drop(job.handle))
            self._aborted.put(job)

    def _return_aborted(self) -> None:
        while not self._aborted.empty():
            job = self._aborted.get()
            if self._held.holds(job.entry.lane, job.entry.id):  # a sweep of this worker has taken the entry over again
                continue
            try:
                # An outage is no fault of the job: neither a start nor a death counts.
                self._scripts.yield_(job.ref, idle_ms=self._settings.lease_ms, count_start=False, due_in_ms=0)
            except redis.RedisError:
                self._aborted.put(job)
                raise

    def beat(self) -> None:
        """Renew the leases when due, then show that this worker lives, and promote delayed jobs."""
        self._return_aborted()
        if time.monotonic() >= self._renew_at:
            self.renew()
            self.sync_clock()
            self._scripts.ensure_consumer()  # again: another worker may have created the groups after a loss of data
        self.show()
        self._scripts.promote(seconds=min(PROMOTE_SECONDS, self._settings.lease_seconds / 6))
        self._scripts.reconcile()
        self._each_beat()

    def renew(self) -> None:
        """Renew the leases of all held jobs, and drop the jobs whose entry this worker no longer owns.

        A job whose result is being written is not dropped: the reply to that write tells whether the job was lost.
        """
        sent = time.monotonic()
        jobs = self._held.all()
        lost = set(self._scripts.renew([job.ref for job in jobs]))
        for job in jobs:
            if job.ref not in lost:
                job.lease_until = sent + self._settings.lease_seconds
            elif not job.outgoing.ending and self._held.forget(job.handle) is not None:
                self._telemetry.leases_lost.inc()
                logs.job_lost(job)
                self._inbox.post(Drop(job.handle))
        self._renew_at = sent + self._settings.lease_seconds / 3

    def sync_clock(self) -> None:
        """Read Redis' clock."""
        sent = time.monotonic()
        seconds, micros = self._scripts.client.time()
        self._clock.sync(int(seconds), int(micros), sent, time.monotonic())

    def show(self) -> None:
        """Write `worker:<name>`, which expires one lease later, and read the queue's depth and `meta`."""
        key = self._scripts.keys.worker(self._scripts.consumer)
        pipe = self._scripts.client.pipeline(transaction=True)
        pipe.hset(key, mapping=self._describe())
        pipe.pexpire(key, self._settings.lease_ms)
        # Written again, since a Redis that came back empty has lost it, and new workers must still agree with it.
        for name, value in self._settings.published.items():
            pipe.hsetnx(self._scripts.keys.meta, name, str(value))
        pipe.hgetall(self._scripts.keys.meta)
        for lane in LANES:
            pipe.xlen(self._scripts.keys.lane(lane))
        *_, meta, high, normal, low = pipe.execute()
        self._telemetry.depth = dict(zip(LANES, (high, normal, low), strict=True))
        self._heed(Meta.of(meta))
        self._contact.ok()

    def _heed(self, meta: Meta) -> None:
        """Log changes of `meta` by an operator: a pause, or fields that are misspelt."""
        before, self._meta = self._meta, meta
        self._telemetry.paused = meta.paused
        queue = self._settings.queue
        if meta.paused and not before.paused:
            log.warning("queue_paused", queue=queue, message="no new jobs are read; held jobs continue")
        elif before.paused and not meta.paused:
            log.info("queue_resumed", queue=queue)
        if meta.problems and meta.problems != before.problems:
            log.warning("meta_not_understood", queue=queue, message="; ".join(meta.problems))

    def leave(self) -> None:
        """Delete `worker:<name>`, and the worker's consumer if no entry is pending for it."""
        self._scripts.client.delete(self._scripts.keys.worker(self._scripts.consumer))
        self._scripts.remove_consumer(self._scripts.consumer)
