"""`status`: in which state of docs/protocol.md a job is."""

from __future__ import annotations

from tokenmill.client.core import Ask, Once
from tokenmill.client.patience import BRIEF_S, Deadline
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus, state_of


def status_steps(keys: Keys, job_id: str, deadline: Deadline) -> Once[JobStatus]:
    """Read a job's state in one round trip, from one moment."""
    commands = [("GET", keys.result(job_id)), ("EXISTS", keys.delayed_job(job_id)), ("HGET", keys.job(job_id), "state")]
    raw, delayed, state = yield Ask(commands, deadline, BRIEF_S, atomic=True)
    return JobStatus.of(state_of(state, delayed) if raw is None else Result.from_json(raw).status.value)
