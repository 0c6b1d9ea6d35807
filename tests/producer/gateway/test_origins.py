"""A gateway without keys refuses web pages of other origins and other host names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.producer.gateway.sockets import Served, read_all


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:80", "127.1.2.3", "[::1]:80", "LOCALHOST."])
def test_a_gateway_without_keys_serves_hosts_that_are_this_machine(served: Served, host: str) -> None:
    assert served.ask("GET /healthz HTTP/1.1", host=host).status == 200


def test_a_client_of_http_1_0_needs_no_host(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200")


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


def test_a_web_page_of_the_gateways_own_origin_is_served(served: Served) -> None:
    head = "POST /echo HTTP/1.1\r\nOrigin: http://localhost:7\r\nContent-Type: application/json"
    assert served.ask(head, b"{}", host="localhost:7").status == 200


def test_with_no_auth_any_host_is_served_but_no_web_page_of_another_origin(serving: Any) -> None:
    served = serving(no_auth="true", host="0.0.0.0")
    assert served.ask("GET /healthz HTTP/1.1", host="gateway.example").status == 200
    assert served.ask("GET /healthz HTTP/1.1\r\nOrigin: http://evil.example", host="gateway.example").status == 403
