"""Faulty requests over sockets; request ids, log and metrics of every request."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.producer.gateway.sockets import GENEROUS_S, POST, Served, ended, read_answer
from tests.support import eventually


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
    assert answer.error["code"] in ("invalid_json", "invalid_request")


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
def test_invalid_http_gets_400_in_openais_form(served: Served, request_bytes: bytes) -> None:
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


def test_a_body_with_two_lengths_is_refused_and_ends_the_connection(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(f"{POST}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        assert read_answer(sock).status == 400
        assert ended(sock)
    assert served.lives()


def test_a_compressed_body_is_refused_by_name(served: Served) -> None:
    answer = served.ask(
        "POST /echo HTTP/1.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip", gzip.compress(b"{}")
    )
    assert answer.status == 400
    assert "Content-Encoding" in answer.error["message"]


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
