"""A webhook is sent, signed, to allowed hosts, and to no other host."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from producer.webhook import Refused, Undelivered, WebhookSettings, is_public, post, resolve, retry_after_s
from tests.producer.receiver import Receiver, certificate, receiving

OPEN = WebhookSettings(
    hosts=frozenset({"localhost"}), secrets=(b"key",), timeout_s=5, dangerously_allow_http=True,
    dangerously_allow_private=True,
)  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "own")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1",
        "100.127.255.254", "169.254.169.254", "192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1", "203.0.113.9",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1",
        "fec0::1", "ff02::1", "2001:db8::1", "3fff::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "::ffff:169.254.169.254", "::ffff:100.64.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::7f00:1",
        "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::1",
    ],
)  # fmt: skip
def test_a_private_or_special_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


STRICT = WebhookSettings(hosts=frozenset({"hooks.example.org", "localhost", "127.1", "2130706433", "::1"}))


def test_a_url_that_must_not_be_called_is_refused_before_any_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    for url in (
        "http://hooks.example.org/",
        "https://evil.example.org/",
        "https://u@hooks.example.org/",
        "https://[::1/",
    ):
        with pytest.raises(Refused):
            post(STRICT, url, "j", b"{}")


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "[::1]"])
def test_an_allowed_name_with_a_private_address_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="not public"):
        resolve(STRICT, STRICT.target(f"https://{host}/"))


def test_a_host_with_a_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", (address, 443)) for address in ("1.1.1.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Refused, match="not public"):
        resolve(STRICT, STRICT.target("https://hooks.example.org/"))


def test_the_address_that_was_checked_is_the_one_that_is_called(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    lookups, real = [], socket.getaddrinfo

    def rebinding(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "hooks.example.org":
            lookups.append(host)
            return real("127.0.0.1" if len(lookups) == 1 else "127.66.66.66", *args, **kwargs)
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    settings = replace(OPEN, hosts=frozenset({"hooks.example.org"}))
    post(settings, receiver.url(host="hooks.example.org"), "j", b"{}")
    assert lookups == ["hooks.example.org"]
    assert receiver.received[0].headers["host"] == f"hooks.example.org:{receiver.port}"


def test_the_exact_body_is_signed_with_id_and_time_by_every_secret(receiver: Receiver) -> None:
    body = '{"text": "ünï"}'.encode()
    secret = base64.b64encode(b"\x00\xff" * 16).decode()
    settings = replace(OPEN, secrets=WebhookSettings.of({"TOKENMILL_CALLBACK_SECRET": f"plain whsec_{secret}"}).secrets)
    post(settings, receiver.url("/a?b=c"), "job-1", body)
    (got,) = receiver.received
    assert (got.path, got.body, got.headers["content-type"]) == ("/a?b=c", body, "application/json")
    signed = b".".join([b"job-1", got.headers["webhook-timestamp"].encode(), body])
    keys = (b"plain", b"\x00\xff" * 16)
    digests = [base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys]
    assert got.headers["webhook-signature"].split() == [f"v1,{digest}" for digest in digests]
    assert got.headers["webhook-id"] == "job-1"


def test_https_needs_a_certificate_of_a_known_authority(own: tuple[Path, Path]) -> None:
    with receiving(own) as receiver:
        post(replace(OPEN, ca_file=str(own[0]), dangerously_allow_http=False), receiver.url(), "j", b"{}")
        assert (receiver.received[0].sni, receiver.received[0].headers["host"]) == (
            "localhost",
            f"localhost:{receiver.port}",
        )
        with pytest.raises(Undelivered, match=r"(?i)certificate"):
            post(OPEN, receiver.url(), "j", b"{}")
        assert len(receiver.received) == 1


def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    other = certificate(tmp_path, "other", "hooks.example.org")
    with receiving(other) as receiver, pytest.raises(Undelivered, match=r"(?i)hostname mismatch|not valid for"):
        post(replace(OPEN, ca_file=str(other[0])), receiver.url(), "j", b"{}")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, status: int) -> None:
    receiver.answers = [status]
    with pytest.raises(Undelivered, match=str(status)):
        post(OPEN, receiver.url(), "j", b"{}")
    assert [one.path for one in receiver.received] == ["/hook"]


def test_the_status_code_decides_between_delivered_retry_and_give_up(receiver: Receiver) -> None:
    receiver.answers = [204, 500, 404, 410, 200]
    post(OPEN, receiver.url(), "j", b"{}")
    for _ in range(2):
        with pytest.raises(Undelivered) as failed:
            post(OPEN, receiver.url(), "j", b"{}")
        assert not failed.value.silent
    with pytest.raises(Refused, match="410"):
        post(OPEN, receiver.url(), "j", b"{}")


def whole_request(line: socket.socket) -> bytes:
    """Headers and the body `{}`: closing a connection with unread bytes resets it."""
    read = b""
    while not read.endswith(b"{}") and (piece := line.recv(65536)):
        read += piece
    return read


@contextmanager
def raw(answer: bytes, drip: bytes = b"") -> Iterator[str]:
    """The URL of a receiver that sends `answer`, then `drip` again and again; without that it hangs up."""
    stop = threading.Event()

    def serve(server: socket.socket) -> None:
        line, _ = server.accept()
        with line, suppress(OSError):
            whole_request(line)
            line.sendall(answer)
            while drip and not stop.wait(0.02):
                line.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        yield f"http://localhost:{server.getsockname()[1]}/"
        stop.set()
        thread.join()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        (b"", b"H"),
        (OK, b"X-Drip: 1\r\n"),
        (OK + b"X-Dr", b"i"),
        (OK + b"Content-Length: 100000\r\n\r\n", b"x"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (OK + b"\r\n", b"x"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_is_not_complete_in_time_is_no_delivery(answer: bytes, drip: bytes) -> None:
    with raw(answer, drip) as url, pytest.raises(Undelivered, match=r"in full within 0\.3 s") as failed:
        post(replace(OPEN, timeout_s=0.3), url, "j", b"{}")
    assert failed.value.silent


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 20",
        OK,
        OK + b"X-Broken: of",
        OK + b"X-Whole: 1\r\n",
        OK + b"Content-Length: 5\r\n\r\nxx",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nxx",
    ],
)
def test_an_answer_that_breaks_off_is_no_delivery(answer: bytes) -> None:
    with raw(answer) as url, pytest.raises(Undelivered):
        post(OPEN, url, "j", b"{}")


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"\r\n",
        OK + b"Content-Length: 2\r\n\r\nok",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\n\n",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
        OK + b"Content-Length: 1000000000\r\n\r\n" + 100_000 * b"x",
    ],
)
def test_a_whole_answer_is_a_delivery_whatever_its_body_says(answer: bytes) -> None:
    with raw(answer) as url:
        post(OPEN, url, "j", b"{}")


def test_the_look_up_of_the_name_is_within_the_deadline(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    clock, real = [0.0], socket.getaddrinfo

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 10
        return real(*args, **kwargs)

    monkeypatch.setattr("producer.webhook.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(Undelivered, match="in full within 5 s"):
        post(OPEN, receiver.url(), "j", b"{}")
    assert receiver.received == []


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0), ("", 0), ("120", 120), (" 7 ", 7), ("0", 0), ("86401", 86_400), ("9" * 5000, 86_400), ("-5", 0),
        ("1.5", 0), ("soon", 0), ("٣", 0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("Thu, 32 Jan 2099", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400), ("Friday, 31-Dec-49 23:59:59 GMT", 86_400),
        ("Fri Dec 31 23:59:59 9999", 86_400), ("Fri, 31 Dec 9999 23:59:59 +9999", 0),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date_and_a_day_at_most(value: str | None, seconds: float) -> None:
    assert retry_after_s(value) == seconds


def test_a_date_in_retry_after_counts_from_now() -> None:
    assert 50 < retry_after_s(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)) <= 60


@pytest.mark.parametrize("status", [429, 503, 302])
def test_retry_after_is_handed_on(receiver: Receiver, status: int) -> None:
    receiver.answers, receiver.headers = [status], {"Retry-After": "77"}
    with pytest.raises(Undelivered) as failed:
        post(OPEN, receiver.url(), "j", b"{}")
    assert failed.value.retry_after_s == 77


def test_the_id_that_is_signed_holds_no_dot(receiver: Receiver) -> None:
    for job_id in ("a.b..c", "a~b", "a-b_c"):
        post(OPEN, receiver.url(), job_id, b"{}")
    assert [one.headers["webhook-id"] for one in receiver.received] == ["a~b~~c", "a~b", "a-b_c"]
    for got in receiver.received:
        signed = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.{{}}".encode()
        digest = base64.b64encode(hmac.new(b"key", signed, hashlib.sha256).digest()).decode()
        assert got.headers["webhook-signature"] == f"v1,{digest}"


def test_an_origin_that_is_listed_may_be_inside_and_plain_http(receiver: Receiver) -> None:
    inside = WebhookSettings(hosts=frozenset({f"http://localhost:{receiver.port}"}), secrets=(b"key",), timeout_s=5)
    post(inside, receiver.url(), "j", b"{}")
    assert len(receiver.received) == 1
    for hosts in ({"localhost"}, {f"localhost:{receiver.port}"}, {"http://localhost:1"}, {"http://127.0.0.1"}):
        with pytest.raises(Refused):
            post(replace(inside, hosts=frozenset(hosts)), receiver.url(), "j", b"{}")
    assert len(receiver.received) == 1


def test_an_address_of_ipv6_is_called_and_named_in_brackets() -> None:
    asked: list[bytes] = []

    def serve(server: socket.socket) -> None:
        line, _ = server.accept()
        with line:
            asked.append(whole_request(line))
            line.sendall(OK + b"\r\n")

    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        origin = f"http://[::1]:{server.getsockname()[1]}"
        post(WebhookSettings(hosts=frozenset({origin}), secrets=(b"key",)), f"{origin}/x", "j", b"{}")
        thread.join()
    assert f"Host: {origin.removeprefix('http://')}\r\n".encode() in asked[0]


def test_tries_go_on_for_three_days_by_default() -> None:
    settings = WebhookSettings.of({})
    pauses = [settings.pause_s(tries) for tries in range(1, settings.max_attempts)]
    assert pauses == [5, 300, 1800, 7200, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600]
    assert settings.pause_s(1000) == 24 * 3600
    own = WebhookSettings.of({"TOKENMILL_CALLBACK_BACKOFF_SECONDS": "2"})
    assert [own.pause_s(tries) for tries in (1, 2, 3, 1000)] == [2, 6, 18, 24 * 3600]


def test_a_refused_connection_counts_as_silence(receiver: Receiver) -> None:
    receiver.close()
    with pytest.raises(Undelivered) as failed:
        post(OPEN, receiver.url(), "j", b"{}")
    assert failed.value.silent


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENMILL_CALLBACK_SECRET", "whsec_???"),
        ("TOKENMILL_CALLBACK_TIMEOUT_SECONDS", "soon"),
        ("TOKENMILL_CALLBACK_BACKOFF_SECONDS", "-1"),
        ("TOKENMILL_CALLBACK_LEASE_SECONDS", "5"),
        ("TOKENMILL_CALLBACK_MAX_ATTEMPTS", "nan"),
        ("TOKENMILL_CALLBACK_MAX_ATTEMPTS", "0.2"),
        ("TOKENMILL_CALLBACK_MAX_ATTEMPTS", "2.6"),
        ("TOKENMILL_CALLBACK_CA_FILE", "/nowhere.pem"),
        ("TOKENMILL_CALLBACK_CA_FILE", __file__),
        ("TOKENMILL_DANGEROUSLY_ALLOW_HTTP_CALLBACKS", "true"),
        ("TOKENMILL_DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS", "yes"),
        ("TOKENMILL_CALLBACK_HOSTS", "hooks.example.org,https://x/y"),
    ],
)
def test_a_setting_with_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        WebhookSettings.of({name: value})


def test_http_and_private_addresses_are_off_by_default() -> None:
    settings = WebhookSettings.of({"TOKENMILL_CALLBACK_HOSTS": " a.example , B.example"})
    assert settings.hosts == {"a.example", "b.example"}
    assert not settings.dangerously_allow_http
    assert not settings.dangerously_allow_private
