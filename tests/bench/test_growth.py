"""The growth benchmark measures decode-only steps of a real engine, and draws them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.growth import Bench, Point, Series, draw


def test_a_series_is_drawn_as_png(tmp_path: Path) -> None:
    points = tuple(Point(x, 100.0 * x, 0.5, 10.0) for x in (0, 1, 10))
    draw(Series("waiting", "waiting jobs", points), tmp_path / "new" / "growth.png")
    assert (tmp_path / "new" / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.model
def test_a_point_times_decode_steps_and_leaves_the_engine_empty() -> None:
    bench = Bench("smollm2-135m", 4, context=64)
    for waiting in (0, 3):
        point = bench.point(waiting, count=4, prompt=20, waiting=waiting)
        assert point.x == waiting
        assert 0 < point.overhead < point.step
        assert point.rate == pytest.approx(4000 / point.step)
        assert not bench.engine.has_work
        assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks
