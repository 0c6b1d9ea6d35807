"""The intake's thread: reads no more than there is room for, and turns entries into requests."""

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
from tokenmill.protocol.job import identify, parse_entry
from tokenmill.protocol.keys import GROUP, LANES
from tokenmill.protocol.meta import is_on
from tokenmill.protocol.scripts import Delivery, Ref, Scripts
from worker.jobs.held import Held, Job, Structure
from worker.jobs.results import Answer, kills_readers, no_grammar
from worker.jobs.translate import Translator
from worker.loop import Add, EngineLoop
from worker.ops.exits import Exit
from worker.ops.links import Contact, RedisClock, no_group, passing
from worker.ops.threads import Mailbox, Stop
from worker.queue.quarantine import Quarantine
from worker.queue.sweeper import Sweeper
from worker.settings import Settings

if TYPE_CHECKING:
    from engine.sampling.structured import Grammar

log = structlog.get_logger()

T = TypeVar("T")

COMPILERS = 2
"""Threads that compile grammars while their jobs wait and others are read."""
GRAMMAR_PAUSES = (0.5, 2.0, 8.0)
"""Seconds before each new try of a grammar, where the process that tries them failed."""
LOGGED_BYTES = 64 * 1024
"""Of a body, with `--log-prompts`."""
GIVE_WAY = 16
"""Waiting jobs at most that are handed back at once because no worker holds higher ones."""
PAUSE_SECONDS = 0.2
"""Between two looks at a paused or unreachable queue."""


class Intake:
    """The only one that adds to the registry of held jobs, so that no two count the same free place."""

    def __init__(
        self,
        settings: Settings,
        scripts: Scripts,
        blocking: redis.Redis,
        held: Held,
        loop: EngineLoop,
        translator: Translator,
        sweeper: Sweeper,
        quarantine: Quarantine,
        clock: RedisClock,
        contact: Contact,
        mailbox: Mailbox,
        stop: threading.Event,
        give_back: Callable[[list[Job]], None] = lambda jobs: None,
    ) -> None:
        """`blocking`: a client for reads that wait; `stop` ends the thread after the read under way.

        `give_back`: hands jobs back that still wait.
        """
        self._settings = settings
        self._scripts = scripts
        self._blocking = blocking
        self._held = held
        self._loop = loop
        self._translator = translator
        self._sweeper = sweeper
        self._quarantine = quarantine
        self._clock = clock
        self._contact = contact
        self._mailbox = mailbox
        self._stop = stop
        self._give_back = give_back
        self._sweep_was_full = False
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def run(self) -> None:
        """Read until `stop` is set."""
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
                    log.warning("group_missing", message=f"it is created again at 0: {error}")
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
        """One look at the queue: others' abandoned entries first, then new ones, then wait for one.

        Returns whether Redis was asked anything.
        """
        room = self._held.wait_for_room(self._settings.max_waiting, PAUSE_SECONDS)
        if room == 0:
            room = self._make_room()
        if room == 0:
            return False
        sent = time.monotonic()
        # A sweep that took all places leaves the next ones to new entries: what is handed back again and again, and
        # looks abandoned in between, must not keep those out for ever.
        found = [] if self._sweep_was_full else self._sweeper.sweep(room)
        self._sweep_was_full = len(found) >= room
        self._loop.telemetry.takeovers.inc(len(found))
        if not found:
            new = self._scripts.read(room)
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

    def _make_room(self) -> int:
        """Hand waiting jobs back, the newest of the lowest lane first, where no worker holds jobs of a higher lane.

        Those are unread, were handed back, or lost their worker. Without a free place they would stay so until a
        running job has ended. Returns how many places are free then.
        """
        waiting = [job for job in self._held.all() if job.may_leave and job.lane != LANES[0]]
        if not waiting:
            return 0
        unread, abandoned = self._scripts.unread(GIVE_WAY), self._sweeper.abandoned(GIVE_WAY)
        unheld = [max(counts) for counts in zip(unread, abandoned, strict=True)]
        higher = next((lane for lane, count in enumerate(unheld) if count), len(LANES))
        lower = [job for job in waiting if self._gives_way(job, higher)]
        lower.sort(key=lambda job: (LANES.index(job.lane), job.ref.place), reverse=True)
        if lower:
            self._give_back(lower[: unheld[higher]])
        return self._held.wait_for_room(self._settings.max_waiting, 0)

    def _gives_way(self, job: Job, higher: int) -> bool:
        """Whether a job goes after newcomers of that lane: its lane is lower, and it has not waited past them."""
        below = LANES.index(job.lane) - higher
        return below > 0 and time.monotonic() - job.taken_at < below * self._settings.aging_seconds

    def _take_back(self, found: list[Delivery]) -> list[Delivery]:
        """What was handed back may hold suspects; new entries cannot. The oldest come first, as they did before."""
        again = [one for one in found if one.again and not self._held.holds(one.lane, one.entry)]
        again.sort(key=lambda one: (LANES.index(one.lane), Ref(one.lane, one.entry, "").place))
        self._loop.telemetry.takeovers.inc(len(again))
        self._quarantine.forget_lost()
        return (self._quarantine.sift(again) if again else []) + [one for one in found if not one.again]

    def _wait_for_one(self) -> None:
        """Block on all lanes; each may bring one entry, however many places are free."""
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
        """Whether the queue is empty and nothing is held; entries that others hold count as the queue's."""
        pipe = self._scripts.client.pipeline(transaction=False)
        for lane in self._scripts.keys.lanes:
            pipe.xlen(lane)
        return not any(pipe.execute()) and len(self._held) == 0

    def _accept(self, found: list[Delivery], sent: float) -> None:
        """Hold all of them at once, so that their leases are renewed while the first ones are tokenised."""
        jobs: list[tuple[Job, Delivery]] = []
        nameless: list[Delivery] = []
        for delivery in found:
            who = identify(delivery.fields)
            if who is None:
                nameless.append(delivery)
            elif not self._held.holds(delivery.lane, delivery.entry):  # else Redis went back in time
                job = Job(
                    delivery.lane,
                    delivery.entry,
                    who,
                    body=delivery.fields.get(b"body", b""),
                    callback=self._translator.callback(who.callback),
                    max_attempts=self._settings.max_attempts,
                    lease_until=sent + self._settings.lease_seconds,
                )
                self._held.add(job)
                self._quarantine.enter(job)
                jobs.append((job, delivery))
        self._wait_while_paused()
        for job, delivery in jobs:
            if self._stop.is_set():  # the main thread hands back what waits
                break
            if self._settings.log_prompts:
                log.info("job_body", id=job.id, body=job.body[:LOGGED_BYTES].decode("utf-8", "replace"))
            self._submit(job, delivery)
        for delivery in nameless:  # last: if Redis goes away here, a sweep finds them again
            self._reject(delivery)

    def _wait_while_paused(self) -> None:
        """What a blocking read brought just after the queue was paused waits here."""
        while not self._stop.is_set() and self._paused():
            self._stop.wait(PAUSE_SECONDS)

    def _paused(self) -> bool:
        try:
            return is_on(self._scripts.client.hget(self._scripts.keys.meta, "paused"))
        except redis.RedisError as error:
            if not passing(error):
                raise
            return True

    def _submit(self, job: Job, delivery: Delivery) -> None:
        try:
            if not self._quarantine.may_read(job):
                self._loop.give(Answer.of(job.handle, kills_readers()))
                return
        except redis.RedisError as error:
            if not passing(error):
                raise
            self._contact.failed("read", error)
            self._held.forget(job.handle)  # unread; a sweep finds it again
            return
        request = self._try(job, lambda: self._translate(job, delivery))
        self._quarantine.was_read(job)
        if request is None:
            return
        if job.structure is None:
            self._loop.post(Add(request))
        else:
            self._compilers.submit(self._compile, job, request)

    def _translate(self, job: Job, delivery: Delivery) -> Request:
        entry = parse_entry(delivery.fields)
        job.ttl_ms = entry.ttl_ms
        if entry.max_attempts is not None:
            job.max_attempts = min(entry.max_attempts, self._settings.max_attempts)
            job.strict = True
        deadline = None if entry.ttl_ms is None else self._clock.deadline(job.ref.added_ms, entry.ttl_ms)
        return self._translator.request(job, entry, LANES.index(delivery.lane), deadline)

    def _compile(self, job: Job, request: Request) -> None:
        """On a thread of the pool. A job that was lost meanwhile is stopped at the gate."""
        structure = job.structure
        if structure is not None and self._held.owns(job):
            grammar = self._try(job, lambda: self._grammar(job, structure))
            if grammar is not None:
                self._loop.post(Add(dataclasses.replace(request, grammar=grammar)))

    def _grammar(self, job: Job, structure: Structure) -> Grammar | None:
        """Compile the grammar of a job; retry after a pause where this worker and not the grammar is at fault.

        Returns None if the worker stops, or if it cannot compile any grammar and has handed the job back.

        Raises:
            JobError: it cannot be compiled, or this worker still cannot tell.
        """
        pauses = list(GRAMMAR_PAUSES)
        while True:
            try:
                return self._translator.grammar(structure)
            except GrammarUndecided as error:
                log.warning("grammar_undecided", id=job.id, message=str(error), tries_left=len(pauses))
                if not pauses:
                    if not self._translator.can_compile():
                        self._give_back([job])  # another worker may be able to, and no start counts
                        if not self._held.owns(job):
                            return None
                    raise no_grammar(structure.key, str(error)) from None
            if self._stop.wait(pauses.pop(0)):
                return None

    def _try(self, job: Job, work: Callable[[], T]) -> T | None:
        """Do it, or answer the job with what is wrong."""
        try:
            return work()
        except JobError as error:
            self._loop.give(Answer.of(job.handle, error))
        except BaseException as error:  # a panic of the Rust tokenizer is no Exception; it must not end the worker
            log.exception("job_unreadable", id=job.id)
            if not self._can_read():
                return None  # no fault of the job: the worker ends, and hands it back
            reason = JobError(ErrorCode.ENGINE_ERROR, f"the worker cannot read this job: {type(error).__name__}")
            self._loop.give(Answer.of(job.handle, JobError(reason.code, reason.message, retryable=False)))
        return None

    def _can_read(self) -> bool:
        """Whether the tokenizer still works; if not, the worker is told to end."""
        try:
            self._translator.check()
        except BaseException as error:  # noqa: BLE001 - as above
            self._loop.broken = f"the tokenizer fails for a fixed prompt of its own: {type(error).__name__}: {error}"
            log.error("worker_broken", message=self._loop.broken)
            self._stop.set()
            self._mailbox.put(Stop(Exit.BROKEN))
            return False
        return True

    def _reject(self, delivery: Delivery) -> None:
        raw = delivery.fields.get(b"body", b"")
        self._scripts.reject(Ref(delivery.lane, delivery.entry, ""), raw, job_id=delivery.fields.get(b"id", b""))
        self._loop.telemetry.dead_letters.labels(ErrorCode.NO_ID.value).inc()
        log.info(
            "job_without_id",
            lane=delivery.lane,
            entry=delivery.entry,
            code=ErrorCode.NO_ID.value,
            message="the entry has no usable id, so it is in the stream of dead letters",
        )
