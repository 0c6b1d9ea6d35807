"""Measurements of one run over a workload, and their text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile, `share` in (0, 1]; NaN if there are no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass
class Run:
    """Measurements of one run; all times in seconds."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token: list[float] = field(default_factory=list)
    """For each request, the time from its submission to its first token."""
    inter_token: list[float] = field(default_factory=list)
    """Times between successive tokens of a request; for a request with known ends only, their mean."""
    gaps: str = "each"
    """Content of `inter_token`: `each` gap, or the `mean` of each request."""
    note: str = ""
    cpu: dict[str, float] = field(default_factory=dict)
    """Process → CPU seconds."""

    @property
    def output_rate(self) -> float:
        """Output tokens per second over the whole run."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second over the whole run."""
        return (self.output_tokens + self.prompt_tokens) / self.seconds


def spread(values: Sequence[float]) -> str:
    """Return p50/p90/p99 in milliseconds, as text."""
    if not values:
        return "-"
    return " / ".join(f"{percentile(values, share) * 1000:.0f}" for share in (0.5, 0.9, 0.99))


def line(run: Run) -> str:
    """Return a run as one line of text."""
    asked = f"{run.requests} requests, in {run.prompt_tokens}, out {run.output_tokens}"
    rates = f"{run.seconds:.1f} s, {run.output_rate:.1f} out tok/s, {run.total_rate:.1f} total tok/s"
    latency = (
        f"first token {spread(run.first_token)} ms, between tokens ({run.gaps}) {spread(run.inter_token)} ms "
        f"(p50/p90/p99{run.note})"
    )
    cpu = ", ".join(f"{name} {seconds / run.output_tokens * 1e6:.0f}" for name, seconds in run.cpu.items())
    return f"{run.name:<14} {asked}: {rates}; {latency}" + (f"; µs of CPU an output token: {cpu}" if cpu else "")


def ratio(queued: Sequence[Run], direct: Sequence[Run]) -> float:
    """Return the median output rate through Redis over the median offline rate."""
    return statistics.median(r.output_rate for r in queued) / statistics.median(r.output_rate for r in direct)
