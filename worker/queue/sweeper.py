"""Finds entries whose worker shows no sign of life, and our own that a lost reply hid from us."""

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
    """Called by the intake, before it reads new entries."""

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
        """Count the entries of each lane, high first, whose worker shows no sign of life; all 0 while no sweep is due.

        Called where no place is free for a sweep. Counts up to `most` entries of a lane.
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

    def sweep(self, room: int) -> list[Delivery]:
        """Take over at most `room` entries that were idle for a lease; none while it is not yet time.

        Not before one lease of uninterrupted contact: after an outage of Redis every entry looks abandoned, until the
        workers that hold them have had the time to renew.
        """
        if not self._is_due():
            return []
        self._quarantine.begin()
        found: list[Delivery] = []
        for lane in LANES:
            found += self._claim(lane, room - len(found))
        if len(found) < room:
            self._due = time.monotonic() + self._every
        else:
            self._look_due = 0.0  # there may be more
        return found

    def _claim(self, lane: str, room: int) -> list[Delivery]:
        """Page through the group's pending entries until the cursor is back at its start."""
        found: list[Delivery] = []
        cursor: Any = "0-0"
        holders = self._holders(lane, room)
        while len(found) < room:
            cursor, entries, *_ = self._scripts.client.xautoclaim(
                self._scripts.keys.lane(lane),
                GROUP,
                self._scripts.consumer,
                min_idle_time=self._lease_ms,
                start_id=cursor,
                count=room - len(found),
            )
            page = [Delivery(lane, entry.decode(), dict(fields or {})) for entry, fields in entries]
            ours = [one for one in page if not self._held.holds(lane, one.entry)]
            kept = self._quarantine.sift(ours, doubt=True)
            for one in kept:
                self._log(one, holders.get(one.entry))
            found += kept
            if page:  # held again: the list of what was handed back must not offer it to others
                self._scripts.client.zrem(self._scripts.keys.returned, *(f"{lane} {one.entry}" for one in page))
            if cursor in (b"0-0", "0-0"):
                break
        return found

    def _holders(self, lane: str, room: int) -> dict[str, str]:
        """Who holds the entries of a lane that show no sign of life."""
        rows: Any = self._scripts.client.xpending_range(
            self._scripts.keys.lane(lane), GROUP, "-", "+", room, idle=self._lease_ms
        )
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    def _log(self, one: Delivery, holder: str | None) -> None:
        job_id = one.fields.get(b"id", b"").decode("utf-8", "replace")[:128]
        fields = {"id": job_id, "lane": one.lane, "entry": one.entry}
        if holder == self._scripts.consumer:
            log.info("job_found_again", **fields, message="this worker held it already; the reply of a read was lost")
            return
        message = "its worker has shown no sign of life for a lease"
        log.warning("job_taken_over", **fields, **({"worker": holder} if holder else {}), message=message)
