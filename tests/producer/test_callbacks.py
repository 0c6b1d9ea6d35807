"""Callbacks are delivered once, retried after a failure, or become dead letters; none is lost."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ReadOnlyError

from producer.callbacks import CLERKS, Courier, ensure_clerks
from producer.webhook import Undelivered, WebhookSettings
from tests.producer.receiver import Receiver, receiving
from tests.support import RedisServer, eventually
from tests.tokenmill.mini import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.job import Identity
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result, Status

pytestmark = pytest.mark.redis_server

SETTINGS = WebhookSettings(
    hosts=frozenset({"localhost"}), secrets=(b"key",), timeout_s=5, backoff_s=0.05, max_attempts=3,
    dangerously_allow_http=True, dangerously_allow_private=True,
)  # fmt: skip
Deliver = Callable[..., dict[str, int]]


@pytest.fixture
def queue(redis_server: RedisServer) -> Iterator[Queue]:
    client = command_client(redis_server.url)
    yield Queue(redis_server.url, client, Keys(f"q{secrets.token_hex(6)}"))
    client.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def deliver(queue: Queue) -> Iterator[Deliver]:
    """A courier of its own for each call, as each run of the clerk's job has; it runs until `until`."""
    with ExitStack() as opened:

        def one(until: Callable[[], Any], settings: WebhookSettings = SETTINGS, **more: Any) -> dict[str, int]:
            courier = Courier(queue.url, queue.keys, settings, block_ms=30, **more)
            opened.callback(courier.close)
            return courier.run(10, lambda: bool(until()))

        yield one


def ended(queue: Queue, job_id: str, url: str) -> bytes:
    """A job that ended and asked for a callback, as a worker ends it."""
    scripts = queue.scripts()
    ref = queue.deliver(scripts, job_id)
    result = Result(job_id, Status.FAILED)
    scripts.answer(ref, Identity(job_id), result, callback=url)
    return result.to_json()


def at_rest(queue: Queue) -> bool:
    """Nothing is in the stream, pending or put off."""
    pending: Any = queue.redis.xpending(queue.keys.callbacks, CLERKS)
    return not (
        queue.redis.xlen(queue.keys.callbacks) or pending["pending"] or queue.redis.zcard(queue.keys.callbacks_delayed)
    )


def dead(queue: Queue) -> list[dict[str, str]]:
    entries: Any = queue.redis.xrange(queue.keys.callbacks_dead)
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]


def test_the_result_is_delivered_once_and_never_again(queue: Queue, receiver: Receiver, deliver: Deliver) -> None:
    json = ended(queue, "a", receiver.url("/x"))
    assert deliver(lambda: receiver.received) == {"delivered": 1, "put_off": 0, "dead": 0}
    assert at_rest(queue)
    rounds = iter(range(5))
    assert deliver(lambda: next(rounds, None) is None) == {"delivered": 0, "put_off": 0, "dead": 0}
    (got,) = receiver.received
    assert (got.path, got.body, got.headers["webhook-id"]) == ("/x", json, "a")
    assert not queue.redis.xinfo_consumers(queue.keys.callbacks, CLERKS)


def test_a_failed_callback_is_retried_by_a_later_clerk(queue: Queue, receiver: Receiver, deliver: Deliver) -> None:
    ended(queue, "a", receiver.url())
    receiver.answers = [500, 404, 200]
    for tries in (1, 2, 3):
        deliver(lambda: len(receiver.received) >= tries)  # noqa: B023 - called at once
    assert at_rest(queue)
    assert {one.headers["webhook-id"] for one in receiver.received} == {"a"}
    assert len({one.body for one in receiver.received}) == 1
    assert dead(queue) == []


def test_a_callback_that_fails_too_often_becomes_a_dead_letter(
    queue: Queue, receiver: Receiver, deliver: Deliver
) -> None:
    ended(queue, "a", receiver.url())
    receiver.answers = [503]
    assert deliver(lambda: dead(queue)) == {"delivered": 0, "put_off": 2, "dead": 1}
    assert dead(queue) == [
        {"id": "a", "url": receiver.url(), "attempts": "3", "reason": "localhost answered 503"}
    ]  # fmt: skip
    assert len(receiver.received) == 3
    assert at_rest(queue)


def test_a_callback_to_a_forbidden_url_becomes_a_dead_letter_at_once(
    queue: Queue, receiver: Receiver, deliver: Deliver
) -> None:
    bad = [receiver.url(host="127.0.0.1"), "ftp://localhost/", "https://[", "nonsense", "https://u:p@localhost/"]
    for number, url in enumerate(bad):
        ended(queue, f"j{number}", url)
    queue.redis.xadd(queue.keys.callbacks, {"id": "never-was", "url": receiver.url()})
    queue.redis.xadd(queue.keys.callbacks, {"foreign": "fields"})
    deliver(lambda: len(dead(queue)) == len(bad) + 2)
    assert receiver.received == []
    assert at_rest(queue)
    assert {letter["id"]: letter["reason"] for letter in dead(queue)}["never-was"] == "the result has expired"


def test_a_result_outlives_the_pause_before_the_next_try(queue: Queue, receiver: Receiver, deliver: Deliver) -> None:
    ended(queue, "a", receiver.url())
    queue.redis.expire(queue.keys.result("a"), 60)
    receiver.answers, receiver.headers = [503], {"Retry-After": "5000"}
    deliver(lambda: queue.redis.zcard(queue.keys.callbacks_delayed), replace(SETTINGS, backoff_s=None))
    ((_, due),) = queue.redis.zrange(queue.keys.callbacks_delayed, 0, -1, withscores=True)
    seconds, _ = queue.redis.time()
    assert 4900 < due / 1000 - seconds < 6100
    assert queue.redis.ttl(queue.keys.result("a")) > due / 1000 - seconds + 80_000
    queue.redis.expire(queue.keys.result("a"), 10**6)
    queue.redis.zadd(queue.keys.callbacks_delayed, {"1 a " + receiver.url(): 0})
    deliver(lambda: len(receiver.received) == 2)
    assert queue.redis.ttl(queue.keys.result("a")) > 900_000


def test_redis_that_goes_away_ends_a_run_and_loses_nothing(
    queue: Queue, receiver: Receiver, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ReadOnlyError("READONLY You can't write against a read only replica.")

    ended(queue, "a", receiver.url())
    with monkeypatch.context() as patched:
        patched.setattr(Courier, "_settle", away)
        assert deliver(lambda: receiver.received)["delivered"] == 0
    deliver(lambda: at_rest(queue), replace(SETTINGS, lease_s=0.2, timeout_s=0.1))
    assert len(receiver.received) == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"id": "of-another-type"}, "no result"),
        ({"id": ""}, "the id"),
        ({"id": "a b"}, "the id"),
        ({"id": "a\r\nx: y"}, "the id"),
        ({"id": "世"}, "the id"),
        ({"id": "b", "url": "http://localhost/\x7f"}, "ASCII characters"),
    ],
)
def test_a_malformed_entry_ends_without_harm_to_other_entries(
    queue: Queue, receiver: Receiver, deliver: Deliver, fields: dict[Any, Any], reason: str
) -> None:
    if fields["id"] == "of-another-type":
        queue.redis.rpush(queue.keys.result(fields["id"]), "x")
    else:
        queue.redis.set(queue.keys.result(fields["id"]), "{}")
    queue.redis.xadd(queue.keys.callbacks, {"url": receiver.url(), **fields})
    ended(queue, "good", receiver.url())
    deliver(lambda: at_rest(queue), replace(SETTINGS, lease_s=0.2, timeout_s=0.1))
    assert [one.headers["webhook-id"] for one in receiver.received] == ["good"]
    assert [(letter["id"], reason in letter["reason"]) for letter in dead(queue)] == [(fields["id"], True)]


def test_a_count_of_tries_that_no_worker_wrote_counts_as_none(
    queue: Queue, receiver: Receiver, deliver: Deliver
) -> None:
    queue.redis.set(queue.keys.result("a"), "{}")
    queue.redis.xadd(queue.keys.callbacks, {"id": "a", "url": receiver.url(), "attempts": "9" * 5000})
    deliver(lambda: receiver.received)
    assert at_rest(queue)


def test_a_callback_may_have_any_number_of_tries(queue: Queue, deliver: Deliver) -> None:
    def send(*_: object) -> None:
        raise Undelivered("not now")

    queue.redis.set(queue.keys.result("a"), "{}")
    queue.redis.xadd(queue.keys.callbacks, {"id": "a", "url": "https://localhost/", "attempts": "1000"})
    settings = replace(SETTINGS, max_attempts=2000)
    tally = deliver(lambda: queue.redis.zcard(queue.keys.callbacks_delayed), settings, send=send)
    assert tally["put_off"] == 1


def test_a_private_address_is_not_called_unless_it_is_allowed(
    queue: Queue, receiver: Receiver, deliver: Deliver
) -> None:
    ended(queue, "a", receiver.url())
    deliver(lambda: dead(queue), replace(SETTINGS, dangerously_allow_private=False))
    assert receiver.received == []
    assert "not public" in dead(queue)[0]["reason"]


def test_the_entries_of_a_dead_clerk_are_delivered_after_a_lease(
    queue: Queue, receiver: Receiver, deliver: Deliver
) -> None:
    ended(queue, "a", receiver.url())
    ensure_clerks(queue.redis, queue.keys)
    streams: dict[Any, Any] = {queue.keys.callbacks: ">"}
    assert queue.redis.xreadgroup(CLERKS, "killed", streams)
    deliver(lambda: receiver.received, replace(SETTINGS, lease_s=0.2, timeout_s=0.1))
    assert at_rest(queue)
    assert len(receiver.received) == 1


def test_two_clerks_share_the_callbacks_and_deliver_each_once(queue: Queue, receiver: Receiver) -> None:
    for number in range(40):
        ended(queue, f"j{number}", receiver.url())
    couriers = [Courier(queue.url, queue.keys, SETTINGS, block_ms=30) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        tallies = list(pool.map(lambda courier: courier.run(10, lambda: len(receiver.received) >= 40), couriers))
    for courier in couriers:
        courier.close()
    assert sum(tally["delivered"] for tally in tallies) == 40
    assert sorted(one.headers["webhook-id"] for one in receiver.received) == sorted(f"j{n}" for n in range(40))
    assert at_rest(queue)


def test_a_silent_host_is_not_called_for_a_while_and_delays_no_other_host(queue: Queue, deliver: Deliver) -> None:
    calls: list[str] = []

    def send(_: WebhookSettings, url: str, job_id: str, __: bytes) -> None:
        calls.append(job_id)
        if "silent" in url:
            raise Undelivered("no answer", silent=True)

    for number in range(30):
        ended(queue, f"s{number}", "https://silent.example/")
    ended(queue, "last", "https://loud.example/")
    settings = replace(SETTINGS, backoff_s=1000)
    tally = deliver(lambda: "last" in calls, settings, send=send)
    assert (tally["delivered"], tally["dead"]) == (1, 0)
    # Only calls that had begun when the first one got no answer were tried; the remaining callbacks have no try less.
    tried = [call for call in calls if call != "last"]
    assert len(tried) <= 16
    members: Any = queue.redis.zrange(queue.keys.callbacks_delayed, 0, -1)
    assert sorted(member.split()[0] for member in members) == sorted([b"1"] * len(tried) + [b"0"] * (30 - len(tried)))


def test_a_missing_setting_stops_delivery_and_loses_nothing(queue: Queue, receiver: Receiver, deliver: Deliver) -> None:
    ended(queue, "a", receiver.url())
    with pytest.raises(ValueError, match="TOKENMILL_CALLBACK_SECRET"):
        deliver(lambda: False, replace(SETTINGS, secrets=(), lease_s=0.2, timeout_s=0.1))
    deliver(lambda: receiver.received, replace(SETTINGS, lease_s=0.2, timeout_s=0.1))
    assert len(receiver.received) == 1


def test_a_missing_setting_is_no_error_while_no_callback_waits(queue: Queue, deliver: Deliver) -> None:
    rounds = iter(range(3))
    assert sum(deliver(lambda: next(rounds, None) is None, WebhookSettings()).values()) == 0


def test_a_run_that_stops_finishes_the_calls_that_it_began(queue: Queue, receiver: Receiver, deliver: Deliver) -> None:
    ended(queue, "a", receiver.url())
    receiver.answers = [None]
    threading.Timer(0.3, receiver.release).start()
    assert deliver(lambda: receiver.received)["delivered"] == 1
    assert eventually(lambda: at_rest(queue))
