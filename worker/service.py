"""One worker process: its threads, its signals, its orderly end.

main        sleeps on a mailbox; starts and ends the others
engine      loads the model, then steps (loop.py); the only one that touches torch
intake      reads entries, turns them into requests (intake.py, sweeper.py)
publisher   writes events and results (publisher.py)
canceller   looks at cancel keys (cancellation.py)
keeper      renews leases (lease.py)
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import redis
import structlog

from tokenmill.protocol.connection import blocking_client, command_client, redact
from tokenmill.protocol.environment import CLERK, COMMANDS, misspelt
from tokenmill.protocol.errors import JobError
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.scripts import Scripts
from tokenmill.protocol.version import version
from worker.jobs.held import Held, Job, Phase
from worker.jobs.logprobs import LogprobsWriter
from worker.jobs.results import Results
from worker.loading import Loaded, load, settle_heap
from worker.loop import Drop, EngineLoop
from worker.ops import logs
from worker.ops.exits import Exit
from worker.ops.health import Health, not_ready
from worker.ops.links import Contact, RedisClock
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Fatal, Mailbox, Ready, Signal, Stop, spawn
from worker.queue.canceller import Canceller
from worker.queue.gate import Gate
from worker.queue.intake import Intake
from worker.queue.keeper import Keeper
from worker.queue.publisher import Publisher
from worker.queue.quarantine import Quarantine
from worker.queue.sweeper import Sweeper
from worker.settings import VARIABLES, Settings
from worker.startup import Startup

log = structlog.get_logger()

SWITCH_SECONDS = 0.0005
"""How long the engine's thread waits for another to let go of the interpreter; a tenth of Python's default."""
LOOK_SECONDS = 0.5
"""How often the main thread, which never waits for Redis, looks for leases that ran out."""
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 5.0
"""Between two tries to reach Redis at the start; each pause is twice the one before."""
ENDS_SECONDS = 2.0
"""How long a worker that ends in trouble waits for the results of what it has computed to be written."""
RETRY_BACKOFF_SECONDS = 1.0
"""Before a job that failed in the engine is started again, times its attempts."""


class Worker:
    """Everything that lives as long as the process; `run` once."""

    def __init__(self, settings: Settings, loader: Callable[[Settings], Loaded] = load) -> None:
        self.settings = settings
        self.keys = Keys(settings.queue, settings.prefix)
        self.name = f"{settings.worker_name}:{os.getpid()}:{secrets.token_hex(4)}"
        self.mailbox = Mailbox()
        self.held = Held()
        self._draining = False
        """Whether this worker was told to end and lets its jobs finish."""
        self._loader = loader
        self._clock = RedisClock()
        self._contact = Contact()
        self._stop_intake = threading.Event()
        self._stop_engine = threading.Event()
        self._stop_publisher = threading.Event()
        self._stop_rest = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._clients: list[redis.Redis] = []
        self._loaded: Loaded | None = None
        self._loop: EngineLoop | None = None
        self._gate: Gate | None = None
        self._keeper: Keeper | None = None
        self._quarantine = Quarantine(self._scripts(self._client()), self.held, settings.lease_seconds)
        self._startup = Startup(settings, self._scripts(command_client(settings.redis, retries=0)))
        self._back = self._scripts(command_client(settings.redis, retries=1))
        """For handing jobs back."""
        self.telemetry = Telemetry()
        self.health: Health | None = None

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Exit:
        """Load, serve, drain. Returns the exit status; never raises for what a thread did."""
        log.info("worker_starting", worker=self.name, redis=redact(self.settings.redis), queue=self.settings.queue)
        try:
            self._watch()
            ending = self._live()
        except Fatal as error:
            log.error("worker_failed", status=int(error.status), message=str(error))
            ending = Stop(error.status)
        ending = Stop(self._end(ending.status))
        if self.health is not None:
            self.health.close()
        log.info("worker_ended", worker=self.name, status=ending.status.value, reason=ending.status.name.lower())
        return ending.status

    def _live(self) -> Stop:
        """From the start to the reason of the end."""
        checked = self._startup.check()  # first: loading may take minutes
        self._spawn("engine", self._engine)
        stop = self._wait_ready(checked)
        if stop is None and self._loaded is not None and self._loop is not None:
            return self._connect(self._loop) or self._serve(self._loaded, self._loop)
        return stop or Stop(Exit.ERROR)

    @property
    def hung(self) -> bool:
        """Whether the engine's thread did not end; then only the end of the process ends it."""
        return any(thread.is_alive() for thread in self._threads.values())

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        self._threads[name] = spawn(name, target, self.mailbox)

    def _engine(self) -> None:
        self._loaded = self._loader(self.settings)
        self._loop = loop = EngineLoop(self._loaded.engine, self._stop_engine, self.telemetry)
        self.telemetry.live.engine = lambda: loop.stats
        loop.check()  # a machine that cannot compute takes no job
        self.mailbox.put(Ready())
        self._loop.run()

    def _wait_ready(self, checked: bool) -> Stop | None:
        """Until the model is loaded. A queue that could not be `checked`, since Redis is away, is tried meanwhile."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            note = self.mailbox.get(timeout=None if checked else pause)
            match note:
                case Ready():
                    return None
                case Stop():
                    return note
                case Signal():
                    return Stop(Exit.OK)
            checked = self._startup.check()
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _connect(self, loop: EngineLoop) -> Stop | None:
        """Wait for Redis, and show up in the queue.

        Raises:
            Fatal: Redis refuses our credentials, or the queue does not fit.
        """
        keeper = self._make_keeper(loop)
        pause = FIRST_PAUSE_SECONDS
        while not self._startup.join(keeper):
            note = self.mailbox.get(timeout=pause)
            if isinstance(note, Stop):
                return note
            if isinstance(note, Signal):
                return Stop(Exit.OK)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        self._contact.ok()
        self._spawn("keeper", keeper.run)
        return None

    def _serve(self, loaded: Loaded, loop: EngineLoop) -> Stop:
        """Start the other I/O threads and sleep until something asks for the end."""
        scripts = self._scripts(command_client(self.settings.redis, retries=1))
        self._gate = Gate(scripts, self.held, loop, self._contact, self._quarantine)
        loaded.engine.gate = self._gate
        self._spawn("starter", self._gate.run)
        self._spawn_intake(loaded, loop)
        self._spawn_publisher(loaded, loop)
        canceller = Canceller(
            self._client(),
            self.keys,
            self.held,
            loop,
            self._contact,
            self._stop_rest,
            self.settings.cancel_poll_ms / 1000,
        )
        self._spawn("canceller", canceller.run)
        log.info("worker_ready", worker=self.name, model=loaded.translator.served[0], **loaded.facts)
        look = min(LOOK_SECONDS, self.settings.lease_seconds / 10)
        while True:
            note = self.mailbox.get(timeout=look)
            if self._keeper is not None:
                self._keeper.abort_expired()
            if isinstance(note, Stop):
                return note
            if isinstance(note, Signal):
                log.info("signal_received", signal=signal.Signals(note.number).name, held=len(self.held))
                return Stop(Exit.OK)

    # ── what others see ───────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        live = self.telemetry.live
        live.held = lambda: len(self.held)
        live.redis_up = lambda: self._contact.up
        live.redis_errors = lambda: dict(self._contact.errors)
        if self.settings.http_port is not None:
            self.health = Health(self.settings.http_port, self._not_ready, self.telemetry.text, self.settings.http_host)

    def _not_ready(self) -> str | None:
        if self._loop is not None and self._loop.broken is not None:
            return self._loop.broken
        draining = self._stop_intake.is_set()
        return not_ready(self._loop, self._contact, draining, self.settings.stall_seconds)

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _client(self) -> redis.Redis:
        return self._own(command_client(self.settings.redis))

    def _own(self, client: redis.Redis) -> redis.Redis:
        self._clients.append(client)
        return client

    def _scripts(self, client: redis.Redis) -> Scripts:
        settings = self.settings
        return Scripts(
            self._own(client), self.keys, self.name, settings.result_ttl_seconds, settings.stream_ttl_seconds
        )

    def _make_keeper(self, loop: EngineLoop) -> Keeper:
        self._keeper = Keeper(
            self.settings,
            self._scripts(self._client()),
            self.held,
            loop,
            self._clock,
            self._contact,
            self._stop_rest,
            self._describe,
            self._each_beat,
        )
        return self._keeper

    def _each_beat(self) -> None:
        """On the keeper's thread."""
        self._quarantine.tick(self._hand_back)
        if self._draining:
            self._excuse()
        self._back.client.ping()  # keeps its connection, so that jobs go back even after the password has changed

    def _spawn_intake(self, loaded: Loaded, loop: EngineLoop) -> None:
        settings = self.settings
        scripts = self._scripts(self._client())
        sweeper = Sweeper(
            scripts, self.held, self._contact, settings.lease_seconds, settings.sweep_every, self._quarantine
        )
        intake = Intake(
            settings,
            scripts,
            self._own(blocking_client(settings.redis, settings.block_ms)),
            self.held,
            loop,
            loaded.translator,
            sweeper,
            self._quarantine,
            self._clock,
            self._contact,
            self.mailbox,
            self._stop_intake,
            self._give_way,
        )
        self._spawn("intake", intake.run)

    def _spawn_publisher(self, loaded: Loaded, loop: EngineLoop) -> None:
        scripts = self._scripts(self._client())

        def retry(job: Job, error: JobError) -> None:
            """Hand a job back that may succeed elsewhere or later; whoever reads next after the delay takes it."""
            delay = min(RETRY_BACKOFF_SECONDS * job.attempt, self.settings.lease_seconds / 2)
            log.warning("job_retried", id=job.id, attempt=job.attempt, code=error.code.value, message=error.message)
            if self.held.forget(job.handle) is not None:
                self._yield(scripts, job, round(delay * 1000), graceful=True, count_start=True)

        results = Results(
            loaded.translator.served[0], self.name, self._clock, LogprobsWriter(loaded.model.tokenizer.token_bytes)
        )
        publisher = Publisher(scripts, results, self.held, loop, self._contact, self._stop_publisher, retry)
        self.telemetry.live.backlog = lambda: publisher.backlog
        self._spawn("publisher", publisher.run)

    def _describe(self) -> dict[str, str | int]:
        """What `worker:<name>` tells."""
        loaded, loop = self._loaded, self._loop
        if loaded is None or loop is None:
            return {"status": "starting"}
        stats = loop.stats
        waiting = self.held.waiting
        return {
            "status": "broken" if loop.broken else "draining" if self._stop_intake.is_set() else "ready",
            "model": ",".join(loaded.translator.served),
            "queue": self.settings.queue,
            "version": version(),
            "waiting": waiting,
            "running": len(self.held) - waiting,
            "slots": self.settings.max_num_seqs,
            "waiting_slots": self.settings.max_waiting,
            "total_blocks": stats.total_blocks,
            "free_blocks": stats.free_blocks,
            "cached_blocks": stats.cached_blocks,
            "batch_invariant": int(bool(getattr(loaded.model, "batch_invariant", False))),
            **loaded.facts,
            "lease_ms": self.settings.lease_ms,
            "updated_ms": self._clock.now_ms(),
        }

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, status: Exit) -> Exit:
        """Stop reading, hand back what waits, let what runs finish if all is well, hand back the rest, end threads.

        Returns the exit status: that of a thread that died in the drain, else `status`.
        """
        drain = status is Exit.OK
        self._stop_intake.set()
        if self._gate is not None:
            self._gate.close()
            if self._keeper is not None and self._contact.up and not drain:
                with contextlib.suppress(redis.RedisError):
                    self._keeper.show()  # that this worker is not ready; handing back may take a while
            if drain:
                self._draining = True
                self._excuse()
            self._hand_back(lambda job: job.phase is Phase.WAITING)
            if drain:
                status = self._drain()
            self._draining = False
            blamed = self._blamed(status)
            self._hand_back(blamed, graceful=False)
            self._hand_back(lambda job: not job.over)
            self._await_ends()
            self._hand_back(lambda job: True)
        self._stop_engine.set()
        if self._loop is not None:
            self._loop.wake()
        self._join("engine", 5.0 if drain and self._loop is not None else 0.5)
        self._stop_publisher.set()
        self._stop_rest.set()
        if self._gate is not None:
            self._gate.stop()
        for name in ("publisher", "intake", "keeper", "canceller", "starter"):
            self._join(name, 5.0)
        self._hand_back(lambda job: True)  # what the intake's last read brought
        if self._keeper is not None and self._contact.up:
            with contextlib.suppress(redis.RedisError):  # the key has a TTL, the consumer holds nothing
                self._keeper.leave()
        for client in self._clients:
            client.close()
        return status

    def _excuse(self) -> None:
        """Say in Redis that this worker was told to end: if it is killed before its jobs end, they are not to blame.

        The keeper says it again until Redis has heard it.
        """
        jobs = [job for job in self.held.all() if job.phase is Phase.STARTED and not job.excused]
        if not jobs:
            return
        try:
            self._back.excuse([job.ref for job in jobs])
        except redis.RedisError as error:
            log.warning("drain_not_announced", count=len(jobs), message=str(error))
            return
        for job in jobs:
            job.excused = True

    def _blamed(self, status: Exit) -> Callable[[Job], bool]:
        """Which jobs may be the reason of this end: those of the step in which the engine died or hangs, no others."""
        loop = self._loop
        if loop is None or loop.step_since is None or not (loop.died or status is Exit.STALLED):
            return lambda job: False
        computing = loop.engine.computing
        return lambda job: job.phase is Phase.STARTED and (job.handle in computing or not computing)

    def _await_ends(self) -> None:
        """Give the publisher a moment to write the ends of what is computed already."""
        deadline = time.monotonic() + ENDS_SECONDS
        while len(self.held) and time.monotonic() < deadline:
            self.mailbox.get(timeout=0.02)

    def _drain(self) -> Exit:
        """Until nothing is held, time is up, a second signal comes, or a thread dies: then its status, else OK."""
        deadline = time.monotonic() + self.settings.drain_seconds
        while len(self.held) and time.monotonic() < deadline:
            note = self.mailbox.get(timeout=0.02)
            if self._keeper is not None:
                self._keeper.abort_expired()
            if isinstance(note, Signal):
                log.info("drain_cut_short", held=len(self.held))
                break
            if isinstance(note, Stop) and note.status is not Exit.OK:
                return note.status
            self._hand_back(lambda job: job.phase is Phase.WAITING)  # what the last read brought
        return Exit.OK

    def _hand_back(self, wanted: Callable[[Job], bool], graceful: bool = True) -> None:
        """Give entries back to the queue, so that another worker takes them at its next sweep.

        `graceful`: it is no fault of theirs, so neither a start nor a death counts.
        """
        jobs = self.held.take(wanted)
        if not jobs:
            return
        for job in jobs:
            if self._loop is not None:
                self._loop.post(Drop(job.handle))
        handed = 0
        for job in jobs:
            if not self._yield(self._back, job, 0, graceful=graceful, count_start=not graceful):
                break  # with many jobs and a Redis that only times out, the end would never come
            handed += 1
        log.info("jobs_handed_back", count=handed, of=len(jobs))

    def _give_way(self, jobs: list[Job]) -> None:
        """Hand these back, unless they have been started meanwhile."""
        handles = {job.handle for job in jobs}
        self._hand_back(lambda job: job.handle in handles and job.may_leave)

    def _yield(self, scripts: Scripts, job: Job, delay_ms: int, graceful: bool, count_start: bool) -> bool:
        """False: Redis cannot be told, so the lease has to run out."""
        idle_ms = self.settings.lease_ms - delay_ms
        try:
            scripts.yield_(job.ref, idle_ms=idle_ms, graceful=graceful, count_start=count_start, due_in_ms=delay_ms)
        except redis.RedisError as error:
            message = f"its lease has to run out: {error}"
            log.warning("job_not_handed_back", id=job.id, lane=job.lane, entry=job.entry, message=message)
            return False
        return True

    def _join(self, name: str, seconds: float) -> None:
        thread = self._threads.get(name)
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                log.warning("thread_still_runs", thread=name)


def main(settings: Settings, loader: Callable[[Settings], Loaded] = load) -> int:
    """Run a worker as this process; signals are caught before anything slow begins. Returns the exit status."""
    logs.configure(settings.log_format, settings.log_level)
    for wrong in misspelt(os.environ, COMMANDS | CLERK | VARIABLES):
        log.warning("variable_ignored", variable=wrong.name, reason="no setting", nearest=wrong.nearest)

    def load_and_settle(settings: Settings) -> Loaded:
        gc.disable()  # what loading makes stays, and each look at all of it takes a tenth of a second
        loaded = loader(settings)
        settle_heap()
        sys.setswitchinterval(SWITCH_SECONDS)
        return loaded

    worker = Worker(settings, load_and_settle)

    def on_signal(number: int, frame: FrameType | None) -> None:
        worker.mailbox.put(Signal(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    status = worker.run()
    if worker.hung:
        # A thread inside torch or an import cannot be ended, and the interpreter would wait for it or crash on it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
