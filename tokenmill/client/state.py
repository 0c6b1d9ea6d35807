"""What Redis knows of a job and of the queue's workers: `lookup`, `status` and `workers`."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.client.core import Ask, Once, Run, Scan
from tokenmill.client.patience import BRIEF_S, Deadline
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result
from tokenmill.protocol.state import JobStatus, state_of
from tokenmill.protocol.workers import Roster, WorkerInfo, workers_call, workers_reply


@dataclass(frozen=True, slots=True)
class Lookup:
    """A job at one moment."""

    status: JobStatus
    tenant: str | None
    """None: the job has no tenant, or is unknown, or was added by a bare XADD and no worker has started it."""
    result: Result | None
    """None until the job ends; without `with_result` mostly None."""


def lookup_steps(keys: Keys, job_id: str, deadline: Deadline, with_result: bool = True) -> Once[Lookup]:
    """Read a job's state, tenant and, `with_result`, result in one round trip, from one moment."""
    commands = [
        ("GET" if with_result else "EXISTS", keys.result(job_id)),
        ("HMGET", keys.job(job_id), "state", "tenant"),
        ("EXISTS", keys.delayed_job(job_id)),
        ("HGET", keys.delayed_job(job_id), "tenant"),
    ]
    raw, (state, tenant), delayed, delayed_tenant = yield Ask(commands, deadline, BRIEF_S, atomic=True)
    owner = delayed_tenant if tenant is None and not raw else tenant
    status = JobStatus.of(state_of(state, delayed))
    result = None
    if raw and with_result:
        result = Result.from_json(raw)
        status = JobStatus.of(result.status.value)
    elif raw and not status.ended:  # only the result knows
        return (yield from lookup_steps(keys, job_id, deadline))
    return Lookup(status, None if owner is None else owner.decode("utf-8", "replace"), result)


def status_steps(keys: Keys, job_id: str, deadline: Deadline) -> Once[JobStatus]:
    """Read a job's state in one round trip, from one moment."""
    return (yield from lookup_steps(keys, job_id, deadline, with_result=False)).status


def workers_steps(keys: Keys, roster: Roster, deadline: Deadline) -> Once[tuple[WorkerInfo, ...]]:
    """Read the live workers of the queue, ordered by name."""
    (reply,) = yield Run([workers_call(keys, roster.known)], deadline, BRIEF_S)
    if not reply and roster.begin_scan():
        found = yield Scan(keys.worker("*"), deadline)
        roster.end_scan()
        if found:
            (reply,) = yield Run([workers_call(keys, found)], deadline, BRIEF_S)
    return workers_reply(keys, reply, roster)
