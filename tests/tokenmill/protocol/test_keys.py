"""Keys, entry fields and error codes are those of docs/protocol.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmill.protocol.errors import ErrorCode
from tokenmill.protocol.job import _FIELDS
from tokenmill.protocol.keys import GROUP, LANES, Keys, is_name

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_protocol_page_and_the_code_have_the_same_keys() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", section("Keys"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    keys = Keys("q")
    ours = {
        *keys.lanes,
        keys.delayed,
        keys.dead,
        keys.callbacks,
        keys.meta,
        keys.worker("<name>"),
        keys.idempotency("<hash>"),
    }
    ours |= {make("<id>") for make in (keys.job, keys.delayed_job, keys.out, keys.result, keys.cancel)}
    ours |= {keys.group("<gid>"), keys.group_out("<gid>"), keys.quota("<tenant>"), keys.running("<tenant>")}
    ours |= {
        keys.booked("<tenant>"),
        keys.open,
        keys.returned,
        keys.reading,
        keys.callbacks_delayed,
        keys.callbacks_dead,
        keys.rate("<key>"),
        keys.idempotency("<hash>"),
    }
    assert {key.removeprefix("tokenmill:{q}:") for key in ours} == documented


def test_all_keys_share_the_hash_tag_of_their_queue() -> None:
    assert Keys("a", "p").lane("high") == "p:{a}:jobs:high"
    assert LANES == ("high", "normal", "low")
    assert f"group `{GROUP}`" in PAGE


def test_the_protocol_page_and_the_code_have_the_same_entry_fields() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", section("A job (stream entry)"), re.MULTILINE)
    assert {name.encode() for row in rows for name in re.findall(r"`([^`]+)`", row)} == _FIELDS


def test_the_protocol_page_and_the_code_have_the_same_error_codes() -> None:
    text = section("Final result").partition("Codes:")[2].partition(".")[0]
    assert {*re.findall(r"`([a-z_]+)`", text), "no_id"} == {code.value for code in ErrorCode}
    retryable = {code.value for code in ErrorCode if code.retryable}
    assert retryable == {"engine_error", "out_of_memory", "worker_lost"}


@pytest.mark.parametrize("name", ["", "a:b", "*", "../x", "a\n", "{t}", "é", "a" * 129, " a", "a b"])
def test_a_queue_or_prefix_that_is_not_a_name_is_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="queue"):
        Keys(name)
    with pytest.raises(ValueError, match="prefix"):
        Keys("q", name)
