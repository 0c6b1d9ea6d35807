"""The worker's threads, whose death is never silent, and the main thread's mailbox."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Self

import structlog
from redis.exceptions import RedisError

from tokenmill.protocol.faults import refused
from worker.ops.exits import Exit

log = structlog.get_logger(__name__)


class Fatal(Exception):
    """Raised to end the worker with an exit status."""

    def __init__(self, status: Exit, message: str) -> None:
        self.status = status
        super().__init__(message)

    @classmethod
    def refused(cls, error: RedisError) -> Self:
        """Return the error for a Redis that refuses this worker's credentials."""
        return cls(
            Exit.REFUSED,
            f"Redis refuses the worker's credentials: {error}; check user, password and rights of the user in --redis",
        )


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker has to end; `status` is the exit status of its process."""

    status: Exit


@dataclass(frozen=True, slots=True)
class Signal:
    """A SIGTERM or SIGINT arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""


Note = Stop | Signal | Ready


class Mailbox:
    """The queue that the main thread sleeps on. Signal handlers may call `put`, since a SimpleQueue's is re-entrant."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def put(self, note: Note) -> None:
        self._notes.put(note)

    def get(self, timeout: float | None = None) -> Note | None:
        """Return the next note, or None after `timeout` seconds."""
        try:
            return self._notes.get(timeout=timeout)
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class Stops:
    """Events that end the threads, in the order in which the main thread sets them."""

    intake: threading.Event = field(default_factory=threading.Event)
    engine: threading.Event = field(default_factory=threading.Event)
    publisher: threading.Event = field(default_factory=threading.Event)
    rest: threading.Event = field(default_factory=threading.Event)
    """Ends keeper and canceller; `Starter.stop` ends the starter."""


class Threads:
    """The threads of a worker, by name."""

    def __init__(self, mailbox: Mailbox) -> None:
        """Start no thread yet. `mailbox`: notified when a thread dies."""
        self._mailbox = mailbox
        self._threads: dict[str, threading.Thread] = {}

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread that runs `target`."""
        self._threads[name] = spawn(name, target, self._mailbox)

    def join(self, name: str, seconds: float) -> None:
        """Wait up to `seconds` for a thread to end, if it was started."""
        thread = self._threads.get(name)
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                log.warning("thread_still_runs", thread=name)

    @property
    def any_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads.values())


def spawn(name: str, target: Callable[[], None], mailbox: Mailbox) -> threading.Thread:
    """Start a daemon thread; an exception that ends it is logged, and ends the worker through `mailbox`."""

    def end(error: Fatal) -> None:
        log.error("worker_failed", thread=name, status=int(error.status), message=str(error))
        mailbox.put(Stop(error.status))

    def guarded() -> None:
        try:
            target()
        except Fatal as error:
            end(error)
        except BaseException as error:
            if isinstance(error, RedisError) and refused(error):
                end(Fatal.refused(error))
                return
            log.exception("thread_died", thread=name)
            mailbox.put(Stop(Exit.ERROR))

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def cpu_seconds(names: Collection[str]) -> dict[str, float]:
    """Return CPU seconds by thread name; `other` are all threads that are not in `names`, such as OpenMP's."""
    spent = dict.fromkeys(names, 0.0)
    for thread in threading.enumerate():
        name = "main" if thread is threading.main_thread() else thread.name
        if name in spent and thread.ident is not None:
            with contextlib.suppress(OSError):  # the thread has just ended
                spent[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent | {"other": max(0.0, time.process_time() - sum(spent.values()))}
