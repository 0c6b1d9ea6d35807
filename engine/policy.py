"""The scheduler's judgement, apart from its mechanics: who goes first, and who gives way."""

from __future__ import annotations

from engine.sequence import Sequence

Rank = tuple[int, int, int]


def rank(seq: Sequence) -> Rank:
    """The order of service: lane, then arrival, then choice. Unique, and the same before and after a preemption."""
    return (seq.request.priority, seq.request.arrival, seq.index)


def victim(running: list[Sequence]) -> Sequence:
    """Who loses its blocks when there is no room to go on: the last in the order of service.

    The first in that order is therefore never a victim while another runs, which is why every step makes progress.
    `running` is in the order of `rank`, and not empty.
    """
    return running[-1]
