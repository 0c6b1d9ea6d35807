"""The state of a job, from its hash `job:<id>` and its key `delayed-job:<id>`."""

from __future__ import annotations

import enum


class JobStatus(enum.StrEnum):
    """The state of a job. The last four states are endings; their values equal those of `Status`."""

    UNKNOWN = "unknown"
    """Redis has no trace of the job: it was never submitted, or was added by a bare XADD and no worker has started it,
    or its result has expired, or Redis has lost it."""
    DELAYED = "delayed"
    """The job was submitted with a `delay` and has not joined its lane yet."""
    QUEUED = "queued"
    """The job waits in its lane, or in a worker, to be started."""
    RUNNING = "running"
    """A worker has started the job."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @classmethod
    def of(cls, state: str | None) -> JobStatus:
        """Return the status of a `state_of` value; `UNKNOWN` for None and for a value that the protocol lacks."""
        return next((status for status in cls if status.value == state), cls.UNKNOWN)

    @property
    def ended(self) -> bool:
        """True for the four endings."""
        return self in _ENDINGS


_ENDINGS = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED})


def state_of(state: bytes | None, delayed: int) -> str | None:
    """Return the state of a job; None where Redis knows no such job.

    Args:
        state: the field `state` of `job:<id>`.
        delayed: the reply of EXISTS for `delayed-job:<id>`. A job may be delayed without a hash (it was put aside by
            hand), and a hash may still say `delayed` after the job was removed from the delayed jobs.
    """
    if delayed and state is None:
        return JobStatus.DELAYED.value
    return None if state is None or (state == b"delayed" and not delayed) else state.decode("utf-8", "replace")
