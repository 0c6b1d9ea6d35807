"""One RQ job for each batch: enqueued when the batch is created, and again by a chore of the clerk if it was lost."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Final

import rq
import structlog
from rq.exceptions import DuplicateJobError

from producer.files.storage import Storage
from producer.rqqueue import keep_going

FUNCTION: Final = "producer.jobs.run_uploaded_batch"
RETRY_S: Final = (1, 1, 2, 5, 10)
"""Pauses before the retries of a batch's job that failed, or whose process was killed."""
REST: Final = timedelta(seconds=30)
"""Pause after the last of these retries, before the job is enqueued again."""
ORPHAN_S: Final = 3600.0
"""Age from which on a batch that is listed as open, but does not exist, is no longer listed."""

log = structlog.get_logger(__name__)


def enqueue_batch(queue: rq.Queue, tenant: str | None, batch_id: str, *, again: bool = False) -> None:
    """Enqueue the RQ job of a batch; do nothing if there is one.

    Args:
        queue: must use RQ's JSON serializer.
        again: replace a job that is there; it must not be queued or running.
    """
    with suppress(DuplicateJobError):
        queue.enqueue(
            FUNCTION,
            kwargs={"batch_id": batch_id, "tenant": tenant},
            job_id=batch_id,
            job_timeout=-1,
            retry=rq.Retry(max=len(RETRY_S), interval=list(RETRY_S)),
            description=f"batch {batch_id}",
            unique=not again,
        )


def tend(storage: Storage, queue: rq.Queue, root: str) -> dict[str, int]:
    """Enqueue the jobs of all batches that have not ended and whose jobs are not under way.

    Args:
        root: `Keys.root` of the queue; batches of other queues are left to their clerks.

    Returns:
        The number of batches that have not ended.
    """
    number = 0
    for batch_id, tenant, since in storage.open_batches():
        try:
            record = storage.batches(tenant).load(batch_id)
        except OSError as error:
            log.error("batch_not_readable", id=batch_id, message=str(error))
            continue
        if record is None:
            if time.time() - since > ORPHAN_S:
                storage.close_batch(batch_id)
        elif record["root"] == root:
            number += 1
            expired = record["expires_at"] <= time.time()
            keep_going(
                queue,
                batch_id,
                lambda batch_id=batch_id, tenant=tenant: enqueue_batch(queue, tenant, batch_id, again=True),  # type: ignore[misc]
                pause=REST,
                revive=expired,
            )
    return {"open": number}
