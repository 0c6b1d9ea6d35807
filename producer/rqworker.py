"""An RQ worker that outlives failovers of Redis, and that always ends when it is asked to.

    rq worker --worker-class producer.rqworker.SteadyWorker --serializer json --with-scheduler QUEUE

RQ's own worker quits when Redis answers READONLY (a failover), or is away for longer than its retries. This one repeats
each command until Redis does it, or until the worker is asked to stop.

RQ's own worker may also not end on SIGTERM: its maintenance starts the scheduler process again after the stop, that
process inherits the worker's signal handlers, and the SIGTERM meant for it is lost. Here a signal only sets a flag;
RQ's loop stops where it holds no job, and the scheduler is told exactly once, after it can listen.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Final, Self, TypeVar

from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.scheduler import RQScheduler
from rq.scripts import release_lock
from rq.utils import now
from rq.worker import Worker

from tokenmill.protocol.faults import transient

T = TypeVar("T")

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
LOOK_S: Final = 1
"""How long an idle worker waits for a job in one read, and so the longest that a stop waits for it."""
CONNECT_S: Final = 5.0
TOLD_EVERY_S: Final = 30.0
"""How often an outage of Redis is logged."""
SCHEDULER_S: Final = 5.0
"""A scheduler process that has not ended so long after its SIGTERM is killed."""
LOCK_S: Final = 60
"""How long RQ's scheduler lock lives beyond one interval of the scheduler, which renews it in each (`rq.scheduler`)."""
SILENT_S: Final = 10
"""A scheduler that has not renewed its lock for so long counts as dead."""
SAME_SIGNAL_S: Final = 0.1
"""Ctrl-C on a pool of workers reaches each of them twice, from the terminal and from the pool: that is one signal."""
LONGEST_PAUSE_S: Final = 30.0
"""Before RQ's loop is begun again; doubled from one second on."""

log = logging.getLogger("rq.worker")  # RQ gives this logger its handler and format


class Patience:
    """Whether to go on waiting for Redis: yes, until the worker is asked to stop or is dead.

    The flag lies in memory that forked children share, so that the scheduler process and the work horse also stop
    waiting. Setting it is safe in a signal handler.
    """

    def __init__(self) -> None:
        self._worker_pid = os.getpid()
        self._ended = mmap.mmap(-1, 1)
        self._told_at = -TOLD_EVERY_S

    def __deepcopy__(self, memo: object) -> Self:
        return self  # each connection copies its `Retry`

    def end(self) -> None:
        """Wait for Redis no longer."""
        self._ended[0] = 1

    @property
    def ended(self) -> bool:
        return self._ended[0] == 1 or self._worker_pid not in (os.getpid(), os.getppid())

    def bears(self, error: Exception) -> bool:
        """Whether the command that met `error` is to be repeated."""
        if self.ended or not (isinstance(error, OSError) or (isinstance(error, RedisError) and transient(error))):
            return False
        if time.monotonic() - self._told_at >= TOLD_EVERY_S:
            self._told_at = time.monotonic()
            log.warning("Redis does not serve (%s: %s); trying again until it does", type(error).__name__, error)
        return True


class PatientRetry(Retry):
    """Repeats a command of redis-py as long as its `Patience` lasts."""

    def __init__(self, patience: Patience) -> None:
        super().__init__(ExponentialBackoff(cap=2, base=0.1), -1, (RedisError, OSError))
        self._patience = patience

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        *args: Any,
        **more: Any,
    ) -> T:
        def again(error: Exception) -> bool:
            return self._patience.bears(error) and (is_retryable is None or is_retryable(error))

        return super().call_with_retry(do, fail, again, *args, **more)


class SteadyScheduler(RQScheduler):
    """RQ's scheduler process; it ends with its worker, even with one that was killed, and soon replaces a dead one."""

    _worker_pid = 0

    def acquire_locks(self, auto_start: bool = False) -> Any:
        """Acquire the locks of this scheduler's queues, also one whose owner is dead; returns the names of the queues.

        RQ waits until the lock of a killed scheduler expires, for a minute in which nothing that is scheduled runs.
        """
        for key in map(self.get_locking_key, self._queue_names):
            owner, left_ms = self.connection.get(key), self.connection.pttl(key)
            if owner is not None and 0 <= left_ms < (self.interval + LOCK_S - SILENT_S) * 1000:
                release_lock(self.connection, key, owner)  # unless it has another owner by now
        return super().acquire_locks(auto_start)  # type: ignore[no-untyped-call]

    def start(self) -> Any:
        """Fork. A signal that comes before the child has its own handlers waits for them."""
        self._worker_pid = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            return super().start()  # type: ignore[no-untyped-call]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()  # type: ignore[no-untyped-call]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def heartbeat(self) -> None:
        """RQ calls this once a second."""
        if os.getppid() != self._worker_pid:  # the worker was killed
            self.request_stop()  # type: ignore[no-untyped-call]
        else:
            super().heartbeat()  # type: ignore[no-untyped-call]


class SteadyWorker(Worker):
    """RQ's worker with patience for Redis and an orderly end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.patience = Patience()
        self._has_job = False

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, burst: bool = False, *args: Any, **more: Any) -> bool:
        """Run RQ's loop, and begin it again if an error ends it; see `rq.worker.Worker.work`.

        Raises:
            redis.RedisError: Redis refuses this worker (a wrong password, for one).
        """
        once = burst or more.get("max_jobs") is not None or more.get("max_idle_time") is not None
        worked, pause = False, 0.5
        while True:
            begun = time.monotonic()
            try:
                worked |= super().work(burst, *args, **more)
            except RedisError:
                if not self._stop_requested:
                    raise
            if self._stop_requested or once:
                return worked
            pause = 1.0 if time.monotonic() - begun > LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
            self.log.error("Worker %s: an error ended RQ's loop; it begins again in %d s", self.name, pause)
            self._sleep(pause)
            if self._stop_requested:
                return worked
            self.executions.clear()
            self.connection.delete(self.key)  # else RQ takes it for another live worker of this name

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop_requested and time.monotonic() < end:
            time.sleep(0.1)

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        """Start; from the first moment on a signal is a request to stop."""
        self._install_signal_handlers()
        self.connection.connection_pool.connection_kwargs["socket_connect_timeout"] = CONNECT_S
        self.connection.set_retry(PatientRetry(self.patience))
        super().bootstrap(*args, **kwargs)

    def _install_signal_handlers(self) -> None:
        """RQ calls this again after `bootstrap`; a signal that came meanwhile stays the first one."""
        if not self._stop_requested:
            super()._install_signal_handlers()  # type: ignore[no-untyped-call]

    @property
    def dequeue_timeout(self) -> int:
        return LOOK_S

    @property
    def should_run_maintenance_tasks(self) -> bool:
        """RQ's loop asks this before each look at its queues, when it holds no job: the place to stop."""
        if self._stop_requested:
            raise StopRequested
        return bool(super().should_run_maintenance_tasks)

    def execute_job(self, job: Job, queue: Queue) -> None:
        self._has_job = True
        try:
            if self._stop_requested:
                self._show_stop()
            super().execute_job(job, queue)
        finally:
            self._has_job = False

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """A missed heartbeat must not end the worker while its work horse runs."""
        try:
            super().maintain_heartbeats(job, execution)
        except RedisError as error:
            if not transient(error):
                raise
        if self._stop_requested:
            self._show_stop()

    def _start_scheduler(self, burst: bool = False, logging_level: str | None = "INFO", *args: Any) -> None:
        if burst:
            super()._start_scheduler(burst, logging_level, *args)
            return
        level = logging_level if logging_level is not None else self.log.level
        self.scheduler = SteadyScheduler(
            self.queues, connection=self.connection, logging_level=level, serializer=self.serializer
        )
        if self.scheduler.acquire_locks():
            self.scheduler.start()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _shutdown(self) -> None:
        """Note the first signal. RQ's own method raises in the middle of whatever runs, which may lose a job."""
        self._stop_requested = True
        self.patience.end()
        if self._has_job:
            self._show_stop()

    def _show_stop(self) -> None:
        """Let the job under way know that its worker is asked to stop."""
        with contextlib.suppress(RedisError):
            self.set_shutdown_requested_date()  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """End at once, after a second signal; the job under way is killed.

        Raises:
            SystemExit: always, but for an echo of the first signal.
        """
        asked = self._shutdown_requested_date
        if asked is not None and now() - asked < timedelta(seconds=SAME_SIGNAL_S):
            return
        self.log.warning("Worker %s: second signal; the job under way is killed", self.name)
        if self.horse_pid:
            self.kill_horse()
            self.wait_for_horse()
        self._end_scheduler(0)
        raise SystemExit

    def stop_scheduler(self) -> None:
        self._end_scheduler(SCHEDULER_S)

    def _end_scheduler(self, grace_s: float) -> None:
        process = self.scheduler._process if self.scheduler is not None else None
        if process is None or not process.is_alive():
            return
        process.terminate()
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join()

    def teardown(self) -> None:
        """Leave, with or without Redis: RQ forgets a worker that shows no sign of life."""
        if self.is_horse:
            return
        self.stop_scheduler()
        for step in (self.register_death, self.unsubscribe):
            try:
                step()  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                self.log.warning("Worker %s: left without telling Redis: %s", self.name, error)
