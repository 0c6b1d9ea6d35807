"""Whatever is killed during a batch over HTTP: each line has exactly one answer, the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.producer.gateway.chaos import chaos


@pytest.mark.redis_server
@pytest.mark.timeout(400)
def test_a_batch_is_complete_after_kills_of_gateway_clerk_worker_and_redis(tmp_path: Path) -> None:
    with chaos(tmp_path, seed=1, lines=200, max_kills=8) as run:
        run.run(timeout=300)
        assert run.kills


@pytest.mark.redis_server
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 11))
def test_a_batch_of_500_lines_is_complete_after_kills(tmp_path: Path, seed: int) -> None:
    with chaos(tmp_path, seed, lines=500) as run:
        run.run(timeout=800)
