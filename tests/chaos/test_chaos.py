"""Whatever happens to workers, connections and Redis: every job has exactly one result, the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import chaos


@pytest.mark.redis_server
@pytest.mark.parametrize("seed", [1])
def test_no_job_is_lost_doubled_or_changed_by_chaos(tmp_path: Path, seed: int) -> None:
    with chaos(tmp_path, seed) as run:
        run.run(seconds=10)
        assert sum(run.events.values()) >= 5


@pytest.mark.redis_server
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_no_job_is_lost_doubled_or_changed_by_minutes_of_chaos(tmp_path: Path, seed: int) -> None:
    with chaos(tmp_path, seed) as run:
        run.run(seconds=120)
