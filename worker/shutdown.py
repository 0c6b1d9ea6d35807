"""The orderly end of a worker: stop reading, let running jobs finish (drain), hand other jobs back, end the threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import redis
import structlog

from worker.jobs.held import Held
from worker.jobs.job import Job, Phase
from worker.loop import EngineLoop
from worker.ops.exits import Exit
from worker.ops.links import Contact
from worker.ops.threads import Mailbox, Signal, Stop, Stops, Threads
from worker.queue.gate import Gate
from worker.queue.keeper import Keeper
from worker.queue.returner import Returner

log = structlog.get_logger()

ENDS_SECONDS = 2.0
"""How long a worker that ends because of a fault waits until the results of jobs that have ended are written."""
POLL_SECONDS = 0.02
"""Interval at which the number of held jobs is checked."""


class Shutdown:
    """Ends a worker, on the main thread. `loop`, `gate` and `keeper` are None if the worker never started them."""

    def __init__(
        self,
        held: Held,
        mailbox: Mailbox,
        contact: Contact,
        returner: Returner,
        threads: Threads,
        stops: Stops,
        loop: EngineLoop | None,
        gate: Gate | None,
        keeper: Keeper | None,
    ) -> None:
        self._held = held
        self._mailbox = mailbox
        self._contact = contact
        self._returner = returner
        self._threads = threads
        self._stops = stops
        self._loop = loop
        self._gate = gate
        self._keeper = keeper

    def run(self, status: Exit, drain_seconds: float) -> Exit:
        """End the worker; if `status` is OK, running jobs have `drain_seconds` to finish.

        Returns:
            The exit status: that of a thread that died during the drain, else `status`.
        """
        drain = status is Exit.OK
        self._stops.intake.set()
        if self._gate is not None:
            self._gate.close()
            status = self._end_jobs(status, drain_seconds)
        self._end_threads(drain)
        self._returner.hand_back(lambda job: True)  # entries of the intake's last read
        if self._keeper is not None and self._contact.up:
            with contextlib.suppress(redis.RedisError):  # the key has a TTL, the consumer holds nothing
                self._keeper.leave()
        return status

    def _end_jobs(self, status: Exit, drain_seconds: float) -> Exit:
        drain = status is Exit.OK
        if not drain and self._keeper is not None and self._contact.up:
            with contextlib.suppress(redis.RedisError):
                self._keeper.show()  # shows at once that this worker is not ready; handing back may take a while
        if drain:
            self._returner.draining = True
            self._returner.excuse()
        self._returner.hand_back(lambda job: job.phase is Phase.WAITING)
        if drain:
            status = self._drain(drain_seconds)
        self._returner.draining = False
        self._returner.hand_back(self._blamed(status), graceful=False)
        self._returner.hand_back(lambda job: not job.outgoing.over)
        self._await_ends()
        self._returner.hand_back(lambda job: True)
        return status

    def _drain(self, seconds: float) -> Exit:
        """Wait until no job is held, the time is over, a second signal comes, or a thread dies; return the status."""
        deadline = time.monotonic() + seconds
        while len(self._held) and time.monotonic() < deadline:
            note = self._mailbox.get(timeout=POLL_SECONDS)
            if self._keeper is not None:
                self._keeper.abort_expired()
            if isinstance(note, Signal):
                log.info("drain_cut_short", held=len(self._held))
                break
            if isinstance(note, Stop) and note.status is not Exit.OK:
                return note.status
            self._returner.hand_back(lambda job: job.phase is Phase.WAITING)  # entries of the intake's last read
        return Exit.OK

    def _blamed(self, status: Exit) -> Callable[[Job], bool]:
        """Return which jobs may have caused this end: the jobs of the step in which the engine died or hangs."""
        loop = self._loop
        if loop is None or loop.step_since is None or not (loop.died or status is Exit.STALLED):
            return lambda job: False
        computing = loop.engine.computing
        return lambda job: job.phase is Phase.STARTED and (job.handle in computing or not computing)

    def _await_ends(self) -> None:
        """Give the publisher a moment to write the results of jobs that have ended."""
        deadline = time.monotonic() + ENDS_SECONDS
        while len(self._held) and time.monotonic() < deadline:
            self._mailbox.get(timeout=POLL_SECONDS)

    def _end_threads(self, drained: bool) -> None:
        self._stops.engine.set()
        if self._loop is not None:
            self._loop.wake()
        self._threads.join("engine", 5.0 if drained and self._loop is not None else 0.5)
        self._stops.publisher.set()
        self._stops.rest.set()
        if self._gate is not None:
            self._gate.starter.stop()
        for name in ("publisher", "intake", "keeper", "canceller", "starter"):
            self._threads.join(name, 5.0)
