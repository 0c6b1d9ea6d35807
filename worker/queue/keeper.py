"""The keeper's thread: renews the leases of all held jobs, shows that the worker lives, moves delayed jobs when due,
ends jobs whose entry somebody deleted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog

from tokenmill.protocol.keys import LANES
from tokenmill.protocol.meta import Meta
from tokenmill.protocol.scripts import Scripts
from worker.jobs.held import Held, Job
from worker.loop import Drop, EngineLoop
from worker.ops import logs
from worker.ops.exits import Exit
from worker.ops.links import Contact, RedisClock, no_group, passing
from worker.ops.threads import Fatal
from worker.settings import Settings

log = structlog.get_logger()

BEAT_SECONDS = 1.0
"""Between two signs of life, or a third of the lease where that is shorter."""
PROMOTE_SECONDS = 0.5
"""For how long delayed jobs are moved in one beat, if that is no more than a sixth of a lease: renewals wait for it."""


class Keeper:
    """Has a client of its own, so that a busy connection never costs a lease."""

    def __init__(
        self,
        settings: Settings,
        scripts: Scripts,
        held: Held,
        loop: EngineLoop,
        clock: RedisClock,
        contact: Contact,
        stop: threading.Event,
        describe: Callable[[], Mapping[Any, Any]],
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """`describe`: the fields of `worker:<name>`; `also`: what else is to be done every beat."""
        self._settings = settings
        self._scripts = scripts
        self._held = held
        self._loop = loop
        self._clock = clock
        self._contact = contact
        self._stop = stop
        self._describe = describe
        self._also = also
        self._renew_at = 0.0
        self._aborted: queue.SimpleQueue[Job] = queue.SimpleQueue()
        """Jobs whose lease ran out here; still ours for all we know, and not run any more."""
        self._meta = Meta()

    def run(self) -> None:
        """Beat until `stop` is set.

        Raises:
            Fatal: the engine hangs; then nothing is renewed any more.
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
                self._loop.telemetry.depth = {}
                self._renew_at = 0.0

    def _check_engine(self) -> None:
        since = self._loop.step_since
        if since is not None and time.monotonic() - since > self._settings.stall_seconds:
            raise Fatal(Exit.STALLED, f"the engine's step takes longer than {self._settings.stall_seconds:g} s")

    def abort_expired(self) -> None:
        """Stop computing what runs past its own lease end, whatever Redis would say: another may have it by now.

        From any thread. When Redis is back, what nobody took is handed back.
        """
        now = time.monotonic()
        for job in self._held.take(lambda job: job.computed and job.lease_until < now):
            self._loop.telemetry.leases_lost.inc()
            message = "Redis took no renewal in time, so another worker may have the job; this one stops computing it"
            log.warning("lease_ran_out", id=job.id, lane=job.lane, entry=job.entry, message=message)
            self._loop.post(Drop(job.handle))
            self._aborted.put(job)

    def _return_aborted(self) -> None:
        while not self._aborted.empty():
            job = self._aborted.get()
            if self._held.holds(job.lane, job.entry):  # a sweep of our own has found it again
                continue
            try:
                # Neither the job nor its worker is to blame for an outage.
                self._scripts.yield_(job.ref, idle_ms=self._settings.lease_ms, count_start=False, due_in_ms=0)
            except redis.RedisError:
                self._aborted.put(job)
                raise

    def beat(self) -> None:
        """Renew if it is time, then show what this worker is doing."""
        self._return_aborted()
        if time.monotonic() >= self._renew_at:
            self.renew()
            self.sync_clock()
        self.show()
        self._scripts.promote(seconds=min(PROMOTE_SECONDS, self._settings.lease_seconds / 6))
        self._scripts.reconcile()
        self._also()

    def renew(self) -> None:
        """Renew all leases; who was lost is dropped at once, without a word to Redis.

        Of a job whose end is under way, the reply to that end tells.
        """
        sent = time.monotonic()
        jobs = self._held.all()
        lost = set(self._scripts.renew([job.ref for job in jobs]))
        for job in jobs:
            if job.ref not in lost:
                job.lease_until = sent + self._settings.lease_seconds
            elif not job.ending and self._held.forget(job.handle) is not None:
                self._loop.telemetry.leases_lost.inc()
                logs.job_lost(job)
                self._loop.post(Drop(job.handle))
        self._renew_at = sent + self._settings.lease_seconds / 3

    def sync_clock(self) -> None:
        sent = time.monotonic()
        seconds, micros = self._scripts.client.time()
        self._clock.sync(int(seconds), int(micros), sent, time.monotonic())

    def show(self) -> None:
        """Write `worker:<name>`; it disappears a lease after the last sign of life."""
        key = self._scripts.keys.worker(self._scripts.consumer)
        pipe = self._scripts.client.pipeline(transaction=True)
        pipe.hset(key, mapping=self._describe())
        pipe.pexpire(key, self._settings.lease_ms)
        # Said again, since a Redis that came back empty has forgotten it, and a newcomer must still be held to it.
        for name, value in self._settings.published.items():
            pipe.hsetnx(self._scripts.keys.meta, name, str(value))
        pipe.hgetall(self._scripts.keys.meta)
        for lane in LANES:
            pipe.xlen(self._scripts.keys.lane(lane))
        *_, meta, high, normal, low = pipe.execute()
        self._loop.telemetry.depth = dict(zip(LANES, (high, normal, low), strict=True))
        self._heed(Meta.of(meta))
        self._contact.ok()

    def _heed(self, meta: Meta) -> None:
        """Log what an operator has changed in `meta`: a pause, and what is misspelt."""
        before, self._meta = self._meta, meta
        self._loop.telemetry.paused = meta.paused
        queue = self._settings.queue
        if meta.paused and not before.paused:
            log.warning("queue_paused", queue=queue, message="no new jobs are read; jobs that are held go on")
        elif before.paused and not meta.paused:
            log.info("queue_resumed", queue=queue)
        if meta.problems and meta.problems != before.problems:
            log.warning("meta_not_understood", queue=queue, message="; ".join(meta.problems))

    def leave(self) -> None:
        """Take the sign of life away, and the consumer where nothing is pending for it."""
        self._scripts.client.delete(self._scripts.keys.worker(self._scripts.consumer))
        self._scripts.remove_consumer(self._scripts.consumer)
