"""The requests in flight: submitted in chunks, collected as their jobs end.

One blocking read of the group's stream returns the jobs that have ended, however many are in flight; their results are
then fetched a few at a time. Ends that are not in the stream (jobs of an earlier run, a Redis that came back empty) are
found by looking for the results of all jobs whenever no job has ended for `IDLE_MS`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TypeVar

from redis.exceptions import NoPermissionError, RedisError

from tokenmill.batch.index import Line
from tokenmill.batch.report import BatchStopped
from tokenmill.batch.response import Asked
from tokenmill.client.core import READ_COUNT
from tokenmill.client.sync import Client
from tokenmill.protocol.calls import JobExists
from tokenmill.protocol.faults import transient
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.result import Result

T = TypeVar("T")

IDLE_MS = 1000
"""Time without an end of a job after which the results of all jobs in flight are looked up."""
LINGER_S = 0.02
"""Minimum time between two reads: ends that come one by one are read together, which costs the machine less."""
RESUBMIT_S = 120.0
"""Time after which a job without a result is submitted again, in case Redis has lost it; usually it still exists."""
LOST_LOOK_S = 5.0
"""Interval, while no job ends, of the check that Redis still knows the jobs in flight."""
MAX_BYTES = 64 << 20
"""Maximum size of all bodies in flight, whatever the window."""
FETCH = 32
"""Maximum number of results of one round trip; a result with log-probabilities can have many megabytes."""


@dataclass(slots=True)
class Flight:
    """A request in flight."""

    asked: Asked
    line: Line
    size: int
    """Bytes of its body."""
    since: float = 0.0
    """Moment of `time.monotonic()` of its last submit."""


@dataclass(slots=True)
class Ready:
    """A request that is ready to be submitted."""

    flight: Flight
    body: bytes


def reach(client: Client, stop: threading.Event) -> None:
    """Wait until Redis has answered.

    Raises:
        BatchStopped: `stop` was set while Redis was away.
        redis.RedisError: Redis stayed away, or refuses a command.
    """
    client.patiently(client.redis.ping, pause=_pausing(stop))


def _pausing(stop: threading.Event) -> Callable[[float], None]:
    """Return a function that sleeps between two tries of a command, and raises `BatchStopped` once `stop` is set."""

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise BatchStopped("Stopped while Redis was away. Run the file again to continue.")

    return pause


class Flights:
    """Submits the jobs of one group and collects their results.

    Every method that uses Redis raises `redis.RedisError` if Redis stays away, and `BatchStopped` if `stop` is set
    while Redis is away.
    """

    def __init__(
        self,
        client: Client,
        group: str,
        window: int,
        priority: str,
        stop: threading.Event,
        tenant: str | None = None,
    ) -> None:
        self._client, self._group, self._priority, self._stop = client, group, priority, stop
        self._tenant = tenant
        self._window = window
        self._held: dict[str, Flight] = {}
        self._bytes = 0
        self._last = "0"
        self._look: list[str] = []
        """Ids of jobs that may already have a result."""
        self._looked = 0.0
        self._looked_for_lost = 0.0
        self._full_until = 0.0
        self._may_forget = True
        self._entries: list[str] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        """How many more requests may be submitted now."""
        if self._bytes >= MAX_BYTES or time.monotonic() < self._full_until:
            return 0
        return self._window - len(self._held)

    def submit(self, batch: Sequence[Ready]) -> list[Ready]:
        """Submit requests; return those for which the queue has no room.

        A request in flight gets a new job only if Redis has lost the old one.
        """
        entries = [
            JobEntry(ready.flight.asked.job_id, ready.body, stream=False, group=self._group, tenant=self._tenant)
            for ready in batch
        ]
        answers = self._patiently(lambda: self._client.submit_all(entries, self._priority))
        refused = []
        for ready, answer in zip(batch, answers, strict=True):
            held = self._held.get(ready.flight.asked.job_id)
            if held is not None:
                held.since = time.monotonic()
            elif answer is None or isinstance(answer, JobExists):
                self._take(ready.flight)
            else:
                refused.append(ready)
            if isinstance(answer, JobExists):
                self._look.append(ready.flight.asked.job_id)
        if refused:
            self._full_until = time.monotonic() + IDLE_MS / 1000
        return refused

    def _take(self, flight: Flight) -> None:
        flight.since = time.monotonic()
        self._bytes += flight.size
        self._held[flight.asked.job_id] = flight

    def overdue(self) -> list[Line]:
        """Return the lines of requests that should be submitted again."""
        before = time.monotonic() - RESUBMIT_S
        return [flight.line for flight in self._held.values() if flight.since < before]

    def collect(self) -> Iterator[tuple[Flight, Result]]:
        """Wait up to `IDLE_MS` for ends of jobs; yield each request that has ended, once, with its result."""
        self._stop.wait(max(0.0, self._looked + LINGER_S - time.monotonic()))
        ids, self._look = self._look, []
        ended = self._patiently(lambda: self._client.finished(self._group, self._last, None if ids else IDLE_MS))
        self._looked = time.monotonic() if len(ended) < READ_COUNT else 0.0
        if ended:
            self._last = ended[-1][0]
            self._entries += (entry for entry, _ in ended)
        ids += (job_id for _, job_id in ended)
        yield from self._fetch([i for i in dict.fromkeys(ids) if i in self._held] if ids else list(self._held))
        if not ids and time.monotonic() >= self._looked_for_lost + LOST_LOOK_S:
            self._find_lost()

    def cancel(self, flights: Sequence[Flight], reason: str) -> list[bool]:
        """Cancel requests that an earlier run submitted; return for each whether Redis knows its job.

        The jobs that Redis knows are in flight from now on: `collect` yields them.
        """
        ids = [flight.asked.job_id for flight in flights]
        known = [state is not None for state in self._patiently(lambda: self._client.states(ids))]
        held = [flight for flight, there in zip(flights, known, strict=True) if there]
        for flight in held:
            self._take(flight)
        ids = [flight.asked.job_id for flight in held]
        self._patiently(lambda: self._client.cancel_all(ids, reason))
        self._look += ids
        return known

    def lost(self) -> list[Flight]:
        """Drop and return the requests whose jobs Redis no longer knows."""
        return [self._held.pop(flight.asked.job_id) for flight in list(self._held.values()) if flight.since == -inf]

    def drop(self) -> list[Flight]:
        """Drop and return all requests; their jobs stay as they are."""
        flights, self._held = list(self._held.values()), {}
        return flights

    def _find_lost(self) -> None:
        """Make jobs overdue that Redis does not know any more, as after a restart without its data."""
        self._looked_for_lost = time.monotonic()
        ids = iter(list(self._held))
        while some := list(islice(ids, READ_COUNT)):
            states = self._patiently(lambda some=some: self._client.states(some))  # type: ignore[misc]
            for job_id, state in zip(some, states, strict=True):
                if state is None:
                    self._held[job_id].since = -inf

    def _fetch(self, ids: Sequence[str]) -> Iterator[tuple[Flight, Result]]:
        left = iter(ids)
        while some := list(islice(left, FETCH)):
            results = self._patiently(lambda some=some: self._client.results(some))  # type: ignore[misc]
            for job_id, result in zip(some, results, strict=True):
                if result is not None:
                    flight = self._held.pop(job_id)
                    self._bytes -= flight.size
                    self._full_until = 0.0  # the end of a job makes room in the queue
                    yield flight, result

    def forget(self, ids: Iterable[str]) -> None:
        """Delete the keys of jobs whose lines are on the disk, instead of waiting until they expire."""
        entries, self._entries = self._entries, []
        todo = list(ids)
        if not self._may_forget or not (todo or entries):
            return
        try:
            for at in range(0, max(len(todo), len(entries)), 500):
                some = (todo[at : at + 500], self._group, entries[at : at + 500])
                self._client.patiently(lambda some=some: self._client.forget(*some), outage_s=0.0)  # type: ignore[misc]
        except NoPermissionError:
            self._may_forget = False
        except RedisError as error:
            if not transient(error):
                raise

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call with retries; all calls are idempotent, since the queue refuses a job that was added before."""
        return self._client.patiently(call, pause=_pausing(self._stop))
