"""A wrong URL is reported in one line before anything is done, and the line shows nothing that may be a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer import AsyncClient, Client
from tokenmill.protocol.connection import async_client, blocking_client, command_client
from tokenmill.protocol.url import check_url

WRONG = {
    "redis://h/0?socket_timout=3": "unknown option socket_timout; did you mean socket_timeout?",
    "redis://h/0?credential_provider=x": "unknown option",
    "redis://h?db=x": "db must be a number",
    "redis://h?db=-1": "db must be a number",
    "redis://h?db=": "db has no value",
    "redis://h?max_connections=many": "max_connections",
    "redis://h?protocol=9": "wrong value",
    "rediss://h?ssl_cert_reqs=perhaps": "wrong value",
    "rediss://h?ssl_ca_certs=/nowhere/ca.pem": "ssl_ca_certs names a file that is not there",
    "redis://h?ssl_ca_certs=/etc/passwd": "is for TLS",
    "redis://h/tokenmill": "only the number of a database",
    "redis://h/0/1": "number of a database",
    "redis://h:99999": "port must be a number from 1 to 65535",
    "redis://h:0": "port",
    "redis://h:/0": "port",
    "redis://h:http/0": "port",
    "redis://user:xyzzy@host:<port>/0": "port",
    "redis://:xyz/zy@h:1/0": "port",
    "redis://:xyz#zy@h:1/0": "must not hold a #",
    "redis://:xyz?zy@h:1/0": "port",
    "redis://user?xyzzy@h:1": "unknown option",
    "redis://:xyzzy＃@h:1/0": "malformed",
    "redis://:xyzzy\udcff@h": "malformed",
    "redis://[xyzzy/0": "malformed",
    "redis://a..b/0": "malformed",
    "redis://h /0": "white space",
    "unix://tmp/redis.sock": "three slashes",
    "unix://": "must begin with",
    "http://h": "must begin with",
    "xyzzy": "must begin with",
    "": "must begin with",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^the URL") as caught:
        check_url(url)
    told = str(caught.value)
    assert WRONG[url] in told
    assert "\n" not in told
    assert "xyz" not in told
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://:6379",
        "redis://user:p%40ss%2F@[::1]:6379/15",
        "redis://:pässwörd@h/0?client_name=me&health_check_interval=5&socket_timeout=1.5",
        "rediss://h:1?ssl_cert_reqs=none&ssl_check_hostname=false",
        "unix:///run/redis.sock?db=1",
        "unix://user:pass@/run/redis.sock",
    ],
)
def test_every_url_that_redis_py_accepts_is_accepted(url: str) -> None:
    assert check_url(url) == url
    assert check_url(f" {url}\n") == url


def test_a_wrong_url_makes_no_client(tmp_path: Path) -> None:
    for make in (command_client, blocking_client, async_client, Client, AsyncClient):
        with pytest.raises(ValueError, match="unknown option socket_timout"):
            make("redis://h/0?socket_timout=3")
