"""What the clerk says at its start."""

from __future__ import annotations

import pytest
from redis import Redis

from producer.clerk import warn_of_another_redis


@pytest.mark.parametrize(
    "url", ["redis://:sesame@queue.example.org/0", "redis://localhost:6380", "redis://localhost/1"]
)
def test_a_clerk_whose_rq_alone_has_another_redis_names_the_missing_variable(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_another_redis({}, Redis.from_url(url))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: TOKENMILL_REDIS is not set")
    assert "sesame" not in line


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("redis://localhost", {}),
        ("redis://127.0.0.1:6379/0", {}),
        ("redis://rq.example.org/0", {"TOKENMILL_REDIS": "redis://queue.example.org"}),
    ],
)
def test_a_clerk_with_one_redis_or_two_that_are_named_does_not_warn(
    url: str, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_another_redis(environ, Redis.from_url(url))
    assert capsys.readouterr().err == ""
