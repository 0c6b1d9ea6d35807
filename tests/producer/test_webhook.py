"""A webhook reaches whom it may reach, signed, and nobody else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from producer.webhook import Refused, Target, Undelivered, WebhookSettings, is_public, post, resolve
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
def test_an_address_inside_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


STRICT = WebhookSettings(hosts=frozenset({"hooks.example.org", "localhost", "127.1", "2130706433", "::1"}))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://hooks.example.org/", "not https"),
        ("ftp://hooks.example.org/", "not https"),
        ("//hooks.example.org/", "not https"),
        ("https://evil.example.org/", "not on the list"),
        ("https://hooks.example.org.evil.org/", "not on the list"),
        ("https://sub.hooks.example.org/", "not on the list"),
        ("https://hooks.example.org@evil.org/", "names a user"),
        ("https://user:pass@hooks.example.org/", "names a user"),
        ("https://evil.org\\@hooks.example.org/", "names a user"),
        ("https://hooks.example.org:99999/", "not a URL"),
        ("https://[::1/", "not a URL"),
        ("https://hooks.example.org/\r\nx: y", "characters"),
        ("https://hooks.example.org/ü", "characters"),
        ("https:///x", "not on the list"),
    ],
)
def test_a_url_that_must_not_be_called_is_refused_before_any_look_up(
    monkeypatch: pytest.MonkeyPatch, url: str, why: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(Refused, match=why):
        Target.of(STRICT, url)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "[::1]"])
def test_a_listed_name_of_an_address_inside_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="not public"):
        resolve(STRICT, Target.of(STRICT, f"https://{host}/"))


def test_one_address_inside_among_public_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", (address, 443)) for address in ("1.1.1.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Refused, match="not public"):
        resolve(STRICT, Target.of(STRICT, "https://hooks.example.org/"))


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


def test_https_goes_to_who_a_known_authority_vouches_for(own: tuple[Path, Path]) -> None:
    with receiving(own) as receiver:
        post(replace(OPEN, ca_file=str(own[0]), dangerously_allow_http=False), receiver.url(), "j", b"{}")
        assert (receiver.received[0].sni, receiver.received[0].headers["host"]) == (
            "localhost",
            f"localhost:{receiver.port}",
        )
        with pytest.raises(Undelivered, match=r"(?i)certificate"):
            post(OPEN, receiver.url(), "j", b"{}")
        assert len(receiver.received) == 1


def test_a_certificate_of_another_name_is_not_taken(tmp_path: Path) -> None:
    other = certificate(tmp_path, "other", "hooks.example.org")
    with receiving(other) as receiver, pytest.raises(Undelivered, match=r"(?i)hostname mismatch|not valid for"):
        post(replace(OPEN, ca_file=str(other[0])), receiver.url(), "j", b"{}")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, status: int) -> None:
    receiver.answers = [status]
    with pytest.raises(Undelivered, match=str(status)):
        post(OPEN, receiver.url(), "j", b"{}")
    assert [one.path for one in receiver.received] == ["/hook"]


def test_an_answer_decides_what_comes_next(receiver: Receiver) -> None:
    receiver.answers = [204, 500, 404, 410, 200]
    post(OPEN, receiver.url(), "j", b"{}")
    for _ in range(2):
        with pytest.raises(Undelivered) as failed:
            post(OPEN, receiver.url(), "j", b"{}")
        assert not failed.value.silent
    with pytest.raises(Refused, match="410"):
        post(OPEN, receiver.url(), "j", b"{}")


def test_an_answer_that_drips_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip() -> None:
            line, _ = server.accept()
            with line:
                while not stop.wait(0.05):
                    try:
                        line.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://localhost:{server.getsockname()[1]}/"
        with pytest.raises(Undelivered):
            post(replace(OPEN, timeout_s=0.3), url, "j", b"{}")
        stop.set()
        thread.join()


def test_nobody_at_the_door_is_silence(receiver: Receiver) -> None:
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
    ],
)
def test_a_senseless_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        WebhookSettings.of({name: value})


def test_nothing_dangerous_is_allowed_unless_it_is_named() -> None:
    settings = WebhookSettings.of({"TOKENMILL_CALLBACK_HOSTS": " a.example , B.example"})
    assert settings.hosts == {"a.example", "b.example"}
    assert not settings.dangerously_allow_http
    assert not settings.dangerously_allow_private
