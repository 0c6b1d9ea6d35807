"""Threads that cannot die in silence, and the main thread's mailbox."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

import structlog
from redis.exceptions import RedisError

from tokenmill.protocol.faults import refused
from worker.ops.exits import Exit

log = structlog.get_logger(__name__)


class Fatal(Exception):
    """Ends the worker with the given exit status."""

    def __init__(self, status: Exit, message: str) -> None:
        self.status = status
        super().__init__(message)

    @classmethod
    def refused(cls, error: RedisError) -> Self:
        """Redis does not take our credentials, or not any more."""
        return cls(
            Exit.REFUSED,
            f"Redis refuses the worker's credentials: {error}; check the user, the password and the rights in --redis",
        )


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker shall end; `status` is what its process returns."""

    status: Exit


@dataclass(frozen=True, slots=True)
class Signal:
    """A SIGTERM or SIGINT came in."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""


Note = Stop | Signal | Ready


class Mailbox:
    """What the main thread sleeps on. `put` may be called in a signal handler: a SimpleQueue's put is re-entrant."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def put(self, note: Note) -> None:
        self._notes.put(note)

    def get(self, timeout: float | None = None) -> Note | None:
        """The next note, or None after `timeout` seconds."""
        try:
            return self._notes.get(timeout=timeout)
        except queue.Empty:
            return None


def spawn(name: str, target: Callable[[], None], mailbox: Mailbox) -> threading.Thread:
    """Start a daemon thread whose death by an exception is logged and ends the worker."""

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
    """CPU time of the process by thread: those of `names`, and `other`: all the rest, OpenMP's threads among them."""
    spent = dict.fromkeys(names, 0.0)
    for thread in threading.enumerate():
        name = "main" if thread is threading.main_thread() else thread.name
        if name in spent and thread.ident is not None:
            with contextlib.suppress(OSError):  # it has just ended
                spent[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent | {"other": max(0.0, time.process_time() - sum(spent.values()))}
