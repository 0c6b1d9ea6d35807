"""One step in flight: the same outputs as without it, under every option of a request and whatever happens to it."""

from __future__ import annotations

from collections import Counter

import pytest
from structlog.testing import capture_logs

from tests.engine.schedules import Schedule

SCHEDULES = 40
"""Schedules of one test."""


def cases(overlap: bool, fast: int, count: int) -> list[object]:
    """Numbers of `count` tests, of which the first `fast` are not slow."""
    mark = [pytest.mark.slow]
    name = "overlap" if overlap else "in_turn"
    return [pytest.param(overlap, i, marks=[] if i < fast else mark, id=f"{name}-{i}") for i in range(count)]


@pytest.mark.parametrize(("overlap", "number"), cases(True, 28, 150) + cases(False, 3, 30))
def test_whatever_happens_each_request_ends_once_with_its_own_output(overlap: bool, number: int) -> None:
    """7,200 schedules, 6,000 of them with overlap; 1,240 of all are not slow."""
    happened = Counter[str]()
    with capture_logs():  # steps that raise log a traceback, which takes longer than the schedule
        for seed in range(SCHEDULES * number, SCHEDULES * (number + 1)):
            try:
                happened += Schedule(seed, overlap).run()
            except BaseException as error:
                error.add_note(f"Schedule({seed}, {overlap})")
                raise
    expected = {"launch", "recompute", "swap", "fork", "cancel", "drop", "succeeded", "cancelled", "prefix hit"}
    assert set(happened) >= expected
    assert (happened["overlap"] > happened["launch"] / 2) == overlap
