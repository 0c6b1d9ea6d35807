"""Entry fields: an error names the wrong field, and every entry with a usable id gets a result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.protocol.errors import MAX_MESSAGE, ErrorCode, JobError
from tokenmill.protocol.job import Identity, JobEntry, identify, parse_entry

GOOD = {b"id": b"a", b"body": b"{}"}
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def raw(entry: JobEntry) -> dict[bytes, bytes]:
    return {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in entry.fields().items()}


def test_an_entry_is_equal_after_encoding_and_parsing() -> None:
    whole = JobEntry("a", b"{}", 1, 5, False, "g", "t", TRACE, "https://x/y?z", 2)
    for entry in (whole, JobEntry("a", b"{}")):
        assert parse_entry(raw(entry)) == entry
    assert raw(JobEntry("a", b"{}")) == GOOD


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({b"id": None}, ErrorCode.NO_ID, "id"),
        ({b"id": b""}, ErrorCode.NO_ID, "id"),
        ({b"id": b"a:b"}, ErrorCode.NO_ID, "id"),
        ({b"id": b"a\n"}, ErrorCode.NO_ID, "id"),
        ({b"id": b"x" * 129}, ErrorCode.NO_ID, "id"),
        ({b"id": "é".encode()}, ErrorCode.NO_ID, "id"),
        ({b"v": b"2", b"new": b"field"}, ErrorCode.UNSUPPORTED_VERSION, "2"),
        ({b"v": b""}, ErrorCode.UNSUPPORTED_VERSION, "v"),
        ({b"body": None}, ErrorCode.INVALID_REQUEST, "body"),
        ({b"attempt": b"1"}, ErrorCode.INVALID_REQUEST, "attempt"),
        ({b"\xff" * 1000: b"1"}, ErrorCode.INVALID_REQUEST, "unknown field"),
        ({b"ttl_ms": b"0"}, ErrorCode.INVALID_REQUEST, "ttl_ms"),
        ({b"ttl_ms": b"-1"}, ErrorCode.INVALID_REQUEST, "ttl_ms"),
        ({b"ttl_ms": b"1.5"}, ErrorCode.INVALID_REQUEST, "ttl_ms"),
        ({b"ttl_ms": b"9" * 400}, ErrorCode.INVALID_REQUEST, "ttl_ms"),
        ({b"ttl_ms": "٣".encode()}, ErrorCode.INVALID_REQUEST, "ttl_ms"),
        ({b"stream": b"yes"}, ErrorCode.INVALID_REQUEST, "stream"),
        ({b"group": b"a b"}, ErrorCode.INVALID_REQUEST, "group"),
        ({b"tenant": b"{t}"}, ErrorCode.INVALID_REQUEST, "tenant"),
        ({b"traceparent": b"x"}, ErrorCode.INVALID_REQUEST, "traceparent"),
        ({b"callback": b"file:///etc"}, ErrorCode.INVALID_REQUEST, "callback"),
        ({b"max_attempts": b"0"}, ErrorCode.INVALID_REQUEST, "max_attempts"),
    ],
)
def test_the_error_of_a_broken_entry_names_the_field(
    fields: dict[bytes, bytes | None], code: ErrorCode, word: str
) -> None:
    entry = {k: v for k, v in {**GOOD, **fields}.items() if v is not None}
    with pytest.raises(JobError, match=word) as error:
        parse_entry(entry)
    assert error.value.code is code


def test_the_identity_of_a_broken_entry_has_its_readable_fields() -> None:
    fields = {b"id": b"a", b"stream": b"0", b"group": b"g", b"tenant": b"{t}", b"ttl_ms": b"x", b"traceparent": b"x"}
    assert identify(fields) == Identity("a", stream=False, group="g")
    assert identify({b"body": b"{}"}) is None


@given(st.dictionaries(st.sampled_from([*GOOD, b"v", b"ttl_ms", b"stream", b"group"]) | st.binary(), st.binary()))
def test_random_fields_are_an_entry_or_an_error_with_a_short_message(fields: dict[bytes, bytes]) -> None:
    try:
        entry = parse_entry(fields)
    except JobError as refused:
        error = refused
    else:
        assert entry.identity == identify(fields)
        return
    assert len(error.message) <= MAX_MESSAGE
    assert error.message.encode()
    assert (error.code is ErrorCode.NO_ID) == (identify(fields) is None)
