"""The names of all Redis keys of a queue.

`docs/protocol.md` is the contract; a test compares it with this module.

    keys = Keys(queue="default", prefix="tokenmill")
    keys.lane("normal")   # tokenmill:{default}:jobs:normal
    keys.out("7f3a")      # tokenmill:{default}:out:7f3a
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

Priority = Literal["high", "normal", "low"]

LANES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
"""Priorities in the order in which a worker serves them."""

GROUP: Final = "workers"
"""The consumer group of every lane, created at `0`."""

RESULT_TTL_S: Final = 24 * 3600
STREAM_TTL_S: Final = 15 * 60
CANCEL_TTL_S: Final = 24 * 3600
MIN_OPEN_STREAM_TTL_S: Final = 24 * 3600
DEAD_MAXLEN: Final = 10_000
DEAD_BODY_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 1 << 20

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def is_name(text: str) -> bool:
    """Return whether `text` may be an id or the name of a queue, prefix, group or tenant."""
    return NAME.fullmatch(text) is not None


def check_name(kind: str, text: str) -> str:
    """Return `text` if it is a name.

    Raises:
        ValueError: `text` is not a name; the message starts with `kind`.
    """
    if not is_name(text):
        raise ValueError(f"{kind}: must match [A-Za-z0-9_.-]{{1,128}}")
    return text


def open_stream_ttl(result_ttl_s: int) -> int:
    """Return the seconds that the output stream of an unfinished job lives after the last START or RENEW."""
    return max(MIN_OPEN_STREAM_TTL_S, result_ttl_s)


@dataclass(frozen=True)
class Keys:
    """The keys of one queue; all share the cluster hash tag `{queue}`.

    Methods don't check ids, since they run for every token: the callers check ids when they receive them.

    Raises:
        ValueError: queue or prefix is not a name.
    """

    queue: str = "default"
    prefix: str = "tokenmill"
    root: str = field(init=False)
    """The beginning of every key, colon included."""

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        check_name("prefix", self.prefix)
        object.__setattr__(self, "root", f"{self.prefix}:{{{self.queue}}}:")

    @property
    def lanes(self) -> tuple[str, str, str]:
        return self.lane("high"), self.lane("normal"), self.lane("low")

    def lane(self, priority: str) -> str:
        return f"{self.root}jobs:{priority}"

    def job(self, job_id: str) -> str:
        return f"{self.root}job:{job_id}"

    @property
    def delayed(self) -> str:
        return f"{self.root}delayed"

    def delayed_job(self, job_id: str) -> str:
        return f"{self.root}delayed-job:{job_id}"

    def out(self, job_id: str) -> str:
        return f"{self.root}out:{job_id}"

    def result(self, job_id: str) -> str:
        return f"{self.root}result:{job_id}"

    def cancel(self, job_id: str) -> str:
        return f"{self.root}cancel:{job_id}"

    @property
    def dead(self) -> str:
        return f"{self.root}dead"

    def group(self, name: str) -> str:
        return f"{self.root}group:{name}"

    def group_out(self, name: str) -> str:
        return f"{self.root}group-out:{name}"

    @property
    def callbacks(self) -> str:
        return f"{self.root}callbacks"

    @property
    def callbacks_delayed(self) -> str:
        return f"{self.root}callbacks-delayed"

    @property
    def callbacks_dead(self) -> str:
        return f"{self.root}callbacks-dead"

    def quota(self, tenant: str) -> str:
        return f"{self.root}quota:{tenant}"

    def booked(self, tenant: str) -> str:
        return f"{self.root}booked:{tenant}"

    def running(self, tenant: str) -> str:
        return f"{self.root}running:{tenant}"

    @property
    def open(self) -> str:
        return f"{self.root}open"

    @property
    def returned(self) -> str:
        return f"{self.root}returned"

    @property
    def reading(self) -> str:
        return f"{self.root}reading"

    def idempotency(self, id: str) -> str:
        return f"{self.root}idempotency:{id}"

    def worker(self, name: str) -> str:
        return f"{self.root}worker:{name}"

    def rate(self, key: str) -> str:
        return f"{self.root}rate:{key}"

    @property
    def meta(self) -> str:
        return f"{self.root}meta"
