"""The settings of the gateway: which are refused, and what their messages name."""

from __future__ import annotations

import inspect
import os

import pytest

from producer.gateway.settings import GatewaySettings
from tokenmill.cli.options import take_options


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_without_keys_each_loopback_address_is_allowed(host: str) -> None:
    assert GatewaySettings.of({"host": host}).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", "localhost.example", "127.0.0.1.x"])
def test_without_keys_no_other_address_is_allowed_unless_no_auth_is_given(host: str) -> None:
    with pytest.raises(ValueError, match=r"--api-keys, or --no-auth"):
        GatewaySettings.of({"host": host})
    assert GatewaySettings.of({"host": host, "no_auth": True}).host == host
    assert GatewaySettings.of({"host": host, "api_keys": "keys"}).host == host


def test_keys_and_no_auth_together_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        GatewaySettings.of({"api_keys": "keys", "no_auth": True})


def test_no_option_is_negated_twice() -> None:
    def command() -> None: ...

    take_options(command, GatewaySettings)
    parameters = inspect.signature(command).parameters.values()
    names = [parameter.annotation.__metadata__[0].default for parameter in parameters]
    assert "--no-auth" in names
    assert "--no-no-" not in " ".join(names)


def test_variables_are_read_and_options_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_PORT", "9000")
    monkeypatch.setenv("TOKENMILL_MAX_BODY_BYTES", "2MiB")
    monkeypatch.setenv("TOKENMILL_NO_AUTH", "true")
    settings = GatewaySettings.of({"max_body_bytes": "64k"})
    assert (settings.port, settings.max_body_bytes, settings.no_auth) == (9000, 65536, True)


def test_the_address_of_a_kubernetes_service_called_tokenmill_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_PORT", "tcp://10.0.0.1:8000")
    assert GatewaySettings.of({}).port == 8000


@pytest.mark.parametrize(
    "given",
    [
        {"port": "-1"},
        {"max_requests": "0"},
        {"header_timeout": "0"},
        {"body_timeout": "inf"},
        {"request_timeout": "nan"},
        {"drain_seconds": "-1"},
        {"queue": "a b"},
        {"log_level": "loud"},
    ],
)
def test_a_wrong_value_is_refused_under_the_name_of_its_option(given: dict[str, str]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')}: "):
        GatewaySettings.of(given)


def test_a_wrong_url_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_REDIS", "http://user:secret@localhost")
    with pytest.raises(ValueError, match=r"^TOKENMILL_REDIS: ") as raised:
        GatewaySettings.of({})
    assert "secret" not in str(raised.value)
