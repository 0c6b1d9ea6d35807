"""Command line, environment and validation are all made from the fields of `Settings`."""

from __future__ import annotations

import os
import re

import pytest
from typer import Typer
from typer.testing import CliRunner

import worker.cli
from kernels.attention import backend_names
from tokenmill.cli.settings import option, parse_size, variable
from worker.settings import Settings


def settings(**given: object) -> Settings:
    return worker.cli.settings_from({"model": "m", **given})


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("100MB", 100_000_000), ("1.5g", 3 << 29), ("7", 7), ("1 kib", 1024)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1xb", "-1", "1e9", "nan", "2 GiB more"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_every_field_is_an_option_and_a_variable() -> None:
    parameters = worker.cli.worker.__signature__.parameters  # type: ignore[attr-defined]
    assert list(parameters) == list(Settings.model_fields)
    for name, parameter in parameters.items():
        spec = parameter.annotation.__metadata__[0]
        assert spec.envvar == variable(name)
        assert spec.default.split("/")[0] == option(name)
        assert spec.help.startswith(Settings.model_fields[name].description)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the environment by a copy without settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    monkeypatch.setattr(os, "environ", clean)
    return clean


def test_a_given_value_goes_before_the_environment(environ: dict[str, str]) -> None:
    environ |= {"TOKENMILL_MODEL": "from-env", "TOKENMILL_MAX_NUM_SEQS": "3", "TOKENMILL_BURST": "1", "PATH": "x"}
    found = settings(model="given", burst=None)
    assert (found.model, found.max_num_seqs, found.burst) == ("given", 3, True)


def test_an_empty_variable_counts_as_unset(environ: dict[str, str]) -> None:
    environ |= {"TOKENMILL_MAX_NUM_SEQS": "", "TOKENMILL_SERVED_MODEL_NAME": "", "TOKENMILL_BURST": ""}
    assert settings() == settings()
    assert settings().max_num_seqs == 128


@pytest.mark.parametrize(("text", "value"), [("1", True), (" yes ", True), ("off\r", False)])
def test_a_switch_in_a_variable_may_have_white_space_around_it(environ: dict[str, str], text: str, value: bool) -> None:
    environ["TOKENMILL_BURST"] = text
    assert settings().burst is value


@pytest.mark.parametrize("name", ["tokenmill_queue", "TOKENMILL_queue", "QUEUE", "queue"])
def test_only_the_exact_name_of_a_variable_counts(environ: dict[str, str], name: str) -> None:
    environ[name] = "other"
    assert settings().queue == "default"


def test_a_list_in_a_variable_is_split_at_its_commas(environ: dict[str, str]) -> None:
    environ["TOKENMILL_SERVED_MODEL_NAME"] = "a, b,"
    assert settings().served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("environment", "given", "named"),
    [
        ({"TOKENMILL_MAX_NUM_SEQS": "0"}, {}, "TOKENMILL_MAX_NUM_SEQS: "),
        ({"TOKENMILL_MAX_NUM_SEQS": "0"}, {"max_num_seqs": "0"}, "--max-num-seqs: "),
        ({"TOKENMILL_MAX_NUM_SEQS": "1"}, {"max_num_seqs": "0"}, "--max-num-seqs: "),
        ({"TOKENMILL_SERVED_MODEL_NAME": "[1"}, {"queue": "a:b"}, "--queue: "),
        ({"TOKENMILL_REDIS": "http://:sesame@host"}, {}, "TOKENMILL_REDIS: "),
        ({"TOKENMILL_KV_CACHE_MEMORY": "1GiB"}, {"num_kv_blocks": "8"}, "give TOKENMILL_KV_CACHE_MEMORY or --num-kv-b"),
        ({"TOKENMILL_RESULT_TTL_SECONDS": "5"}, {}, "--stream-ttl-seconds must not be longer than TOKENMILL_RESULT"),
    ],
)
def test_an_error_names_the_option_or_the_variable_that_was_given(
    environ: dict[str, str], environment: dict[str, str], given: dict[str, str], named: str
) -> None:
    environ |= environment
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        settings(**given)
    assert str(caught.value).startswith(named)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_num_seqs": "0"}, "--max-num-seqs"),
        ({"device": "tpu"}, "--device"),
        ({"queue": "a:b"}, "--queue"),
        ({"kv_cache_memory": "many"}, "--kv-cache-memory"),
        ({"kv_cache_memory": "1GiB", "num_kv_blocks": "8"}, "not both"),
        ({"result_ttl_seconds": "5"}, "--stream-ttl-seconds"),
        ({"lease_seconds": "inf"}, "--lease-seconds"),
        ({"lease_seconds": "0.0001"}, "--lease-seconds"),
        ({"result_ttl_seconds": "99999999999999999"}, "--result-ttl-seconds"),
        ({"cancel_poll_ms": "nan"}, "--cancel-poll-ms"),
    ],
)
def test_a_wrong_value_names_its_option(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        settings(**given)


def test_a_bad_redis_url_does_not_show_its_password() -> None:
    with pytest.raises(ValueError, match="--redis") as caught:
        settings(redis="http://:sesame@host")
    assert "sesame" not in str(caught.value)


def test_the_command_line_reaches_main(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("worker.service.main", lambda s: seen.append(s) or 7)
    app = Typer()
    app.command()(worker.cli.worker)
    result = CliRunner().invoke(
        app, ["--model", "m", "--served-model-name", "a,b", "--num-kv-blocks", "9", "--no-enable-prefix-caching"]
    )
    assert result.exit_code == 7
    assert (seen[0].served_model_name, seen[0].num_kv_blocks, seen[0].enable_prefix_caching) == (("a", "b"), 9, False)
    assert CliRunner().invoke(app, []).exit_code == 2  # no model


@pytest.mark.parametrize("name", ["auto", *backend_names()])
def test_every_attention_backend_can_be_chosen(name: str) -> None:
    assert worker.cli.settings_from({"model": "m", "attention": name}).attention == name
