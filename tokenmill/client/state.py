"""`status`: in which state of docs/protocol.md a job is."""

from __future__ import annotations

import enum

from tokenmill.client.core import Ask, Once, state_of
from tokenmill.client.patience import BRIEF_S, Deadline
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result


class JobStatus(enum.StrEnum):
    """The state of a job. The last four are endings; their values equal those of `Status`."""

    UNKNOWN = "unknown"
    """Redis has no trace of the job: it was never submitted, or was added by a bare XADD and no worker has started it,
    or its result has expired, or Redis has lost it."""
    DELAYED = "delayed"
    """It was submitted with a `delay` and has not joined its lane yet."""
    QUEUED = "queued"
    """It waits in its lane, or in a worker, to be started."""
    RUNNING = "running"
    """A worker has started it."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        """True for the four endings."""
        return self in _ENDINGS


_ENDINGS = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED})


def status_steps(keys: Keys, job_id: str, deadline: Deadline) -> Once[JobStatus]:
    """Read a job's state in one round trip, from one moment."""
    commands = [("GET", keys.result(job_id)), ("EXISTS", keys.delayed_job(job_id)), ("HGET", keys.job(job_id), "state")]
    raw, delayed, state = yield Ask(commands, deadline, BRIEF_S, atomic=True)
    if raw is not None:
        return JobStatus(Result.from_json(raw).status.value)
    found = state_of(state, delayed)
    return next((one for one in JobStatus if one.value == found), JobStatus.UNKNOWN)
