"""Groups of jobs, without I/O: their counts, the members that have ended, and the cancel of unfinished members.

A group lives in the keys `group:<gid>` and `group-out:<gid>` of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tokenmill.client.core import Ask, Emit, Get, JobLost, Once, Read, Run, Steps, extended
from tokenmill.client.patience import BRIEF_S, Deadline
from tokenmill.protocol.calls import cancel_call, cancel_reply
from tokenmill.protocol.errors import TokenmillError
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.result import Result, Status

RESULTS_AT_ONCE: Final = 32
"""Maximum number of results of one round trip; a result may be as large as a megabyte."""
PAGE: Final = 1000
"""Maximum number of ids looked at, or jobs cancelled, in one round trip."""


class GroupLost(TokenmillError):
    """Redis knew a group and no longer does: Redis lost its data, or no member has ended for the results' lifetime.

    Attributes:
        group: the group's name.
    """

    def __init__(self, group: str, queue: str) -> None:
        self.group = group
        super().__init__(f"group {group} is gone from queue {queue}: Redis has lost its data, or the group has expired")


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of a group's jobs."""

    expected: int | None = None
    """How many jobs the producer has announced; None: it has not announced a number."""
    total: int = 0
    """Jobs that the queue has taken so far; a delayed job counts from when it joins its lane."""
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def finished(self) -> int:
        """Number of jobs that have ended, with any status."""
        return self.succeeded + self.failed + self.cancelled + self.expired

    @property
    def complete(self) -> bool:
        """True if `expected` is set and at least as many jobs have ended."""
        return self.expected is not None and self.finished >= self.expected


class Finished(NamedTuple):
    """A member of a group that has ended."""

    entry: str
    """The member's position in the group's stream; pass it as `after` to continue behind it."""
    id: str
    """The job's id."""
    status: Status


@dataclass(frozen=True, slots=True)
class GroupResult(Result):
    """The result of a member of a group."""

    entry: str = ""
    """The member's position in the group's stream; pass it as `after` to continue behind it."""


def check_expected(jobs: int) -> int:
    """Return `jobs` if it is a whole number of at least 0.

    Raises:
        ValueError: `jobs` is anything else.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 0 <= jobs < 1 << 53:
        raise ValueError("expected: must be a whole number, at least 0")
    return jobs


def expect_steps(keys: Keys, group: str, jobs: int, deadline: Deadline) -> Once[None]:
    """Announce how many jobs a group will have."""
    yield Ask([("HSET", keys.group(group), "expected", check_expected(jobs))], deadline, BRIEF_S)


def progress_steps(keys: Keys, group: str, deadline: Deadline) -> Once[Progress]:
    """Read the counts of a group."""
    return _progress((yield Ask([("HGETALL", keys.group(group))], deadline, BRIEF_S))[0])


def _progress(counts: Mapping[bytes, bytes]) -> Progress:
    numbers = {name.decode("utf-8", "replace"): _number(value) for name, value in counts.items()}
    names = ("total", "succeeded", "failed", "cancelled", "expired")
    return Progress(numbers.get("expected"), **{name: numbers.get(name) or 0 for name in names})


def _number(value: bytes) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


class Following:
    """Yields the members of a group that have ended, in the order of their ends."""

    def __init__(self, keys: Keys, group: str, after: str, timeout: float | None, block_ms: int) -> None:
        """Start behind an entry of the group's stream.

        Args:
            after: the entry of the last member that was seen; `0`: the beginning.
            timeout: seconds without a further end of a member; None: a day.
        """
        self.keys, self.group, self.timeout, self.block_ms = keys, group, timeout, block_ms
        self._last = after
        self._deadline = Deadline.after(f"group {group}: no job ended", timeout)
        self._seen = after not in ("0", "0-0")
        """Whether Redis has known the group, so that a group without counts is lost."""

    def finished(self) -> Steps[Finished]:
        """Yield each member that has ended, until the group is complete.

        Raises:
            TimeoutError: no member ended for `timeout` seconds.
            GroupLost: Redis no longer knows the group.
        """
        complete, block = False, None
        while True:
            found = yield from self._read(block)
            block = None
            for member in found:
                yield Emit(member)
            if found:
                self._again()
            elif complete:
                return
            else:
                complete = yield from self._complete()
                # Counts and entries are written together: once all members are counted, the stream is complete.
                block = None if complete else self._deadline.block_ms(self.block_ms)

    def results(self) -> Steps[GroupResult]:
        """Yield the result of each member that has ended, until the group is complete.

        Raises:
            TimeoutError, GroupLost: as `finished`.
            JobLost: the result of a member has expired or was deleted.
        """
        waiting: list[Finished] = []
        steps, reply = self.finished(), None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration:
                break
            reply = None
            if isinstance(step, Emit):
                waiting.append(step.value)
                continue
            yield from self._fetch(waiting)
            waiting.clear()
            reply = yield step
        yield from self._fetch(waiting)

    def _fetch(self, members: list[Finished]) -> Steps[GroupResult]:
        for at in range(0, len(members), RESULTS_AT_ONCE):
            page = members[at : at + RESULTS_AT_ONCE]
            replies = yield Get([self.keys.result(member.id) for member in page], self._deadline)
            for member, raw in zip(page, replies, strict=True):
                if raw is None:
                    raise JobLost(member.id, self.keys.queue)
                yield Emit(extended(GroupResult, Result.from_json(raw), entry=member.entry))
                self._again()

    def _again(self) -> None:
        self._deadline = Deadline.after(f"group {self.group}: no job ended", self.timeout)

    def _read(self, block_ms: int | None) -> Once[list[Finished]]:
        replies = yield Read({self.keys.group_out(self.group): self._last}, block_ms, self._deadline)
        found = [
            Finished(entry.decode(), fields[b"id"].decode(), Status(fields[b"status"].decode()))
            for _, entries in replies or ()
            for entry, fields in entries
        ]
        if found:
            self._last, self._seen = found[-1].entry, True
        return found

    def _complete(self) -> Once[bool]:
        counts = (yield Ask([("HGETALL", self.keys.group(self.group))], self._deadline))[0]
        if self._seen and not counts:
            raise GroupLost(self.group, self.keys.queue)
        self._seen = self._seen or bool(counts)
        return _progress(counts).complete


def cancel_group_steps(
    keys: Keys, group: str, reason: str, ttl: int, deadline: Deadline
) -> Once[dict[str, CancelReply]]:
    """Cancel the unfinished members that Redis knows: jobs that a client submitted, and delayed or started jobs."""
    members: dict[str, None] = {}
    for index, hash_of in ((keys.open, keys.job), (keys.delayed, keys.delayed_job)):
        for page in _pages((yield from _all_ids(index, deadline))):
            replies = yield Ask([("HGET", hash_of(id), "group") for id in page], deadline, BRIEF_S)
            members |= {id: None for id, found in zip(page, replies, strict=True) if found == group.encode()}
    done: dict[str, CancelReply] = {}
    for page in _pages(list(members)):
        replies = yield Run([cancel_call(keys, id, reason, ttl) for id in page], deadline, BRIEF_S)
        done |= {id: cancel_reply(reply) for id, reply in zip(page, replies, strict=True)}
    return done


def _pages(ids: list[str]) -> Iterator[list[str]]:
    return (ids[at : at + PAGE] for at in range(0, len(ids), PAGE))


def _all_ids(index: str, deadline: Deadline) -> Once[list[str]]:
    """Read all ids of a sorted set in pages.

    Each page starts at the last score of the previous page. A member whose score rises meanwhile is read twice.
    """
    found: dict[str, None] = {}
    low, skip = "-inf", 0
    while True:
        asked: tuple[Any, ...] = ("ZRANGEBYSCORE", index, low, "+inf", "WITHSCORES", "LIMIT", skip, PAGE)
        page = (yield Ask([asked], deadline, BRIEF_S))[0]
        flat = [item for pair in page for item in pair] if page and isinstance(page[0], tuple | list) else page
        members = [member.decode("utf-8", "replace") for member in flat[::2]]  # producers may write other bytes
        scores = [float(score) for score in flat[1::2]]
        found |= dict.fromkeys(members)
        if len(members) < PAGE:
            return list(found)
        last = f"{scores[-1]:.17g}"
        skip = scores.count(scores[-1]) + (skip if last == low else 0)
        low = last
