"""The gateway against clients that are slow or large, over sockets."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.producer.gateway.sockets import GENEROUS_S, POST, Served, ended, read_answer
from tests.support import eventually


def test_headers_that_come_a_byte_at_a_time_end_the_connection(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        deadline = time.monotonic() + GENEROUS_S
        sock.settimeout(0.5)
        while time.monotonic() < deadline:
            try:
                sock.sendall(b"x")
                assert sock.recv(1) == b""
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection is still open")
    assert served.lives()


def test_a_connection_that_sends_nothing_is_closed(served: Served) -> None:
    with served.connect() as sock:
        assert ended(sock)


def test_headers_of_a_second_request_that_come_slowly_end_the_connection(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(sock).status == 200
        sock.sendall(b"GET /hea")
        assert ended(sock)


def test_a_body_that_comes_a_byte_at_a_time_gets_408_and_the_end_of_the_connection(served: Served) -> None:
    with served.connect() as sock:
        head = (
            "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
        )
        sock.sendall(head.encode())
        sock.settimeout(0.3)
        answer = None
        deadline = time.monotonic() + GENEROUS_S
        while answer is None and time.monotonic() < deadline:
            sock.sendall(b" ")
            try:
                answer = read_answer(sock)
            except TimeoutError:
                continue
        assert answer is not None
        assert (answer.status, answer.error["code"]) == (408, "timeout")
        sock.settimeout(GENEROUS_S)
        assert ended(sock)


def test_a_body_that_stops_gets_408(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Content-Length: 9\r\n\r\n{{".encode())
        assert read_answer(sock).status == 408


@pytest.mark.parametrize("headers", ["X-Large: " + "x" * 300_000, "\r\n".join(f"X-{n}: {n}" for n in range(20_000))])
def test_headers_over_64_kib_are_refused(served: Served, headers: str) -> None:
    with served.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        try:
            sock.sendall(headers.encode() + b"\r\n\r\n")
        except ConnectionError:
            pass
        else:
            try:
                answer = read_answer(sock)
            except ConnectionError:
                pass  # the server has closed the connection while headers were on their way
            else:
                assert (answer.status, answer.error["code"]) == (431, "too_large")
    assert served.lives()


def test_headers_just_over_64_kib_get_431(served: Served) -> None:
    answer = served.ask("GET /healthz HTTP/1.1\r\nX-Large: " + "x" * 66_000)
    assert (answer.status, answer.error["code"]) == (431, "too_large")


def test_a_body_over_the_limit_gets_413_before_it_is_read(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n".encode())
        answer = read_answer(sock)
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    assert "65536" in answer.error["message"]


def test_a_client_that_sends_a_large_body_all_the_same_reads_its_413(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Content-Length: 3000000\r\n\r\n".encode() + b" " * 3_000_000)
        kept = bytearray()
        assert read_answer(sock, kept).status == 413
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(sock, kept).status == 200


def test_a_chunked_body_over_the_limit_gets_413(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(20):
            sock.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        assert read_answer(sock).status == 413


def test_a_chunked_body_is_read(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode())
        for part in (b'{"a"', b":1}"):
            sock.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        answer = read_answer(sock)
    assert (answer.status, json.loads(answer.body)) == (200, {"a": 1})


def test_a_body_in_tiny_chunks_is_refused_before_it_takes_the_gateways_time(served: Served) -> None:
    head = f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode()
    with served.connect() as sock:
        sock.sendall(head + b"1\r\n \r\n" * 8000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert read_answer(sock).status == 200
    with served.connect() as sock:
        sock.sendall(head + b"1\r\n \r\n" * 9000)
        assert read_answer(sock).status == 400
        assert ended(sock)
    assert served.lives()


def test_a_route_may_take_larger_bodies(served: Served) -> None:
    answer = served.post("/size", b"x" * 1_000_000)
    assert (answer.status, json.loads(answer.body)) == (200, 1_000_000)


def test_requests_over_the_limit_get_503_while_others_are_served(serving: Any) -> None:
    served = serving(max_requests="2")
    with served.connect() as first, served.connect() as second:
        for sock in (first, second):
            sock.sendall(b"GET /patient HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = eventually(lambda: full if (full := served.post("/echo", b"{}")).status == 503 else None, GENEROUS_S)
        assert (answer.error["code"], answer.headers["retry-after"]) == ("overloaded", "1")
        assert served.lives()
    eventually(lambda: served.post("/echo", b"{}").status == 200, GENEROUS_S)


def test_a_client_that_reads_nothing_does_not_make_the_gateway_grow(served: Served) -> None:
    def rss() -> int:
        lines = Path(f"/proc/{served.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    before = rss()
    with served.connect() as sock:
        sock.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(2)
        assert served.lives()
        assert rss() - before < 32 * 1024


def test_a_client_that_ends_its_side_and_reads_nothing_is_noticed(served: Served) -> None:
    def gone() -> int:
        return sum(1 for line in served.events("request") if line["route"] == "/flood" and not line["complete"])

    before = gone()
    with served.connect() as sock:
        sock.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        sock.shutdown(socket.SHUT_WR)
        eventually(lambda: gone() > before, GENEROUS_S)


def test_a_client_that_takes_nothing_of_its_answer_is_disconnected(serving: Any) -> None:
    served = serving(SERVED_STALL_SECONDS="1")
    with served.connect() as sock:
        sock.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(
            lambda: [line for line in served.events("request") if line["route"] == "/flood" and not line["complete"]],
            GENEROUS_S,
        )
        assert ended(sock)


def test_connections_over_the_limit_of_open_files_are_closed_and_the_gateway_lives(serving: Any) -> None:
    served = serving(open_files=100, header_timeout="3600")
    held = [served.connect() for _ in range(40)]
    try:
        (line, *_) = eventually(lambda: served.events("too_many_connections"), GENEROUS_S)
        assert line["limit"] < 40
        assert all(ended(sock) for sock in held[line["limit"] :])
        for sock in held[: line["limit"]]:
            sock.close()
        eventually(served.answers, GENEROUS_S)
    finally:
        for sock in held:
            sock.close()
