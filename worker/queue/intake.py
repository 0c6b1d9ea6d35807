"""The intake's thread: reads as many entries as may wait here, and turns them into requests."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import structlog

from engine.request import GrammarUndecided, Request
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.faults import no_group
from tokenmill.protocol.job import identify, parse_entry
from tokenmill.protocol.keys import GROUP, LANES
from tokenmill.protocol.meta import paused
from tokenmill.protocol.scripts import Delivery, Ref, Scripts
from worker.inbox import Add, Inbox
from worker.jobs.held import Held
from worker.jobs.job import Entry, Job, Options, Structure
from worker.jobs.results import Answer, kills_readers, no_grammar
from worker.jobs.translate import Translator
from worker.ops.exits import Exit
from worker.ops.links import Contact, RedisClock, passing
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Mailbox, Stop
from worker.queue.outbox import Outbox
from worker.queue.quarantine import Quarantine
from worker.queue.sweeper import Sweeper
from worker.settings import Settings

if TYPE_CHECKING:
    from engine.sampling.structured import Grammar

log = structlog.get_logger()

T = TypeVar("T")

COMPILERS = 2
"""Number of threads that compile grammars, so that further jobs are read meanwhile."""
GRAMMAR_PAUSES = (0.5, 2.0, 8.0)
"""Seconds before each new try of a grammar, if the process that checks grammars failed."""
LOGGED_BYTES = 64 * 1024
"""Maximum number of bytes of a body that `--log-prompts` logs."""
GIVE_WAY = 16
"""Maximum number of waiting jobs handed back at once, in favour of jobs of a higher lane that no worker holds."""
PAUSE_SECONDS = 0.2
"""Pause between two tries to read a paused or unreachable queue."""


class Intake:
    """Adds jobs to the registry; no other thread does, so that no free place is used twice."""

    def __init__(
        self,
        settings: Settings,
        scripts: Scripts,
        blocking: redis.Redis,
        held: Held,
        inbox: Inbox,
        outbox: Outbox,
        telemetry: Telemetry,
        translator: Translator,
        sweeper: Sweeper,
        quarantine: Quarantine,
        clock: RedisClock,
        contact: Contact,
        mailbox: Mailbox,
        stop: threading.Event,
        give_back: Callable[[list[Job]], None] = lambda jobs: None,
    ) -> None:
        """Connect the parts.

        Args:
            blocking: a client for reads that block.
            mailbox: notified when the worker has to end: the queue is empty (`--burst`), or the tokenizer is broken.
            stop: ends the thread after the read under way.
            give_back: hands waiting jobs back to the queue.
        """
        self._settings = settings
        self._scripts = scripts
        self._blocking = blocking
        self._held = held
        self._inbox = inbox
        self._outbox = outbox
        self._telemetry = telemetry
        self._translator = translator
        self._sweeper = sweeper
        self._quarantine = quarantine
        self._clock = clock
        self._contact = contact
        self._mailbox = mailbox
        self._stop = stop
        self._give_back = give_back
        self.broken: str | None = None
        """Why this worker cannot read any job, if its tokenizer fails."""
        self._sweep_was_full = False
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def run(self) -> None:
        """Read entries until `stop` is set."""
        try:
            self._read_on()
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _read_on(self) -> None:
        while not self._stop.is_set():
            try:
                if self.round():
                    self._contact.ok()
            except redis.RedisError as error:
                if no_group(error):
                    log.warning("group_missing", message=f"the consumer group is created again at 0: {error}")
                    self._recreate()
                elif passing(error):
                    self._contact.failed("read", error)
                else:
                    raise
                self._stop.wait(PAUSE_SECONDS)

    def _recreate(self) -> None:
        try:
            self._scripts.ensure_groups()
        except redis.RedisError as error:
            if not passing(error):
                raise

    def round(self) -> bool:
        """Take over entries of dead workers, else read new entries, else block until an entry comes.

        Returns:
            Whether Redis was called.
        """
        places = self._held.wait_for_place(self._settings.max_waiting, PAUSE_SECONDS)
        if places == 0:
            places = self._free_places()
        if places == 0:
            return False
        sent = time.monotonic()
        # After a sweep that took all free places the next places go to new entries: entries that are handed back again
        # and again, and look abandoned in between, must not keep new entries waiting for ever.
        found = [] if self._sweep_was_full else self._sweeper.sweep(places)
        self._sweep_was_full = len(found) >= places
        self._telemetry.takeovers.inc(len(found))
        if not found:
            new = self._scripts.read(places)
            if new is None:
                self._stop.wait(PAUSE_SECONDS)
                return True
            found = self._take_back(new)
        if found:
            self._accept(found, sent)
        elif self._settings.burst and self._is_over():
            self._mailbox.put(Stop(Exit.OK))
            self._stop.wait(PAUSE_SECONDS)
        else:
            self._wait_for_one()
        return True

    def _free_places(self) -> int:
        """Hand waiting jobs back for jobs of a higher lane that no worker holds; the newest of the lowest lane first.

        Jobs that no worker holds are unread, were handed back, or lost their worker. Without a free place here they
        would wait until a running job ends.

        Returns:
            The number of free places.
        """
        waiting = [job for job in self._held.all() if job.may_leave and job.entry.lane != LANES[0]]
        if not waiting:
            return 0
        unread, abandoned = self._scripts.unread(GIVE_WAY), self._sweeper.abandoned(GIVE_WAY)
        unheld = [max(counts) for counts in zip(unread, abandoned, strict=True)]
        higher = next((lane for lane, count in enumerate(unheld) if count), len(LANES))
        lower = [job for job in waiting if self._gives_way(job, higher)]
        lower.sort(key=lambda job: (LANES.index(job.entry.lane), job.ref.place), reverse=True)
        if lower:
            self._give_back(lower[: unheld[higher]])
        return self._held.wait_for_place(self._settings.max_waiting, 0)

    def _gives_way(self, job: Job, higher: int) -> bool:
        """Return whether a job gives way to new jobs of lane `higher`: its lane is lower, and it has not aged yet."""
        below = LANES.index(job.entry.lane) - higher
        return below > 0 and time.monotonic() - job.taken_at < below * self._settings.aging_seconds

    def _take_back(self, found: list[Delivery]) -> list[Delivery]:
        """Return the entries that were handed back, in order and without suspects, then the new entries.

        New entries cannot be suspects.
        """
        again = [read for read in found if read.again and not self._held.holds(read.lane, read.entry)]
        again.sort(key=lambda read: (LANES.index(read.lane), Ref(read.lane, read.entry, "").place))
        self._telemetry.takeovers.inc(len(again))
        self._quarantine.forget_lost()
        return (self._quarantine.sift(again) if again else []) + [read for read in found if not read.again]

    def _wait_for_one(self) -> None:
        """Block until an entry comes. Each lane may return one entry, however many places are free."""
        keys = self._scripts.keys
        block = self._settings.block_ms if not self._settings.burst else min(100, self._settings.block_ms)
        sent = time.monotonic()
        reply: Any = self._blocking.xreadgroup(
            GROUP, self._scripts.consumer, dict.fromkeys(keys.lanes, ">"), count=1, block=block
        )
        names = {keys.lane(name).encode(): name for name in LANES}
        found = [
            Delivery(names[lane], entry.decode(), dict(fields or {}))
            for lane, entries in reply or ()
            for entry, fields in entries
        ]
        if found:
            self._accept(found, sent)

    def _is_over(self) -> bool:
        """Return whether the lanes are empty, also of entries that other workers hold, and this worker holds no job."""
        pipe = self._scripts.client.pipeline(transaction=False)
        for lane in self._scripts.keys.lanes:
            pipe.xlen(lane)
        return not any(pipe.execute()) and len(self._held) == 0

    def _accept(self, found: list[Delivery], sent: float) -> None:
        """Turn entries into held jobs, then submit them; `sent`: `time.monotonic()` when their read was sent.

        All jobs are held first, so that their leases are renewed while the first jobs are tokenised.
        """
        jobs: list[tuple[Job, Delivery]] = []
        nameless: list[Delivery] = []
        for delivery in found:
            job = self._job(delivery, sent)
            if job is None:
                nameless.append(delivery)
            elif not self._held.holds(delivery.lane, delivery.entry):  # held if Redis lost its latest writes
                self._held.add(job)
                self._quarantine.enter(job)
                jobs.append((job, delivery))
        self._wait_while_paused()
        for job, delivery in jobs:
            if self._stop.is_set():  # the main thread hands back the jobs that wait
                break
            if self._settings.log_prompts:
                log.info("job_body", id=job.id, body=job.entry.body[:LOGGED_BYTES].decode("utf-8", "replace"))
            self._submit(job, delivery)
        for delivery in nameless:  # last: if Redis goes away here, a sweep finds them again
            self._reject(delivery)

    def _job(self, delivery: Delivery, sent: float) -> Job | None:
        """Return the job of an entry; None if the entry has no usable id."""
        identity = identify(delivery.fields)
        if identity is None:
            return None
        callback = self._translator.callback(identity.callback)
        entry = Entry(delivery.lane, delivery.entry, identity, delivery.fields.get(b"body", b""), callback)
        options = Options(max_attempts=self._settings.max_attempts)
        return Job(entry, options, lease_until=sent + self._settings.lease_seconds)

    def _wait_while_paused(self) -> None:
        """Wait while the queue is paused: a blocking read may return entries just after the pause began."""
        while not self._stop.is_set() and self._paused():
            self._stop.wait(PAUSE_SECONDS)

    def _paused(self) -> bool:
        try:
            return paused(self._scripts.client, self._scripts.keys)
        except redis.RedisError as error:
            if not passing(error):
                raise
            return True

    def _submit(self, job: Job, delivery: Delivery) -> None:
        try:
            if not self._quarantine.may_read(job):
                self._outbox.give(Answer.of(job.handle, kills_readers()))
                return
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("read", error)
            self._held.forget(job.handle)  # a sweep finds the unread entry again
            return
        request = self._try(job, lambda: self._translate(job, delivery))
        self._quarantine.was_read(job)
        if request is None:
            return
        if job.options.structure is None:
            self._inbox.post(Add(request))
        else:
            self._compilers.submit(self._compile, job, request)

    def _translate(self, job: Job, delivery: Delivery) -> Request:
        entry = parse_entry(delivery.fields)
        job.options.ttl_ms = entry.ttl_ms
        if entry.max_attempts is not None:
            job.options.max_attempts = min(entry.max_attempts, self._settings.max_attempts)
            job.options.strict = True
        deadline = None if entry.ttl_ms is None else self._clock.deadline(job.ref.added_ms, entry.ttl_ms)
        return self._translator.request(job, entry, LANES.index(delivery.lane), deadline)

    def _compile(self, job: Job, request: Request) -> None:
        """Compile a job's grammar, then submit the job; runs on a thread of the pool.

        The gate drops a job that was lost meanwhile.
        """
        structure = job.options.structure
        if structure is not None and self._held.owns(job):
            grammar = self._try(job, lambda: self._grammar(job, structure))
            if grammar is not None:
                self._inbox.post(Add(dataclasses.replace(request, grammar=grammar)))

    def _grammar(self, job: Job, structure: Structure) -> Grammar | None:
        """Compile a job's grammar; try again after a pause if this worker, and not the grammar, is at fault.

        Returns:
            None if the worker ends meanwhile, or if it can compile no grammar and has handed the job back.

        Raises:
            JobError: the grammar cannot be compiled, or is still undecided after the last try.
        """
        pauses = list(GRAMMAR_PAUSES)
        while True:
            try:
                return self._translator.grammar(structure)
            except GrammarUndecided as error:
                log.warning("grammar_undecided", id=job.id, message=str(error), tries_left=len(pauses))
                if not pauses:
                    if not self._translator.can_compile():
                        self._give_back([job])  # another worker may compile it, and no start counts
                        if not self._held.owns(job):
                            return None
                    raise no_grammar(structure.key, str(error)) from None
            if self._stop.wait(pauses.pop(0)):
                return None

    def _try(self, job: Job, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; if it fails, answer the job with the error and return None."""
        try:
            return work()
        except JobError as error:
            self._outbox.give(Answer.of(job.handle, error))
        except BaseException as error:  # a panic of the Rust tokenizer is no Exception, and must not end the worker
            log.exception("job_unreadable", id=job.id)
            if not self._can_read():
                return None  # the job is not at fault: the worker ends, and hands the job back
            message = f"the worker cannot read this job: {type(error).__name__}"
            reason = JobError(ErrorCode.ENGINE_ERROR, message, retryable=False)
            self._outbox.give(Answer.of(job.handle, reason))
        return None

    def _can_read(self) -> bool:
        """Check whether the tokenizer still works; if not, make the worker end."""
        try:
            self._translator.check()
        except BaseException as error:  # noqa: BLE001 - as above
            self.broken = f"the tokenizer fails for a fixed prompt: {type(error).__name__}: {error}"
            log.error("worker_broken", message=self.broken)
            self._stop.set()
            self._mailbox.put(Stop(Exit.BROKEN))
            return False
        return True

    def _reject(self, delivery: Delivery) -> None:
        """Move an entry without a usable id to the dead letters."""
        raw = delivery.fields.get(b"body", b"")
        self._scripts.reject(Ref(delivery.lane, delivery.entry, ""), raw, job_id=delivery.fields.get(b"id", b""))
        self._telemetry.dead_letters.labels(ErrorCode.NO_ID.value).inc()
        log.info(
            "job_without_id",
            lane=delivery.lane,
            entry=delivery.entry,
            code=ErrorCode.NO_ID.value,
            message="the entry has no usable id; it was moved to the stream of dead letters",
        )
