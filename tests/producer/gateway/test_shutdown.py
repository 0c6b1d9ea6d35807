"""Signals and exit statuses of `tokenmill gateway`."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.producer.gateway.sockets import GENEROUS_S, REDIS_AWAY, Served, ended, read_all, read_answer
from tests.support import eventually


def test_sigterm_stops_accepting_and_lets_streams_end_by_themselves(serving: Any) -> None:
    served = serving()
    with served.connect() as sock, served.connect() as idle:
        sock.sendall(b"GET /ticks?count=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        served.popen.send_signal(signal.SIGTERM)
        assert ended(idle)
        with pytest.raises(ConnectionError):
            eventually(lambda: served.connect().close(), GENEROUS_S)
        assert read_all(sock).endswith(b"4\r\nend\n\r\n0\r\n\r\n")
    assert served.popen.wait(GENEROUS_S) == 0
    assert [line["signal"] for line in served.events("signal_received")] == ["SIGTERM"]


def test_streams_end_at_the_deadline_of_the_drain(serving: Any) -> None:
    served = serving(drain_seconds="1")
    with served.connect() as sock:
        sock.sendall(b"GET /ticks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        served.popen.send_signal(signal.SIGTERM)
        assert b"shutdown" in read_all(sock)
    assert served.popen.wait(GENEROUS_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain(serving: Any, number: signal.Signals) -> None:
    served = serving(drain_seconds="3600")
    with served.connect() as sock:
        sock.sendall(b"GET /ticks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        served.popen.send_signal(number)
        eventually(lambda: served.events("draining"), GENEROUS_S)
        served.popen.send_signal(number)
        assert b"shutdown" in read_all(sock)
    assert served.popen.wait(GENEROUS_S) == 0


def test_a_request_that_does_not_end_is_cut_off_after_the_drain(serving: Any) -> None:
    served = serving(drain_seconds="0.5")
    with served.connect() as sock:
        sock.sendall(b"GET /stuck HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: b"requests_in_flight 1.0" in served.ask("GET /metrics HTTP/1.1").body, GENEROUS_S)
        served.popen.send_signal(signal.SIGTERM)
        assert served.popen.wait(GENEROUS_S) == 0
        assert read_answer(sock).status == 503


def test_a_second_request_of_a_connection_is_not_served_during_the_drain(serving: Any) -> None:
    served = serving(drain_seconds="3600")
    with served.connect() as sock:
        get = b"GET /ticks?count=100 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sock.sendall(get + get)
        assert sock.recv(1)
        served.popen.send_signal(signal.SIGTERM)
        rest = read_all(sock)
        assert rest.count(b"end\n") == 1
    assert served.popen.wait(GENEROUS_S) == 0


def run_command(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tokenmill", "gateway", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S, check=False)
    return done.returncode, done.stderr


def test_another_host_without_keys_is_refused_and_the_message_names_both_options() -> None:
    status, message = run_command("--host", "0.0.0.0")
    assert status == 2
    assert "--api-keys" in message
    assert "--no-auth" in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "99999"], "--port"),
        (["--api-keys", "/nonexistent/keys"], "--api-keys"),
        (["--host", "no-such-host.invalid", "--no-auth"], "--host"),
        (["--redis", "http://localhost"], "redis"),
        (["--max-body-bytes", "lots"], "--max-body-bytes"),
    ],
)
def test_a_wrong_option_ends_the_command_with_status_2(arguments: list[str], named: str) -> None:
    status, message = run_command(*arguments)
    assert status == 2
    assert named in message


def test_a_port_that_is_taken_ends_the_command_with_status_2(served: Served) -> None:
    status, message = run_command("--port", str(served.port), "--redis", REDIS_AWAY)
    assert status == 2
    assert str(served.port) in message
