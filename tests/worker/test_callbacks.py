"""The stream of callbacks holds every job that ended and named an allowed URL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.fakes import FakeEngine
from tests.worker.harness import Queue, inside
from worker.jobs.results import kills_readers
from worker.settings import Settings

URL = "https://hooks.example.org/done?x=1"
HOSTS = "Hooks.Example.org, http://collector.internal:8080"


def called(queue: Queue) -> list[tuple[str, str]]:
    entries: Any = queue.client.xrange(queue.keys.callbacks)
    return [(fields[b"id"].decode(), fields[b"url"].decode()) for _, fields in entries]


FAILING: dict[str, tuple[bytes, dict[str, str], str]] = {
    "no JSON": (b"{", {}, "invalid_json"),
    "too large": (b'{"prompt":"' + b"x" * (2 << 20) + b'"}', {}, "too_large"),
    "version": (b'{"prompt":"x"}', {"v": "2"}, "unsupported_version"),
    "unknown field": (b'{"prompt":"x"}', {"attempt": "1"}, "invalid_request"),
    "unknown key": (b'{"prompt":"x","best_of":2}', {}, "invalid_request"),
    "malformed group": (b'{"prompt":"x"}', {"group": "a b"}, "invalid_request"),
    "malformed time": (b'{"prompt":"x"}', {"ttl_ms": "-1"}, "invalid_request"),
    "expired unread": (b'{"prompt":"x"}', {"ttl_ms": "1"}, "deadline_exceeded"),
    "model": (b'{"prompt":"x","model":"gpt-5"}', {}, "model_mismatch"),
    "can never fit": (b'{"prompt":"' + b"x" * 400 + b'"}', {}, "prompt_too_long"),
}


def test_a_job_that_fails_before_its_body_is_read_gets_its_callback(queue: Queue) -> None:
    jobs = {name: queue.add(body, **fields, callback=URL) for name, (body, fields, _) in FAILING.items()}
    cancelled = queue.add({"prompt": "x"}, callback=URL)
    queue.cancel(cancelled)
    queue.client.xadd(queue.keys.lane("normal"), {"id": "bodiless", "callback": URL})
    with inside(queue, callback_hosts=HOSTS):
        for name, (_, _, code) in FAILING.items():
            assert (name, queue.check_ending(jobs[name])["error"]["code"]) == (name, code)
        assert queue.check_ending(cancelled)["status"] == "cancelled"
        assert queue.check_ending("bodiless")["error"]["code"] == "invalid_request"
    assert sorted(called(queue)) == sorted((job, URL) for job in (*jobs.values(), cancelled, "bodiless"))


def test_a_job_that_is_given_up_unread_gets_its_callback(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.quarantine.Quarantine.may_read", lambda *_: False)
    job = queue.add({"prompt": "x"}, callback=URL)
    with inside(queue, callback_hosts=HOSTS):
        assert queue.check_ending(job)["error"]["code"] == kills_readers().code
    assert called(queue) == [(job, URL)]


@pytest.mark.parametrize(
    "url",
    [
        "https://[x",
        "https://hooks.example.org:99999/",
        "https://u:p@hooks.example.org/",
        "https://bücher.example/",
        "https://elsewhere.org/",
        "http://hooks.example.org/",
        "http://collector.internal/",
        "https://hooks.example.org\\@evil.org/",
        "ftp://hooks.example.org/",
        "https://hooks.example.org/" + "x" * 3000,
        "",
    ],
)
def test_a_callback_that_is_not_allowed_fails_its_job_and_is_never_called(queue: Queue, url: str) -> None:
    with inside(queue, callback_hosts=HOSTS):
        for body in ({"prompt": "x"}, b"{"):
            error = queue.check_ending(queue.add(body, callback=url))["error"]
            assert error["code"] == "invalid_request"
            assert "callback" in error["message"]
    assert called(queue) == []


@pytest.mark.parametrize(
    "url", ["https://HOOKS.example.ORG./x", "https://hooks.example.org:8443/", "http://collector.internal:8080/in"]
)
def test_an_allowed_host_is_recognised_in_every_spelling(queue: Queue, url: str) -> None:
    job = queue.add({"prompt": "x", "max_tokens": 2}, callback=url)
    with inside(queue, FakeEngine(), callback_hosts=HOSTS):
        assert queue.check_ending(job)["status"] == "succeeded"
    assert called(queue) == [(job, url)]


@pytest.mark.parametrize("entry", ["https://hooks.example.org/x", "*.example.org", "a b", "host:0"])
def test_a_callback_host_that_means_nothing_is_a_wrong_option(entry: str) -> None:
    with pytest.raises(ValueError, match="is not an entry"):
        Settings.model_validate({"model": "x", "callback_hosts": f"good.example,{entry}"})
