"""The worker's metrics.

Threads add to plain numbers; gauges and the engine's counters are computed at each scrape, so that they are right while
the worker is idle. A metric that vLLM has, too, has vLLM's name. Every series exists from the start, at zero, and no
label has a value that a job can choose.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import EngineStats
from engine.start.serving import PARTS
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.keys import LANES
from tokenmill.protocol.result import Result, Status
from worker.ops.threads import cpu_seconds

log = structlog.get_logger()

PREFIX = "tokenmill_"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bucket bounds, in seconds, of durations of about a step; a preemption or an outage makes them minutes."""
_SLOW = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 86_400.0, 259_200.0),
)
"""Bucket bounds, in seconds, of durations with the wait in the queue: hours for a nightly batch, days in a backlog."""
REDIS_DOINGS = ("read", "start", "publish", "renew", "cancel")
"""Values of the label `doing`: the purpose of a Redis command that failed."""
THREADS = ("main", "engine", "intake", "keeper", "canceller", "publisher", "starter")
"""Values of the label `thread`; `other` is added for all other threads, mostly OpenMP's."""


class Tally:
    """A histogram written by one thread: 0.3 µs an observation, a tenth of what prometheus-client takes."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add_all(self, many: Sequence[float]) -> None:
        """Count several observations, in a third of the time."""
        bounds, counts = self.bounds, self.counts
        for seconds in many:
            counts[bisect_left(bounds, seconds)] += 1
        self.total += sum(many)

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return the histogram as prometheus-client writes it; `text`: its help."""
        labels = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return HistogramMetricFamily(
            name, text, buckets=list(zip(labels, accumulate(self.counts), strict=True)), sum_value=self.total
        )


class Live:
    """Functions called at each scrape; the worker sets them when its parts have started."""

    def __init__(self) -> None:
        self.engine: Callable[[], EngineStats] = EngineStats
        self.backlog: Callable[[], int] = lambda: 0
        self.redis_up: Callable[[], bool] = lambda: False
        self.held: Callable[[], int] = lambda: 0
        self.redis_errors: Callable[[], dict[str, int]] = dict
        self.fallbacks: Callable[[], Mapping[str, str]] = dict


class Telemetry:
    """The metrics of one worker. Counting never raises."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.live = Live()
        self.depth: dict[str, int] = {}
        """Lane → entries, as the keeper read them last; empty while Redis is away."""
        self.paused = False
        """Whether the queue is paused, as the keeper read it last."""
        # Written by the engine's thread:
        self.prompt_tokens = 0
        self.step = Tally(_FAST)
        self.queue_time = Tally(_SLOW)
        self.generation_tokens = 0
        # Written by the publisher's thread:
        self.first_token = Tally(_SLOW)
        self.inter_token = Tally(_FAST)
        self.total_time = Tally(_SLOW)
        self.cancel_latency = Tally(_FAST)
        self.leases_lost = self._counter(
            "leases_lost",
            "Jobs that another worker took over, or whose entry was deleted, while this worker held them.",
        )
        self.takeovers = self._counter(
            "takeovers", "Entries taken over from other workers: handed back, or left by a worker that died."
        )
        self.retries = self._counter("retries", "Jobs handed back after a retryable error.")
        self._ended = self._counter("jobs_ended", "Results written, by status.", "status", list(Status))
        self._errors = self._counter("job_errors", "Results written with an error, by code.", "code", list(ErrorCode))
        dead = (ErrorCode.GAVE_UP, ErrorCode.NO_ID)
        self.dead_letters = self._counter("dead_letters", "Entries moved to the stream of dead letters.", "code", dead)
        self.suspects = self._counter("suspects", "Jobs that ran alone because they may kill their worker.")
        self.registry.register(_Scrape(self))

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        counter = Counter(PREFIX + name, text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(str(value))
        return counter

    def ended(self, result: Result) -> None:
        """Count a result that was written."""
        self._ended.labels(result.status.value).inc()
        if result.error is not None:
            self._errors.labels(str(result.error.code)).inc()
        if result.timings.total_ms is not None:
            self.total_time.add(result.timings.total_ms / 1000)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Scrape(Collector):
    """Computes metrics at each scrape."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from self._families()

    def _families(self) -> Iterator[Metric]:
        telemetry, live = self._telemetry, self._telemetry.live
        yield from self._queue()
        yield from _engine(live.engine())
        yield _gauge("jobs_held", "Jobs that this worker has read and not ended.", live.held())
        yield _gauge("publish_backlog", "Outputs of the engine that are not in Redis yet.", live.backlog())
        yield from self._redis()
        yield _fallbacks(live.fallbacks())
        cpu = CounterMetricFamily(
            PREFIX + "thread_cpu_seconds",
            "CPU time of the worker's threads; `other` are mostly OpenMP's.",
            labels=["thread"],
        )
        for thread, seconds in cpu_seconds(THREADS).items():
            cpu.add_metric([thread], seconds)
        yield cpu
        yield _count("prompt_tokens", "Prompt tokens of started jobs.", telemetry.prompt_tokens)
        yield _count("generation_tokens", "Generated tokens.", telemetry.generation_tokens)
        yield from self._durations()

    def _queue(self) -> Iterator[Metric]:
        text = "Waiting and running jobs of a lane; NaN while Redis is away."
        depth = GaugeMetricFamily(PREFIX + "queue_depth", text, labels=["lane"])
        for lane in LANES:
            depth.add_metric([lane], self._telemetry.depth.get(lane, float("nan")))
        yield depth
        text = "1 if the queue is paused, so that no worker reads new jobs, else 0."
        yield _gauge("paused", text, int(self._telemetry.paused))

    def _redis(self) -> Iterator[Metric]:
        live = self._telemetry.live
        yield _gauge("redis_up", "1 if Redis answers, else 0.", int(live.redis_up()))
        text = "Redis commands that failed, by their purpose."
        errors = CounterMetricFamily(PREFIX + "redis_errors", text, labels=["doing"])
        seen = live.redis_errors()
        for doing in REDIS_DOINGS:
            errors.add_metric([doing], seen.get(doing, 0))
        yield errors

    def _durations(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        for tally, name, text in (
            (telemetry.step, "step", "Duration of one engine step."),
            (telemetry.queue_time, "request_queue_time", "Time from a job's entry to its start."),
            (telemetry.first_token, "time_to_first_token", "Time from a job's entry to its first token."),
            (telemetry.inter_token, "inter_token_latency", "Time between two pieces of text of one job."),
            (telemetry.total_time, "e2e_request_latency", "Time from a job's entry to its end."),
            (telemetry.cancel_latency, "cancel_latency", "Time from seeing a cancel key to the end of its job."),
        ):
            yield tally.family(f"{PREFIX}{name}_seconds", text)


def _fallbacks(found: Mapping[str, str]) -> GaugeMetricFamily:
    text = "1 if this part of a GPU's kernels failed its check and was replaced, so that steps are slower, else 0."
    family = GaugeMetricFamily(PREFIX + "kernel_fallbacks", text, labels=["kernel"])
    for part in PARTS:
        family.add_metric([part], int(part in found))
    return family


def _engine(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics that are computed from the engine's counters."""
    for name, value in (("waiting", stats.waiting), ("running", stats.running), ("swapped", stats.swapped)):
        yield _gauge(f"num_requests_{name}", f"Sequences that are {name.upper()}.", value)
    blocks = GaugeMetricFamily(
        PREFIX + "kv_blocks",
        "KV blocks; a cached block is free, and holds a prefix that can be reused.",
        labels=["state"],
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
        PREFIX + "num_preemptions",
        "Preemptions: the blocks were swapped to host memory, or are recomputed.",
        labels=["kind"],
    )
    preempted.add_metric(["recompute"], stats.preemptions_recompute)
    preempted.add_metric(["swap"], stats.preemptions_swap)
    yield preempted
    yield _count("engine_steps", "Steps that computed something.", stats.steps)
    yield _count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
    yield _count("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)
