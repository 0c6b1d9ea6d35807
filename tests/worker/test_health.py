"""The HTTP port: probes, and metrics that add up to the jobs that ran."""

from __future__ import annotations

import http.client
import math
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import EngineStats
from tests.support import eventually
from tests.worker.fakes import FakeEngine
from tests.worker.harness import Inside, Queue, inside
from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.result import Status
from tokenmill.protocol.scripts import Scripts
from worker.ops.exits import Exit
from worker.ops.health import Health
from worker.ops.probe import LOOPBACK, probe
from worker.ops.telemetry import Tally, Telemetry
from worker.ops.threads import Fatal


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def numbers(text: str) -> dict[str, float]:
    """`name{label="value"}` → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[sample.name.removeprefix("tokenmill_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def scrape(worker: Inside) -> dict[str, float]:
    assert worker.worker.health is not None
    status, text = get(worker.worker.health.port, "/metrics")
    assert status == 200
    return numbers(text)


@contextmanager
def port_of(not_ready: str | None, telemetry: Telemetry) -> Iterator[int]:
    health = Health(0, lambda: not_ready, telemetry.text)
    yield health.port
    health.close()


def test_every_series_exists_at_zero_and_no_job_can_choose_a_label() -> None:
    seen = numbers(Telemetry().text().decode())
    for status in Status:
        assert seen[f'jobs_ended_total{{status="{status}"}}'] == 0
    for code in ErrorCode:
        assert seen[f'job_errors_total{{code="{code}"}}'] == 0
    for name in ("leases_lost", "takeovers", "generation_tokens", "prompt_tokens", "prefix_cache_hits", "retries"):
        assert seen[f"{name}_total"] == 0
    for kind in ("swap", "recompute"):
        assert seen[f'num_preemptions_total{{kind="{kind}"}}'] == 0
    for name in ("step_seconds", "inter_token_latency_seconds", "cancel_latency_seconds"):
        assert seen[f"{name}_count"] == 0
    assert math.isnan(seen['queue_depth{lane="high"}'])
    for part in ("attention", "norm", "sampler", "graphs", "overlap"):
        assert seen[f'kernel_fallbacks{{kernel="{part}"}}'] == 0
    labels = {
        part.split("=")[0].strip('{"') for name in seen if "{" in name for part in name[name.index("{") :].split(",")
    }
    assert labels == {"status", "code", "kind", "lane", "le", "state", "doing", "thread", "kernel"}


def test_gauges_are_computed_at_each_scrape() -> None:
    telemetry = Telemetry()
    stats = EngineStats(running=3, total_blocks=10, free_blocks=4, cached_blocks=1)
    telemetry.live.engine = lambda: stats
    assert numbers(telemetry.text().decode())["num_requests_running"] == 3
    stats = EngineStats(total_blocks=10, free_blocks=10)
    seen = numbers(telemetry.text().decode())
    assert (seen["num_requests_running"], seen['kv_blocks{state="used"}'], seen["kv_cache_usage_perc"]) == (0, 0, 0)


def test_a_tally_is_a_histogram() -> None:
    tally = Tally((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        tally.add(value)
    samples = {s.labels.get("le", s.name): s.value for s in tally.family("x", "x").samples}
    assert (samples["0.1"], samples["1.0"], samples["+Inf"], samples["x_count"]) == (2, 3, 4, 4)
    assert samples["x_sum"] == pytest.approx(7.65)


def test_an_observation_makes_two_calls_however_many_buckets_there_are() -> None:
    for buckets in (5, 5000):
        tally, calls = Tally(tuple(float(i) for i in range(buckets))), []
        sys.setprofile(lambda _frame, event, _arg, calls=calls: calls.append(event))
        tally.add(2.5)
        sys.setprofile(None)
        assert calls.count("call") + calls.count("c_call") == 3  # `add`, the bisection, and `setprofile` itself


def test_a_probe_gets_an_answer_whatever_raises() -> None:
    telemetry = Telemetry()
    with port_of("draining", telemetry) as port:
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz") == (503, "draining\n")
        assert get(port, "/nothing")[0] == 404
        telemetry.live.backlog = lambda: 1 // 0
        assert get(port, "/metrics")[0] == 500
        telemetry.live.backlog = lambda: 0
        with socket.create_connection(("127.0.0.1", port)):  # says nothing, and keeps nobody waiting
            assert get(port, "/metrics")[0] == 200


def test_a_taken_port_is_reported_as_a_wrong_option() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        with pytest.raises(Fatal, match="--http-port") as error:
            Health(listener.getsockname()[1], lambda: None, lambda: b"")
    assert error.value.status is Exit.USAGE


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "::1"), ("[::1]", "::1")]
)
def test_the_port_is_open_at_http_host_only(host: str, own: str) -> None:
    health = Health(0, lambda: None, lambda: b"", host)
    assert get(health.port, "/healthz", own)[0] == 200
    with pytest.raises(OSError, match="refused"):
        get(health.port, "/healthz", "127.0.0.2")
    health.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_host_0_0_0_0_stands_for_every_address(host: str) -> None:
    health = Health(0, lambda: None, lambda: b"", host)
    for own in ("127.0.0.1", "127.0.0.2", *(["::1"] if host == "::" else [])):
        assert get(health.port, "/readyz", own)[0] == 200
    assert probe(health.port, LOOPBACK[host]) == (True, "ready")
    health.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "nowhere.invalid", "::2"])
def test_a_host_of_another_machine_is_reported_as_a_wrong_option(host: str) -> None:
    with pytest.raises(Fatal, match=r"^--http-host, --http-port: cannot listen on [^\n]+:0: [^\n\[]+$") as error:
        Health(0, lambda: None, lambda: b"", host)
    assert error.value.status is Exit.USAGE


def test_a_replaced_part_of_a_gpu_is_seen_in_the_metrics() -> None:
    telemetry = Telemetry()
    telemetry.live.fallbacks = lambda: {"attention": "triton: it does not compile"}
    seen = numbers(telemetry.text().decode())
    assert (seen['kernel_fallbacks{kernel="attention"}'], seen['kernel_fallbacks{kernel="graphs"}']) == (1, 0)


def test_a_job_that_waits_for_hours_is_within_the_histograms_bounds() -> None:
    telemetry = Telemetry()
    for tally in (telemetry.queue_time, telemetry.first_token, telemetry.total_time):
        assert max(tally.bounds) >= 3 * 86_400
        assert {600, 3600, 86_400} <= set(tally.bounds)
    for tally in (telemetry.step, telemetry.inter_token, telemetry.cancel_latency):
        assert max(tally.bounds) >= 600
    for tally in (telemetry.queue_time, telemetry.step):
        assert list(tally.bounds) == sorted(set(tally.bounds))


def test_the_metrics_add_up_to_the_jobs_that_ran(queue: Queue) -> None:
    with inside(queue, FakeEngine(step_seconds=0.002), http_port="0", cancel_poll_ms="5") as worker:
        assert worker.worker.health is not None
        port = worker.worker.health.port
        eventually(lambda: get(port, "/readyz")[0] == 200)
        jobs = [queue.add({"prompt": f"{i}", "max_tokens": 5}) for i in range(6)]
        broken = queue.add({"prompt": "x", "temperature": "hot"})
        cancelled = queue.add({"prompt": "long", "max_tokens": 250})
        eventually(lambda: any(f["type"] == "token" for _, f in queue.events(cancelled)))
        queue.cancel(cancelled)
        ended = [queue.check_ending(job) for job in (*jobs, broken, cancelled)]
        worker.at_rest()
        seen = scrape(worker)
        assert sum(seen[f'jobs_ended_total{{status="{status}"}}'] for status in Status) == len(ended)
        assert seen['jobs_ended_total{status="succeeded"}'] == 6
        assert seen['job_errors_total{code="invalid_request"}'] == 1
        assert seen["generation_tokens_total"] == sum(r["usage"]["completion_tokens"] or 0 for r in ended)
        assert seen["prompt_tokens_total"] == sum(len(p) for p in ["0"] * 6 + ["long"])
        assert (seen["cancel_latency_seconds_count"], seen["time_to_first_token_seconds_count"]) == (1, 7)
        assert seen["request_queue_time_seconds_count"] == 7
        assert seen["step_seconds_count"] == worker.engine.steps
        assert (seen["jobs_held"], seen["publish_backlog"], seen["num_requests_running"]) == (0, 0, 0)
        eventually(lambda: scrape(worker)['queue_depth{lane="normal"}'] == 0)


def test_a_worker_without_redis_is_not_ready_and_gives_the_reason(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    away = False
    real = redis.Redis.execute_command

    def execute(self: redis.Redis, *args: object, **options: object) -> object:
        if away:
            raise redis.ConnectionError("away")
        return real(self, *args, **options)

    with inside(queue, http_port="0", lease_seconds="1") as worker:
        assert worker.worker.health is not None
        port = worker.worker.health.port
        eventually(lambda: get(port, "/readyz")[0] == 200)
        monkeypatch.setattr(redis.Redis, "execute_command", execute)
        away = True
        eventually(lambda: get(port, "/readyz") == (503, "Redis does not answer\n"))
        assert get(port, "/healthz")[0] == 200
        seen = scrape(worker)
        assert seen["redis_up"] == 0
        assert seen['redis_errors_total{doing="read"}'] > 0
        away = False
        eventually(lambda: get(port, "/readyz")[0] == 200)


def test_a_hanging_engine_is_not_ready(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.ops.health.ENGINE_READY_SECONDS", 0.3)
    monkeypatch.setattr("worker.loop.TICK_SECONDS", 0.1)
    with inside(queue, FakeEngine(step_seconds=1.0), http_port="0") as worker:
        assert worker.worker.health is not None
        port = worker.worker.health.port
        eventually(lambda: get(port, "/readyz")[0] == 200)
        queue.add({"prompt": "x", "max_tokens": 1})
        eventually(lambda: get(port, "/readyz") == (503, "the engine makes no progress\n"))
        eventually(lambda: get(port, "/readyz")[0] == 200)


def test_jobs_taken_over_are_counted(queue: Queue) -> None:
    scripts = Scripts(queue.client, queue.keys, "dead")
    scripts.ensure_groups()
    job = queue.add({"prompt": "x", "max_tokens": 1})
    assert len(scripts.read(1) or ()) == 1
    with inside(queue, http_port="0", lease_seconds="0.5") as worker:
        assert queue.check_ending(job)["status"] == "succeeded"
        assert scrape(worker)["takeovers_total"] == 1


def test_a_pause_is_logged_and_measured_and_misspelt_fields_of_meta_are_logged(queue: Queue) -> None:
    with structlog.testing.capture_logs() as logs, inside(queue, http_port="0", lease_seconds="1") as worker:

        def events() -> list[str]:
            return [entry["event"] for entry in logs if "queue_" in entry["event"] or "meta" in entry["event"]]

        assert scrape(worker)["paused"] == 0
        queue.client.hset(queue.keys.meta, mapping={"paused": "True", "max_dept": "5"})
        eventually(lambda: len(events()) == 2)
        assert scrape(worker)["paused"] == 1
        job = queue.add({"prompt": "x", "max_tokens": 1})
        queue.client.hset(queue.keys.meta, "paused", "off")
        assert queue.check_ending(job)["status"] == "succeeded"
        eventually(lambda: len(events()) == 3)
        assert scrape(worker)["paused"] == 0
    assert events() == ["queue_paused", "meta_not_understood", "queue_resumed"]
    (told,) = [entry["message"] for entry in logs if entry["event"] == "meta_not_understood"]
    assert told == "unknown field 'max_dept': did you mean max_depth?"
