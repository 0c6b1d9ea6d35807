"""The registry of the jobs that this worker holds: read from the queue, not yet ended. All threads share it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from worker.jobs.job import Job, Phase


class Held:
    """Thread-safe registry of held jobs. Nothing may be written to Redis for a job that has left it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place_freed = threading.Condition(self._lock)
        self._jobs: dict[str, Job] = {}
        self.get: Callable[[str], Job | None] = self._jobs.get
        """Return the job of a handle, or None; a single look-up in a dict needs no lock."""
        self._entries: set[tuple[str, str]] = set()
        self._waiting = 0

    def add(self, job: Job) -> None:
        """Add a job that was just delivered.

        Raises:
            ValueError: the job's entry is held already.
        """
        entry = (job.entry.lane, job.entry.id)
        with self._lock:
            if entry in self._entries:
                raise ValueError(f"entry {job.entry.id} of lane {job.entry.lane} is held already")
            self._jobs[job.handle] = job
            self._entries.add(entry)
            self._waiting += job.phase is Phase.WAITING

    def holds(self, lane: str, entry: str) -> bool:
        """Return whether an entry of a lane is held."""
        with self._lock:
            return (lane, entry) in self._entries

    def owns(self, job: Job) -> bool:
        """Return whether this very delivery of a job is still held."""
        return self.get(job.handle) is job

    def begin(self, handle: str) -> Job | None:
        """Move a job from WAITING to STARTED and return it; None if it was handed back or lost meanwhile."""
        with self._lock:
            job = self._jobs.get(handle)
            if job is not None and job.phase is Phase.WAITING:
                job.phase = Phase.STARTED
                self._leave_waiting()
            return job

    def put_back(self, job: Job) -> None:
        """Move a job from STARTED to WAITING, since its START did not reach Redis."""
        with self._lock:
            if job.handle in self._jobs and job.phase is Phase.STARTED:
                job.phase = Phase.WAITING
                self._waiting += 1

    def forget(self, handle: str) -> Job | None:
        """Remove a job whose end is written, or that was handed back or lost; None if it is not held."""
        with self._lock:
            job = self._jobs.get(handle)
            if job is not None:
                self._remove(job)
            return job

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove and return all jobs that `wanted` accepts; none of them can be started in between."""
        with self._lock:
            taken = [job for job in self._jobs.values() if wanted(job)]
            for job in taken:
                self._remove(job)
            return taken

    def _remove(self, job: Job) -> None:
        del self._jobs[job.handle]
        self._entries.discard((job.entry.lane, job.entry.id))
        if job.phase is Phase.WAITING:
            self._leave_waiting()

    def _leave_waiting(self) -> None:
        self._waiting -= 1
        self._place_freed.notify_all()

    def all(self) -> list[Job]:
        """Return a snapshot of all held jobs, oldest delivery first."""
        with self._lock:
            return list(self._jobs.values())

    def wait_for_place(self, most: int, timeout: float) -> int:
        """Return how many more jobs may wait if the limit is `most`; block up to `timeout` seconds while it is 0."""
        with self._place_freed:
            self._place_freed.wait_for(lambda: self._waiting < most, timeout)
            return max(0, most - self._waiting)

    @property
    def waiting(self) -> int:
        """Number of held jobs that have not started."""
        return self._waiting

    def __len__(self) -> int:
        return len(self._jobs)
