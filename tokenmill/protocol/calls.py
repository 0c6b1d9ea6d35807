"""The calls of the clients' two scripts, ENQUEUE and CANCEL, without I/O, for both clients."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenmill.protocol.errors import TokenmillError, clean
from tokenmill.protocol.job import JobEntry, milliseconds
from tokenmill.protocol.keys import CANCEL_TTL_S, GROUP, LANES, RESULT_TTL_S, STREAM_TTL_S, Keys
from tokenmill.protocol.lua import encode
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result, Status


class EnqueueRefused(TokenmillError):
    """The queue did not accept a job."""


class JobExists(EnqueueRefused):
    """The id belongs to a job that is delayed, queued or running, or whose result has not expired."""

    def __init__(self, job_id: str, state: str) -> None:
        self.job_id, self.state = job_id, state
        super().__init__(f"job {job_id} exists already ({state})")


class QueueFull(EnqueueRefused):
    """The queue has `meta.max_depth` waiting and running jobs."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        super().__init__(f"the queue is full: {depth} jobs wait or run")


class QuotaExceeded(EnqueueRefused):
    """The tenant has `meta.max_per_tenant` waiting and running jobs."""

    def __init__(self, tenant: str, used: int) -> None:
        self.tenant, self.used = tenant, used
        super().__init__(f"tenant {tenant} has {used} jobs waiting or running, its quota")


class Call(NamedTuple):
    """The name, keys and arguments of a script call, as `Runner.run` takes them."""

    script: str
    keys: Sequence[str | bytes]
    args: list[Any]


def enqueue_call(keys: Keys, entry: JobEntry, priority: str, delay: float | None = None) -> Call:
    """Make the call of ENQUEUE, whose reply `enqueue_reply` reads. The call may be repeated if its reply was lost.

    Args:
        delay: seconds before the job joins its lane.

    Raises:
        ValueError: an unknown priority.
        JobError: `delay` is not a finite number, or is longer than ten years.
    """
    if priority not in LANES:
        raise ValueError(f"priority: must be one of {', '.join(LANES)}")
    tenant, group = entry.tenant or "", entry.group or ""
    names = [*keys.lanes, keys.job(entry.id), keys.result(entry.id), keys.meta, keys.quota(tenant)]
    names += [keys.group(group), keys.group_out(group), keys.delayed_job(entry.id), keys.delayed]
    names += [keys.booked(tenant), keys.open]
    delay_ms = 0 if delay is None else milliseconds("delay", delay)
    request = encode(
        lane=priority,
        id=entry.id,
        tenant=entry.tenant,
        group=entry.group,
        nonce=secrets.token_hex(8),
        delay_ms=delay_ms if delay_ms > 0 else None,
        fields=[part for field in entry.fields().items() if field[0] not in ("id", "body") for part in field],
    )
    return Call("enqueue", names, [request, entry.body])


def enqueue_reply(reply: Any, entry: JobEntry) -> str:
    """Return the entry ID; empty for a delayed job, which has no entry yet.

    Raises:
        JobExists, QueueFull, QuotaExceeded: the job was not accepted.
    """
    status, value = reply[0], reply[1]
    if status == b"OK":
        return str(value.decode())
    if status == b"EXISTS":
        raise JobExists(entry.id, value.decode())
    if status == b"FULL":
        raise QueueFull(int(value))
    raise QuotaExceeded(entry.tenant or "", int(value))


def cancel_call(keys: Keys, job_id: str, reason: str = "user", ttl_s: int = CANCEL_TTL_S) -> Call:
    """Make the call of CANCEL, whose reply `cancel_reply` reads.

    Result and stream of a job that it ends live as long as `meta` says, else as long as the defaults.

    Args:
        ttl_s: seconds that the cancel key of a running or unknown job lives.
    """
    reason = clean(reason) or "user"
    result = Result(id=job_id, status=Status.CANCELLED, cancel_reason=reason)
    names = [keys.job(job_id), keys.result(job_id), keys.cancel(job_id), keys.out(job_id), keys.delayed]
    names += [keys.delayed_job(job_id), keys.callbacks, *keys.lanes, keys.meta, keys.open]
    request = encode(
        consumer_group=GROUP,
        id=job_id,
        reason=reason,
        cancel_ttl_s=max(1, ttl_s),
        result_ttl_s=RESULT_TTL_S,
        stream_ttl_s=STREAM_TTL_S,
    )
    return Call("cancel", names, [request, result.to_json()])


def cancel_reply(reply: Any) -> CancelReply:
    return CancelReply(reply.decode())
