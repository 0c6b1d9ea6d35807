"""One worker process: its threads, its signals, its life from the first connection to the exit status.

main        sleeps on a mailbox; starts and ends the other threads
engine      loads the model, then steps (loop.py); no other thread touches torch
intake      reads entries and turns them into requests (queue/intake.py)
starter     calls START (queue/starter.py)
publisher   writes events and results (queue/publisher.py)
canceller   reads cancel keys (queue/canceller.py)
keeper      renews leases (queue/keeper.py)
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import sys
from collections.abc import Callable
from types import FrameType

import redis
import structlog

from tokenmill.cli.logs import configure
from tokenmill.protocol.connection import redact
from tokenmill.protocol.environment import KNOWN, misspelt
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.version import version
from worker.connections import Connections
from worker.inbox import Inbox
from worker.jobs.held import Held
from worker.jobs.logprobs import LogprobsWriter
from worker.jobs.results import Results
from worker.loading import Loaded, load, settle_heap
from worker.loop import EngineLoop
from worker.ops.exits import Exit
from worker.ops.health import Health, not_ready
from worker.ops.links import Contact, RedisClock
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Fatal, Mailbox, Ready, Signal, Stop, Stops, Threads
from worker.queue.canceller import Canceller
from worker.queue.gate import Gate
from worker.queue.intake import Intake
from worker.queue.keeper import Keeper
from worker.queue.outbox import Outbox
from worker.queue.publisher import Publisher
from worker.queue.quarantine import Quarantine
from worker.queue.returner import Returner
from worker.queue.sweeper import Sweeper
from worker.settings import VARIABLES, Settings
from worker.shutdown import Shutdown
from worker.startup import Startup

log = structlog.get_logger()

SWITCH_SECONDS = 0.0005
"""How long the engine's thread waits for another thread to release the interpreter; a tenth of Python's default."""
LOOK_SECONDS = 0.5
"""How often the main thread, which never waits for Redis, looks for leases that have run out."""
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 5.0
"""Between two tries to reach Redis at the start; each pause is twice the one before."""


class Worker:
    """A worker: the parts that live as long as the process. `run` may be called once."""

    def __init__(self, settings: Settings, loader: Callable[[Settings], Loaded] = load) -> None:
        self.settings = settings
        self.keys = Keys(settings.queue, settings.prefix)
        self.name = f"{settings.worker_name}:{os.getpid()}:{secrets.token_hex(4)}"
        self.mailbox = Mailbox()
        self.held = Held()
        self.telemetry = Telemetry()
        self.outbox = Outbox()
        self.health: Health | None = None
        self._loader = loader
        self._inbox = Inbox()
        self._clock = RedisClock()
        self._contact = Contact()
        self._stops = Stops()
        self._threads = Threads(self.mailbox)
        self._connections = Connections(settings, self.keys, self.name)
        self._quarantine = Quarantine(self._connections.scripts(), self.held, settings.lease_seconds)
        self._startup = Startup(settings, self._connections.scripts(retries=0))
        self._returner = Returner(self._connections.scripts(retries=1), self.held, self._inbox, settings.lease_seconds)
        self._loaded: Loaded | None = None
        self._loop: EngineLoop | None = None
        self._gate: Gate | None = None
        self._keeper: Keeper | None = None
        self._intake: Intake | None = None

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Exit:
        """Load the model, serve, drain; return the exit status, whatever ended a thread."""
        log.info("worker_starting", worker=self.name, redis=redact(self.settings.redis), queue=self.settings.queue)
        try:
            self._watch()
            ending = self._live()
        except Fatal as error:
            log.error("worker_failed", status=int(error.status), message=str(error))
            ending = Stop(error.status)
        shutdown = Shutdown(
            self.held,
            self.mailbox,
            self._contact,
            self._returner,
            self._threads,
            self._stops,
            self._loop,
            self._gate,
            self._keeper,
        )
        status = shutdown.run(ending.status, self.settings.drain_seconds)
        self._connections.close()
        if self.health is not None:
            self.health.close()
        log.info("worker_ended", worker=self.name, status=status.value, reason=status.name.lower())
        return status

    @property
    def hung(self) -> bool:
        """Whether a thread did not end, so that only the end of the process can end it."""
        return self._threads.any_alive

    def _live(self) -> Stop:
        """Load the model and serve; return the reason of the end."""
        checked = self._startup.check()  # first: loading may take minutes
        self._threads.spawn("engine", self._engine)
        stop = self._wait_ready(checked)
        if stop is None and self._loaded is not None and self._loop is not None:
            return self._connect(self._loop) or self._serve(self._loaded, self._loop)
        return stop or Stop(Exit.ERROR)

    def _engine(self) -> None:
        """Load the model, then step; the engine's thread."""
        self._loaded = loaded = self._loader(self.settings)
        self._loop = loop = EngineLoop(loaded.engine, self._stops.engine, self._inbox, self.outbox, self.telemetry)
        self.telemetry.live.engine = lambda: loop.stats
        self.telemetry.live.fallbacks = lambda: loaded.fallbacks
        loop.check()  # a machine that cannot compute must take no job
        loaded.on_ready()
        self.mailbox.put(Ready())
        loop.run()

    def _wait_ready(self, checked: bool) -> Stop | None:
        """Wait until the model is loaded; the queue is checked meanwhile if Redis could not be reached before."""
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
        """Wait for Redis, and join the queue.

        Raises:
            Fatal: Redis refuses this worker's credentials, or the queue has another lease.
        """
        self._keeper = keeper = Keeper(
            self.settings,
            self._connections.scripts(),
            self.held,
            loop,
            self._inbox,
            self.telemetry,
            self._clock,
            self._contact,
            self._stops.rest,
            self._describe,
            self._each_beat,
        )
        pause = FIRST_PAUSE_SECONDS
        while not self._startup.join(keeper):
            note = self.mailbox.get(timeout=pause)
            if isinstance(note, Stop):
                return note
            if isinstance(note, Signal):
                return Stop(Exit.OK)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        self._contact.ok()
        with contextlib.suppress(redis.RedisError):  # the keeper tries again at each beat
            self._returner.keep_alive()
        self._threads.spawn("keeper", keeper.run)
        return None

    def _serve(self, loaded: Loaded, loop: EngineLoop) -> Stop:
        """Start the other I/O threads, and sleep until the worker has to end."""
        self._start_gate(loaded, loop)
        self._start_intake(loaded)
        self._start_publisher(loaded)
        self._start_canceller()
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

    # ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_gate(self, loaded: Loaded, loop: EngineLoop) -> None:
        self._gate = loaded.engine.gate = gate = Gate(
            self._connections.scripts(retries=1),
            self.held,
            loop,
            self._inbox,
            self.outbox,
            self.telemetry,
            self._contact,
            self._quarantine,
        )
        self._threads.spawn("starter", gate.starter.run)

    def _start_intake(self, loaded: Loaded) -> None:
        scripts, settings = self._connections.scripts(), self.settings
        sweeper = Sweeper(
            scripts, self.held, self._contact, settings.lease_seconds, settings.sweep_every, self._quarantine
        )
        self._intake = Intake(
            settings,
            scripts,
            self._connections.blocking(),
            self.held,
            self._inbox,
            self.outbox,
            self.telemetry,
            loaded.translator,
            sweeper,
            self._quarantine,
            self._clock,
            self._contact,
            self.mailbox,
            self._stops.intake,
            self._returner.give_way,
        )
        self._threads.spawn("intake", self._intake.run)

    def _start_publisher(self, loaded: Loaded) -> None:
        scripts = self._connections.scripts()
        writer = LogprobsWriter(loaded.model.tokenizer.token_bytes)
        publisher = Publisher(
            scripts,
            Results(loaded.translator.served[0], self.name, self._clock, writer),
            self.held,
            self._inbox,
            self.outbox,
            self.telemetry,
            self._contact,
            self._stops.publisher,
            lambda job, error: self._returner.retry(scripts, job, error),
        )
        self.telemetry.live.backlog = lambda: publisher.backlog
        self._threads.spawn("publisher", publisher.run)

    def _start_canceller(self) -> None:
        canceller = Canceller(
            self._connections.client(),
            self.keys,
            self.held,
            self._inbox,
            self._contact,
            self._stops.rest,
            self.settings.cancel_poll_ms / 1000,
        )
        self._threads.spawn("canceller", canceller.run)

    def _each_beat(self) -> None:
        """Clear suspects, and excuse running jobs in a drain; called on the keeper's thread at each beat."""
        self._quarantine.tick(self._returner.hand_back)
        if self._returner.draining:
            self._returner.excuse()
        self._returner.keep_alive()

    # ── metrics and health ────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        live = self.telemetry.live
        live.held = lambda: len(self.held)
        live.redis_up = lambda: self._contact.up
        live.redis_errors = lambda: dict(self._contact.errors)
        if self.settings.http_port is not None:
            self.health = Health(self.settings.http_port, self._not_ready, self.telemetry.text, self.settings.http_host)

    @property
    def _broken(self) -> str | None:
        """Return why this worker can serve no job, if its engine or its tokenizer is broken; else None."""
        parts = (self._loop, self._intake)
        return next((part.broken for part in parts if part is not None and part.broken is not None), None)

    def _not_ready(self) -> str | None:
        draining = self._stops.intake.is_set()
        return self._broken or not_ready(self._loop, self._contact, draining, self.settings.stall_seconds)

    def _describe(self) -> dict[str, str | int]:
        """Return the fields of `worker:<name>`."""
        loaded, loop = self._loaded, self._loop
        if loaded is None or loop is None:
            return {"status": "starting"}
        stats = loop.stats
        waiting = self.held.waiting
        return {
            "status": "broken" if self._broken else "draining" if self._stops.intake.is_set() else "ready",
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


def main(settings: Settings, loader: Callable[[Settings], Loaded] = load) -> int:
    """Run a worker as this process, and return its exit status. Signals are caught before anything slow begins."""
    configure(settings.log_format, settings.log_level)
    for wrong in misspelt(os.environ, KNOWN | VARIABLES):
        message = "no setting has this name, so the variable has no effect"
        log.warning("variable_ignored", variable=wrong.name, nearest=wrong.nearest, message=message)

    def load_and_settle(settings: Settings) -> Loaded:
        gc.disable()  # what loading creates stays; each collection of all of it would take a tenth of a second
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
        # A thread inside torch or an import cannot be ended; the interpreter would wait for it, or crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
