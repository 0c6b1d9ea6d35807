"""An RQ worker that survives failovers of Redis, and that always ends after a signal to stop.

    rq worker --worker-class producer.rqworker.SteadyWorker --serializer json --with-scheduler QUEUE

RQ's own worker quits when Redis answers READONLY (a failover), or is away for longer than its retries. This worker
retries each command until Redis executes it, or until the worker is asked to stop.

RQ's own worker may also not end on SIGTERM: its maintenance may start the scheduler process again after the stop; that
process inherits the worker's signal handlers, and the SIGTERM for it is lost. Here a signal only sets a flag; RQ's loop
stops where it holds no job, and the scheduler process gets one SIGTERM, after it has installed its handlers.
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
"""How long one blocking read of an idle worker waits for a job, and so the longest delay of a stop."""
CONNECT_S: Final = 5.0
"""Time limit for connecting to Redis."""
LOG_EVERY_S: Final = 30.0
"""How often an outage of Redis is logged."""
SCHEDULER_S: Final = 5.0
"""Time after its SIGTERM after which a scheduler process that has not ended is killed."""
LOCK_S: Final = 60
"""How long RQ's scheduler lock lives beyond one interval of the scheduler, which renews it in each (`rq.scheduler`)."""
SILENT_S: Final = 10
"""Time without a renewal of its lock after which a scheduler counts as dead."""
CLEANING_S: Final = 30
"""How long another worker's lock of RQ's maintenance of a queue is respected."""
SAME_SIGNAL_S: Final = 0.1
"""Two signals within this time count as one: Ctrl-C on a pool of workers reaches each worker from the terminal and
from the pool."""
LONGEST_PAUSE_S: Final = 30.0
"""Longest pause before RQ's loop is started again after an error; the pause doubles from one second on."""

log = logging.getLogger("rq.worker")  # RQ gives this logger its handler and format


class Patience:
    """Decides whether to retry while Redis is away: yes, until the worker is asked to stop or is dead.

    The flag is in memory shared with forked children, so that the scheduler process and the work horse also stop
    retrying. Setting it is safe in a signal handler.
    """

    def __init__(self) -> None:
        self._worker_pid = os.getpid()
        self._ended = mmap.mmap(-1, 1)
        self._logged_at = -LOG_EVERY_S

    def __deepcopy__(self, memo: object) -> Self:
        return self  # each connection copies its `Retry`

    def end(self) -> None:
        """Stop retrying."""
        self._ended[0] = 1

    @property
    def ended(self) -> bool:
        """Whether the worker was asked to stop, or is dead."""
        return self._ended[0] == 1 or self._worker_pid not in (os.getpid(), os.getppid())

    def bears(self, error: Exception) -> bool:
        """Return whether to retry the command that raised `error`."""
        if self.ended or not (isinstance(error, OSError) or (isinstance(error, RedisError) and transient(error))):
            return False
        if time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning("Redis is away (%s: %s); retrying until it is back", type(error).__name__, error)
        return True


class PatientRetry(Retry):
    """A retry policy of redis-py that retries a command as long as its `Patience` allows."""

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
    """RQ's scheduler process; ends with its worker, even if that is killed, and soon replaces a dead scheduler."""

    _worker_pid = 0

    def acquire_locks(self, auto_start: bool = False) -> Any:
        """Acquire the locks of this scheduler's queues, including locks of dead schedulers; return the queues' names.

        RQ would wait until the lock of a killed scheduler expires: for a minute no scheduled job would run.
        """
        for key in map(self.get_locking_key, self._queue_names):
            owner, left_ms = self.connection.get(key), self.connection.pttl(key)
            if owner is not None and 0 <= left_ms < (self.interval + LOCK_S - SILENT_S) * 1000:
                release_lock(self.connection, key, owner)  # does nothing if the owner has changed
        return super().acquire_locks(auto_start)  # type: ignore[no-untyped-call]

    def start(self) -> Any:
        """Fork the process. Signals are blocked until the child has installed its own handlers."""
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
        """Send RQ's heartbeat, which RQ does once a second; stop if the worker was killed."""
        if os.getppid() != self._worker_pid:  # the worker was killed
            self.request_stop()  # type: ignore[no-untyped-call]
        else:
            super().heartbeat()  # type: ignore[no-untyped-call]


class SteadyWorker(Worker):
    """RQ's worker with retries while Redis is away, and with a graceful shutdown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.patience = Patience()
        self._has_job = False

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, burst: bool = False, *args: Any, **more: Any) -> bool:
        """Run RQ's loop, and start it again if an error ends it; see `rq.worker.Worker.work`.

        Raises:
            redis.RedisError: Redis refuses a command of this worker, for example because of a wrong password.
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
            self.log.error("Worker %s: an error ended RQ's loop; starting it again in %d s", self.name, pause)
            self._sleep(pause)
            if self._stop_requested:
                return worked
            self.executions.clear()
            self.connection.delete(self.key)  # otherwise RQ takes the key for a second live worker of this name

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop_requested and time.monotonic() < end:
            time.sleep(0.1)

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        """Start the worker; from the first moment on, a signal is a request to stop."""
        self._install_signal_handlers()
        self.connection.connection_pool.connection_kwargs["socket_connect_timeout"] = CONNECT_S
        self.connection.set_retry(PatientRetry(self.patience))
        super().bootstrap(*args, **kwargs)

    def _install_signal_handlers(self) -> None:
        """Install RQ's signal handlers, unless a signal has come: RQ calls this again after `bootstrap`."""
        if not self._stop_requested:
            super()._install_signal_handlers()  # type: ignore[no-untyped-call]

    @property
    def dequeue_timeout(self) -> int:
        """Seconds that one blocking read of RQ's loop waits."""
        return LOOK_S

    @property
    def should_run_maintenance_tasks(self) -> bool:
        """Whether RQ's maintenance is due; raises `StopRequested` after a signal.

        RQ's loop reads this before each look at its queues, when it holds no job: a safe place to stop.
        """
        if self._stop_requested:
            raise StopRequested
        return bool(super().should_run_maintenance_tasks)

    def clean_registries(self) -> None:
        """Run RQ's maintenance of the queues, which finds jobs of killed workers.

        A worker that is killed within it leaves its lock, for which RQ would wait for 15 minutes.
        """
        for queue in self.queues:
            self.connection.expire(queue.registry_cleaning_key, CLEANING_S, lt=True)
        super().clean_registries()  # type: ignore[no-untyped-call]

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Run a job; if a signal has come already, the job can see that its worker is asked to stop."""
        self._has_job = True
        try:
            if self._stop_requested:
                self._show_stop()
            super().execute_job(job, queue)
        finally:
            self._has_job = False

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """Send RQ's heartbeats; a heartbeat that fails must not end the worker while its work horse runs."""
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
        """Note the first signal. RQ's own method raises an exception in any running code, which may lose a job."""
        self._stop_requested = True
        self.patience.end()
        if self._has_job:
            self._show_stop()

    def _show_stop(self) -> None:
        """Record the request to stop in Redis, where the running job can see it."""
        with contextlib.suppress(RedisError):
            self.set_shutdown_requested_date()  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """End at once after a second signal, and kill the running job.

        Raises:
            SystemExit: always, except if the signal repeats the first signal within `SAME_SIGNAL_S`.
        """
        asked = self._shutdown_requested_date
        if asked is not None and now() - asked < timedelta(seconds=SAME_SIGNAL_S):
            return
        self.log.warning("Worker %s: second signal; killing the running job", self.name)
        if self.horse_pid:
            self.kill_horse()
            self.wait_for_horse()
        self._end_scheduler(0)
        raise SystemExit

    def stop_scheduler(self) -> None:
        """End the scheduler process; kill it if it has not ended after `SCHEDULER_S`."""
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
        """End, even if Redis is away: RQ removes a worker without a heartbeat."""
        if self.is_horse:
            return
        self.stop_scheduler()
        for step in (self.register_death, self.unsubscribe):
            try:
                step()  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                self.log.warning("Worker %s: ended without deregistering in Redis: %s", self.name, error)
