"""What the worker counts and measures, and how Prometheus reads it.

Threads add to plain numbers; everything else (gauges, the engine's counters) is computed when somebody asks, so it
stays true while the worker is idle. Names follow vLLM's where they mean the same. Every series exists at zero, and no
label takes a value that a job can choose.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import EngineStats
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.keys import LANES
from tokenmill.protocol.result import Result, Status
from worker.ops.threads import cpu_seconds

log = structlog.get_logger()

PREFIX = "tokenmill_"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds in seconds of what usually takes a step; a preempted sequence or an outage makes it minutes."""
_SLOW = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 86_400.0, 259_200.0),
)
"""Bounds in seconds of what includes the wait in the queue: a nightly batch waits for hours, a backlog for days."""
REDIS_DOINGS = ("read", "start", "publish", "renew", "cancel")
"""Whose Redis errors are counted apart."""
THREADS = ("main", "engine", "intake", "keeper", "canceller", "publisher", "starter")
"""Whose CPU time is counted apart; `other` are OpenMP's threads, for the most part."""


class Tally:
    """A histogram that one thread adds to: 0.3 µs an observation, a tenth of prometheus-client's."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add_all(self, many: Sequence[float]) -> None:
        """Several observations at once, for a third of the price."""
        bounds, counts = self.bounds, self.counts
        for seconds in many:
            counts[bisect_left(bounds, seconds)] += 1
        self.total += sum(many)

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        labels = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return HistogramMetricFamily(
            name, text, buckets=list(zip(labels, accumulate(self.counts), strict=True)), sum_value=self.total
        )


class Live:
    """What is looked up at each scrape; the worker sets these as its parts come up."""

    def __init__(self) -> None:
        self.engine: Callable[[], EngineStats] = EngineStats
        self.backlog: Callable[[], int] = lambda: 0
        self.redis_up: Callable[[], bool] = lambda: False
        self.held: Callable[[], int] = lambda: 0
        self.redis_errors: Callable[[], dict[str, int]] = dict


class Telemetry:
    """One worker's metrics. Nothing in here raises into the caller: numbers are added, and that is all."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.live = Live()
        self.depth: dict[str, int] = {}
        """Entries of each lane as the keeper saw them last; empty while Redis is away."""
        self.paused = False
        """Whether the queue's `meta` says so, as the keeper saw it last."""
        # Added to by the engine's thread:
        self.prompt_tokens = 0
        self.step = Tally(_FAST)
        self.queue_time = Tally(_SLOW)
        self.generation_tokens = 0
        # Added to by the publisher:
        self.first_token = Tally(_SLOW)
        self.inter_token = Tally(_FAST)
        self.total_time = Tally(_SLOW)
        self.cancel_latency = Tally(_FAST)
        self.leases_lost = self._counter("leases_lost", "Jobs that this worker held and lost.")
        self.takeovers = self._counter("takeovers", "Entries taken over: handed back or abandoned by others.")
        self.retries = self._counter("retries", "Jobs handed back because their failure may pass.")
        self._ended = self._counter("jobs_ended", "Results written, by status.", "status", list(Status))
        self._errors = self._counter("job_errors", "Results written with an error, by code.", "code", list(ErrorCode))
        dead = (ErrorCode.GAVE_UP, ErrorCode.NO_ID)
        self.dead_letters = self._counter("dead_letters", "Entries sent to the stream of dead letters.", "code", dead)
        self.suspects = self._counter("suspects", "Jobs run alone because they may kill their worker.")
        self.registry.register(_Scrape(self))

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        counter = Counter(PREFIX + name, text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(str(value))
        return counter

    def ended(self, result: Result) -> None:
        """A result was written."""
        self._ended.labels(result.status.value).inc()
        if result.error is not None:
            self._errors.labels(str(result.error.code)).inc()
        if result.timings.total_ms is not None:
            self.total_time.add(result.timings.total_ms / 1000)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Scrape(Collector):
    """Families computed at each scrape."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from self._families()

    def _families(self) -> Iterator[Metric]:
        telemetry, live = self._telemetry, self._telemetry.live
        stats = live.engine()
        depth = GaugeMetricFamily(
            PREFIX + "queue_depth", "Jobs of a lane, waiting and running; NaN while Redis is away.", labels=["lane"]
        )
        for lane in LANES:
            depth.add_metric([lane], telemetry.depth.get(lane, float("nan")))
        yield depth
        yield from _engine(stats)
        yield _gauge("paused", "1 where the queue is paused: no worker reads new jobs.", int(telemetry.paused))
        yield _gauge("jobs_held", "Jobs that this worker has read and not ended.", live.held())
        yield _gauge("publish_backlog", "Outputs of the engine that are not in Redis yet.", live.backlog())
        yield _gauge("redis_up", "1 where Redis answers.", int(live.redis_up()))
        errors = CounterMetricFamily(
            PREFIX + "redis_errors", "Commands that Redis did not do, by what for.", labels=["doing"]
        )
        seen = live.redis_errors()
        for doing in REDIS_DOINGS:
            errors.add_metric([doing], seen.get(doing, 0))
        yield errors
        cpu = CounterMetricFamily(PREFIX + "thread_cpu_seconds", "CPU time of the worker's threads.", labels=["thread"])
        for thread, seconds in cpu_seconds(THREADS).items():
            cpu.add_metric([thread], seconds)
        yield cpu
        yield _count("prompt_tokens", "Prompt tokens of jobs started.", telemetry.prompt_tokens)
        yield _count("generation_tokens", "Tokens generated.", telemetry.generation_tokens)
        for tally, name, text in (
            (telemetry.step, "step_seconds", "Duration of one engine step."),
            (telemetry.queue_time, "request_queue_time_seconds", "From a job's entry to its start."),
            (telemetry.first_token, "time_to_first_token_seconds", "From a job's entry to its first token."),
            (telemetry.inter_token, "inter_token_latency_seconds", "Between two pieces of text of one job."),
            (telemetry.total_time, "e2e_request_latency_seconds", "From a job's entry to its end."),
            (telemetry.cancel_latency, "cancel_latency_seconds", "From seeing a cancel key to the end of its job."),
        ):
            yield tally.family(PREFIX + name, text)


def _engine(stats: EngineStats) -> Iterator[Metric]:
    """What the engine knows of itself."""
    for name, value in (("waiting", stats.waiting), ("running", stats.running), ("swapped", stats.swapped)):
        yield _gauge(f"num_requests_{name}", f"Sequences that are {name.upper()}.", value)
    blocks = GaugeMetricFamily(
        PREFIX + "kv_blocks", "KV blocks; cached ones are free but hold a findable prefix.", labels=["state"]
    )
    used = stats.total_blocks - stats.free_blocks
    for state, count in (
        ("used", used),
        ("free", stats.free_blocks - stats.cached_blocks),
        ("cached", stats.cached_blocks),
    ):
        blocks.add_metric([state], count)
    yield blocks
    yield _gauge("kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", used / max(1, stats.total_blocks))
    preempted = CounterMetricFamily(
        PREFIX + "num_preemptions", "Preemptions, by what became of the blocks.", labels=["kind"]
    )
    preempted.add_metric(["recompute"], stats.preemptions_recompute)
    preempted.add_metric(["swap"], stats.preemptions_swap)
    yield preempted
    yield _count("engine_steps", "Steps that computed something.", stats.steps)
    yield _count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
    yield _count("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)
