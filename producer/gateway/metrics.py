"""The metrics of a gateway, for Prometheus. No label holds a tenant, a key or an id."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_PREFIX = "tokenmill_gateway_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters, gauges and histograms in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            _PREFIX + "requests", "Answered requests by route and status code.", ["route", "status"], registry=registry
        )
        self.requests.labels("unknown", "404")  # so that the series exists from the start
        self.in_flight = Gauge(_PREFIX + "requests_in_flight", "Requests that are being served.", registry=registry)
        self.streams = Gauge(_PREFIX + "streams_open", "Open event streams.", registry=registry)
        self.first_token = Histogram(
            _PREFIX + "first_token_seconds",
            "Time from a request to its first token, of streams.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.disconnects = Counter(
            _PREFIX + "cancelled_by_disconnect", "Jobs cancelled because their client went away.", registry=registry
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
