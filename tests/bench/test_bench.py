"""The benchmark measures what it says: fixed workloads, right percentiles, a command that runs."""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
import sys

import pytest

from bench.measure import Run, percentile, ratio
from bench.workloads import WORKLOADS
from tests.support import output_of


@pytest.mark.parametrize(
    ("name", "digest", "given", "generated"),
    [
        ("mixed", "1dda6bd77ccaa60b", 27_298, 13_389),
        ("shared", "744c96a3c0ff662d", 70_823, 7_364),
        ("single", "000b694892117974", 32, 256),
    ],
)
def test_a_workload_never_changes(name: str, digest: str, given: int, generated: int) -> None:
    """Figures of different days and systems are comparable only because the ids are the same."""
    items = WORKLOADS[name]()
    ids = [(list(item.prompt), item.output_tokens) for item in items]
    assert hashlib.sha256(repr(ids).encode()).hexdigest()[:16] == digest
    assert sum(len(item.prompt) for item in items) == given
    assert sum(item.output_tokens for item in items) == generated


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [3.0, 5.0, 5.0, 5.0]
    assert percentile([7.0], 0.5) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_the_ratio_compares_medians_of_rates() -> None:
    def took(seconds: float) -> Run:
        return Run("", 1, 10, 100, seconds)

    assert ratio([took(2.0), took(2.0), took(9.0)], [took(1.0), took(0.1), took(1.0)]) == pytest.approx(0.5)


def test_help_names_every_option() -> None:
    shown = output_of([sys.executable, "-m", "bench", "engine", "--help"])
    for option in ("--workload", "--only", "--rounds", "--readers", "--limit"):
        assert option in shown


@pytest.mark.model
@pytest.mark.redis_server
@pytest.mark.usefixtures("redis_server")
@pytest.mark.parametrize("extra", [[], pytest.param(["--readers"], marks=pytest.mark.slow)])
def test_the_engine_benchmark_runs_both_ways_and_gives_the_ratio(extra: list[str]) -> None:
    command = [sys.executable, "-m", "bench", "engine", "--workload", "shared", "--limit", "2"]
    command += ["--kv-cache-memory", "256MiB", *extra]
    shown = output_of(command)
    assert len(re.findall(r"2 requests, in \d+, out \d+: .* out tok/s, .* first token \d", shown)) == 2
    assert re.search(r"shared: through Redis / offline = \d\.\d{3}", shown)


@pytest.mark.redis_server
@pytest.mark.usefixtures("redis_server")
def test_the_gateway_benchmark_reads_streams_both_ways_and_gives_the_ratios() -> None:
    command = [sys.executable, "-m", "bench", "gateway", "--clients", "3", "--tokens", "4", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a ratio is above its limit, as on a busy machine
    assert len(re.findall(r"round 1 (?:HTTP|Redis) ?: first token", done.stdout)) == 2, done.stdout + done.stderr
    assert done.stdout.count(", ratio ") == 4
    assert "memory of the gateway: " in done.stdout
