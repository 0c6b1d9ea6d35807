"""The gateway's server against clients that are slow, large, faulty or foreign, and its shutdown; over real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import eventually, free_port

GENEROUS_S = 60.0
POST = "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
"""Without the end of the headers."""
REDIS_AWAY = "redis://127.0.0.1:1/0"


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


class Served:
    """A gateway process with the routes of `served.py`."""

    def __init__(self, folder: Path, *, open_files: int | None = None, **options: str) -> None:
        self.port = free_port()
        self.log_file = folder / "gateway.log"
        settings = {"redis": REDIS_AWAY, "port": str(self.port), "log_format": "json", "log_level": "debug", **options}
        given = {name if name.isupper() else f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        with self.log_file.open("wb") as out:
            command = [sys.executable, "-m", "tests.producer.gateway.served"]
            if open_files is not None:
                command = ["bash", "-c", f'ulimit -n {open_files} && exec "$@"', "bash", *command]
            self.popen = subprocess.Popen(command, env={**os.environ, **given}, stdout=out, stderr=out)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait(self) -> Served:
        def listens() -> bool:
            assert self.popen.poll() is None, self.log
            return bool(self.events("gateway_listening"))

        eventually(listens, GENEROUS_S, 0.05)
        return self

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=GENEROUS_S)

    def ask(self, head: str, body: bytes = b"", host: str = "localhost") -> Answer:
        """Send one request and read its answer; `head`: request line and headers but Host and Content-Length."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        with self.connect() as sock:
            sock.sendall(f"{head}\r\nHost: {host}\r\n{length}\r\n".replace("\n\r\n\r\n", "\n\r\n").encode() + body)
            return read_answer(sock)

    def post(self, path: str, body: bytes, kind: str = "application/json") -> Answer:
        return self.ask(f"POST {path} HTTP/1.1\r\nContent-Type: {kind}", body)

    def lives(self) -> bool:
        return self.ask("GET /healthz HTTP/1.1").status == 200

    def answers(self) -> bool:
        try:
            return self.lives()
        except (AssertionError, ConnectionError):
            return False

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


def read_answer(sock: socket.socket, kept: bytearray | None = None) -> Answer:
    """Read one response of a connection; `kept`: bytes read beyond it."""
    data = bytearray() if kept is None else kept
    while b"\r\n\r\n" not in data:
        data += _more(sock, data)
    head, _, _ = bytes(data).partition(b"\r\n\r\n")
    del data[: len(head) + 4]
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(data) < length:
        data += _more(sock, data)
    body = bytes(data[:length])
    del data[:length]
    return Answer(int(first.split()[1]), headers, body)


def _more(sock: socket.socket, data: bytearray) -> bytes:
    more = sock.recv(65536)
    assert more, f"the connection ended after {bytes(data)!r}"
    return more


def ended(sock: socket.socket) -> bool:
    """Read a connection to its end; return whether it ended."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"), header_timeout="2", body_timeout="2", max_body_bytes="64KiB")
    yield made.wait()
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Any]:
    """Starts gateways for one test."""
    made: list[Served] = []

    def start(**options: Any) -> Served:
        made.append(Served(tmp_path, **options))
        return made[-1].wait()

    yield start
    for one in made:
        one.close()


# ── slow and large clients ────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_route_may_take_larger_bodies(served: Served) -> None:
    answer = served.post("/size", b"x" * 1_000_000)
    assert (answer.status, json.loads(answer.body)) == (200, 1_000_000)


def test_requests_over_the_limit_get_503_while_others_are_served(own: Any) -> None:
    served = own(max_requests="2")
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


def test_a_client_that_takes_nothing_of_its_answer_is_disconnected(own: Any) -> None:
    served = own(SERVED_STALL_SECONDS="1")
    with served.connect() as sock:
        sock.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(
            lambda: [line for line in served.events("request") if line["route"] == "/flood" and not line["complete"]],
            GENEROUS_S,
        )
        assert ended(sock)


def test_connections_over_the_limit_of_open_files_are_closed_and_the_gateway_lives(own: Any) -> None:
    served = own(open_files=100, header_timeout="3600")
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


# ── faulty requests ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{}", "text/plain", "Content-Type"),
        (b"{}", "application/x-www-form-urlencoded", "Content-Type"),
        (b"", "application/json", "not valid JSON"),
        (b"{", "application/json", "not valid JSON"),
        (b'{"a": NaN}', "application/json", "not valid JSON"),
        (b'{"a": "\xff"}', "application/json", "not valid JSON"),
        (b"[]", "application/json", "must be a JSON object"),
        (b"null", "application/json", "must be a JSON object"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "application/json", "nested deeper"),
        (b"[" * 30_000, "application/json", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_gets_400(served: Served, body: bytes, kind: str, message: str) -> None:
    answer = served.post("/echo", body, kind)
    assert answer.status == 400
    assert message in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


def test_a_content_type_may_have_parameters(served: Served) -> None:
    answer = served.post("/echo", '{"ä": 1}'.encode(), "Application/JSON; charset=utf-8")
    assert json.loads(answer.body) == {"ä": 1}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\r\n\r\n\r\nx y z w\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_400_in_openais_form(served: Served, request_bytes: bytes) -> None:
    with served.connect() as sock:
        sock.sendall(request_bytes)
        answer = read_answer(sock)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert ended(sock)


def test_a_faulty_chunk_in_a_body_ends_the_request(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        assert read_answer(sock).status == 400
        assert ended(sock)
    assert served.lives()
    assert "Traceback" not in served.log.replace("secret-of-the-exception", "")


def test_pipelined_requests_are_answered_in_their_order(served: Served) -> None:
    body = b'{"n": 1}'
    post = (
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n" + body
    )
    get = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served.connect() as sock:
        sock.sendall((post + get) * 50)
        kept = bytearray()
        for _ in range(50):
            assert read_answer(sock, kept).body == b'{"n":1}'
            assert read_answer(sock, kept).status == 404


def test_unknown_paths_and_methods_get_openais_errors(served: Served) -> None:
    unknown = served.ask("GET /v1/nothing/%00%ff?x=%zz HTTP/1.1")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    wrong = served.ask("DELETE /echo HTTP/1.1")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert served.ask("OPTIONS /echo HTTP/1.1").status == 405
    assert served.ask("GET /healthz/ HTTP/1.1").status == 404
    assert "access-control-allow-origin" not in served.ask("OPTIONS /echo HTTP/1.1").headers


def test_head_has_the_headers_of_get_and_no_body(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = b""
        while more := sock.recv(65536):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-length: 3" in head
    assert body == b""


def test_an_exception_becomes_500_without_its_text_and_is_logged(served: Served) -> None:
    answer = served.ask("GET /boom HTTP/1.1")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert b"secret" not in answer.body
    (line,) = (line for line in served.events("request_failed") if line["route"] == "/boom")
    assert line["id"] == answer.headers["x-request-id"]
    assert "RuntimeError" in line["exception"]


def test_an_upgrade_is_answered_as_a_plain_request(served: Served) -> None:
    head = "GET /healthz HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
    assert served.ask(f"{head}\r\nSec-WebSocket-Key: eA==").status == 200


# ── ids, log, metrics ─────────────────────────────────────────────────────────────────────────────────────────────


def test_each_answer_has_a_request_id_which_is_the_jobs_where_there_is_a_job(served: Served) -> None:
    assert served.post("/echo", b"{}").headers["x-request-id"] == "job-7"
    ids = {served.ask(f"GET {path} HTTP/1.1").headers["x-request-id"] for path in ("/healthz", "/nothing", "/boom")}
    assert len(ids) == 3
    assert all(ids)


def test_an_id_that_no_header_can_hold_is_not_sent(served: Served) -> None:
    answer = served.post("/echo?id=a%0d%0aX-Evil:%201%E2%82%AC", b"{}")
    assert answer.status == 200
    assert answer.headers["x-request-id"].startswith("req-")
    assert "x-evil" not in answer.headers


def test_the_log_and_the_metrics_name_the_route_and_never_bodies_keys_or_queries(served: Served) -> None:
    secrets = ("secret-prompt", "secret-key", "secret-query", "secret-path")
    served.ask(
        "POST /echo?a=secret-query HTTP/1.1\r\nContent-Type: application/json\r\nAuthorization: Bearer secret-key",
        b'{"prompt": "secret-prompt"}',
    )
    served.ask("GET /secret-path HTTP/1.1")
    metrics = served.ask("GET /metrics HTTP/1.1").body.decode()
    assert 'tokenmill_gateway_requests_total{route="/echo",status="200"}' in metrics
    assert 'tokenmill_gateway_requests_total{route="unknown",status="404"}' in metrics
    (line, *_) = (line for line in served.events("request") if line["route"] == "/echo" and line["status"] == 200)
    assert {"id", "method", "status", "ms"} <= set(line)
    assert not [secret for secret in secrets if secret in served.log or secret in metrics]


def test_a_gateway_without_redis_is_alive_and_not_ready(served: Served) -> None:
    assert served.lives()
    answer = eventually(
        lambda: found if (found := served.ask("GET /readyz HTTP/1.1")).status == 503 else None, GENEROUS_S
    )
    assert answer.body == b"Redis does not answer\n"


# ── foreign pages and hosts ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:80", "127.1.2.3", "[::1]:80", "LOCALHOST."])
def test_a_gateway_without_keys_serves_hosts_that_are_this_machine(served: Served, host: str) -> None:
    assert served.ask("GET /healthz HTTP/1.1", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "", "[::2]"],
)
def test_a_gateway_without_keys_refuses_other_hosts_as_dns_rebinding(served: Served, host: str) -> None:
    answer = served.ask("GET /v1/models HTTP/1.1", host=host)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://localhost.evil"])
def test_a_gateway_without_keys_refuses_requests_of_pages_of_other_origins(served: Served, origin: str) -> None:
    answer = served.ask(f"POST /echo HTTP/1.1\r\nOrigin: {origin}\r\nContent-Type: application/json", b"{}")
    assert (answer.status, answer.error["code"]) == (403, "forbidden")


def test_a_page_of_the_gateways_own_origin_may_ask(served: Served) -> None:
    head = "POST /echo HTTP/1.1\r\nOrigin: http://localhost:7\r\nContent-Type: application/json"
    assert served.ask(head, b"{}", host="localhost:7").status == 200


def test_with_no_auth_any_host_is_served_but_no_page_of_another_origin(own: Any) -> None:
    served = own(no_auth="true", host="0.0.0.0")
    assert served.ask("GET /healthz HTTP/1.1", host="gateway.example").status == 200
    assert served.ask("GET /healthz HTTP/1.1\r\nOrigin: http://evil.example", host="gateway.example").status == 403


# ── shutdown ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(65536):
        data += more
    return data


def test_sigterm_stops_accepting_and_lets_streams_end_by_themselves(own: Any) -> None:
    served = own()
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


def test_streams_end_at_the_deadline_of_the_drain(own: Any) -> None:
    served = own(drain_seconds="1")
    with served.connect() as sock:
        sock.sendall(b"GET /ticks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        served.popen.send_signal(signal.SIGTERM)
        assert b"shutdown" in read_all(sock)
    assert served.popen.wait(GENEROUS_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain(own: Any, number: signal.Signals) -> None:
    served = own(drain_seconds="3600")
    with served.connect() as sock:
        sock.sendall(b"GET /ticks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)
        served.popen.send_signal(number)
        eventually(lambda: served.events("draining"), GENEROUS_S)
        served.popen.send_signal(number)
        assert b"shutdown" in read_all(sock)
    assert served.popen.wait(GENEROUS_S) == 0


def test_a_request_that_does_not_end_is_cut_off_after_the_drain(own: Any) -> None:
    served = own(drain_seconds="0.5")
    with served.connect() as sock:
        sock.sendall(b"GET /stuck HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: b"requests_in_flight 1.0" in served.ask("GET /metrics HTTP/1.1").body, GENEROUS_S)
        served.popen.send_signal(signal.SIGTERM)
        assert served.popen.wait(GENEROUS_S) == 0
        assert read_answer(sock).status == 503


def test_a_second_request_of_a_connection_is_not_served_during_the_drain(own: Any) -> None:
    served = own(drain_seconds="3600")
    with served.connect() as sock:
        get = b"GET /ticks?count=100 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sock.sendall(get + get)
        assert sock.recv(1)
        served.popen.send_signal(signal.SIGTERM)
        rest = read_all(sock)
        assert rest.count(b"end\n") == 1
    assert served.popen.wait(GENEROUS_S) == 0


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


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
