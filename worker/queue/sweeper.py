"""Finds entries whose worker died, and entries of this worker whose delivery was lost with a reply of Redis."""

from __future__ import annotations

import time
from typing import Any

import structlog

from tokenmill.protocol.keys import GROUP, LANES
from tokenmill.protocol.scripts import Delivery, Scripts
from worker.jobs.held import Held
from worker.ops.links import Contact
from worker.queue.quarantine import Quarantine

log = structlog.get_logger()


class Sweeper:
    """Takes abandoned entries over; called on the intake's thread, before it reads new entries."""

    def __init__(
        self,
        scripts: Scripts,
        held: Held,
        contact: Contact,
        lease_seconds: float,
        every: float,
        quarantine: Quarantine,
    ) -> None:
        self._scripts = scripts
        self._held = held
        self._contact = contact
        self._lease_seconds = lease_seconds
        self._every = every
        self._quarantine = quarantine
        self._due = 0.0
        self._look_due = 0.0

    def abandoned(self, most: int) -> tuple[int, ...]:
        """Count the entries of each lane, highest first, whose worker shows no sign of life: up to `most` in each lane.

        Called while no place is free for a sweep. All counts are 0 while no sweep is due.
        """
        if time.monotonic() < self._look_due or not self._is_due():
            return (0,) * len(LANES)
        self._look_due = time.monotonic() + self._every
        pipe = self._scripts.client.pipeline(transaction=False)
        for lane in LANES:
            pipe.xpending_range(self._scripts.keys.lane(lane), GROUP, "-", "+", most, idle=self._lease_ms)
        return tuple(len(rows) for rows in pipe.execute())

    def _is_due(self) -> bool:
        if self._quarantine.turned_away and not self._quarantine.taken:
            self._due = self._look_due = 0.0
        return time.monotonic() >= self._due and self._contact.lasted() >= self._lease_seconds

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_seconds * 1000)

    def sweep(self, places: int) -> list[Delivery]:
        """Take over up to `places` entries that were idle for a lease; none while no sweep is due.

        A sweep needs one lease of uninterrupted contact with Redis: after an outage every entry looks abandoned, until
        its worker has had the time to renew it.
        """
        if not self._is_due():
            return []
        self._quarantine.begin()
        found: list[Delivery] = []
        for lane in LANES:
            found += self._claim(lane, places - len(found))
        if len(found) < places:
            self._due = time.monotonic() + self._every
        else:
            self._look_due = 0.0  # there may be more entries
        return found

    def _claim(self, lane: str, places: int) -> list[Delivery]:
        """Take over up to `places` entries of a lane, page by page, until the cursor is back at 0-0."""
        found: list[Delivery] = []
        cursor: Any = "0-0"
        holders = self._holders(lane, places)
        while len(found) < places:
            cursor, entries, *_ = self._scripts.client.xautoclaim(
                self._scripts.keys.lane(lane),
                GROUP,
                self._scripts.consumer,
                min_idle_time=self._lease_ms,
                start_id=cursor,
                count=places - len(found),
            )
            page = [Delivery(lane, entry.decode(), dict(fields or {})) for entry, fields in entries]
            ours = [delivery for delivery in page if not self._held.holds(lane, delivery.entry)]
            kept = self._quarantine.sift(ours, doubt=True)
            for delivery in kept:
                self._log(delivery, holders.get(delivery.entry))
            found += kept
            if page:  # they are held again, so other workers must not take them from the list of returned entries
                members = [f"{lane} {delivery.entry}" for delivery in page]
                self._scripts.client.zrem(self._scripts.keys.returned, *members)
            if cursor in (b"0-0", "0-0"):
                break
        return found

    def _holders(self, lane: str, places: int) -> dict[str, str]:
        """Return entry ID → consumer, for the entries of a lane that were idle for a lease."""
        rows: Any = self._scripts.client.xpending_range(
            self._scripts.keys.lane(lane), GROUP, "-", "+", places, idle=self._lease_ms
        )
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    def _log(self, delivery: Delivery, holder: str | None) -> None:
        job_id = delivery.fields.get(b"id", b"").decode("utf-8", "replace")[:128]
        fields = {"id": job_id, "lane": delivery.lane, "entry": delivery.entry}
        if holder == self._scripts.consumer:
            message = "this worker already had the entry, but Redis' reply to its read was lost"
            log.info("job_found_again", **fields, message=message)
        else:
            message = "the job's worker has shown no sign of life for a lease; this worker takes the job over"
            log.warning("job_taken_over", **fields, worker=holder, message=message)
