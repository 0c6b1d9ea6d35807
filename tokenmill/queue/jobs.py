"""Reads the state of a job that has no output yet: whether it is delayed or queued, and whether its queue is paused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from tokenmill.protocol.keys import Keys
from tokenmill.protocol.meta import paused
from tokenmill.protocol.state import JobStatus, state_of


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job at one moment."""

    status: JobStatus
    due_in_s: float | None = None
    """Seconds until a delayed job joins its lane, 0 where it is due; None for a job that is not delayed."""
    paused: bool = False
    """The queue is paused: no worker reads."""


def read_job(client: redis.Redis, keys: Keys, job_id: str) -> JobInfo:
    """Read the state of a job that may not have ended.

    A job whose hash has expired is `UNKNOWN`, even if its result is still there.

    Raises:
        redis.RedisError: Redis is away, or refuses a command.
    """
    pipe = client.pipeline(transaction=False)
    pipe.exists(keys.delayed_job(job_id))
    pipe.hget(keys.job(job_id), "state")
    delayed, state = pipe.execute()
    status = JobStatus.of(state_of(state, delayed))
    due_in_s = _due_in_s(client, keys, job_id) if status is JobStatus.DELAYED else None
    return JobInfo(status, due_in_s, paused(client, keys))


def _due_in_s(client: redis.Redis, keys: Keys, job_id: str) -> float:
    due: Any = client.zscore(keys.delayed, job_id)
    seconds, micros = client.time()
    return 0.0 if due is None else max(0.0, float(due) / 1000 - seconds - micros / 1e6)
