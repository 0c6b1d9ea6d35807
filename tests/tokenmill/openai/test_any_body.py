"""Any JSON object is a job or an error answer that names what is wrong, and nulls never matter."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.openai.errors import ApiError, error_of_job_error
from tokenmill.openai.request import CHAT, COMPLETIONS, EMBEDDINGS, Unsupported, streaming, translate
from tokenmill.protocol.body import Body, encode_body
from tokenmill.protocol.errors import JobError

KEYS = [*Body.model_fields, "input", "tool_choice", "parallel_tool_calls", "best_of", "echo", "suffix", "modalities"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), JSON, max_size=5)
URL = st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS])


def answer(url: str, body: dict[str, Any]) -> bytes | ApiError:
    """Return the body of the job, or the error answer."""
    try:
        streaming(body)
        return encode_body(translate(url, body, stream=True))
    except ApiError as error:
        return error
    except JobError as error:
        return error_of_job_error(error)


@settings(max_examples=500, deadline=None)
@given(URL, BODIES)
def test_any_object_is_a_job_or_a_bad_request(url: str, body: dict[str, Any]) -> None:
    found = answer(url, body)
    if isinstance(found, ApiError):
        assert found.status == 400
        assert found.message
        orjson.dumps(found.body())


@settings(max_examples=300, deadline=None)
@given(URL, BODIES, st.lists(st.sampled_from([*KEYS, "stream_options", "typo"])))
def test_a_null_in_place_of_an_absent_key_changes_nothing(url: str, body: dict[str, Any], keys: list[str]) -> None:
    plain, padded = answer(url, body), answer(url, {**dict.fromkeys(keys), **body})
    if isinstance(plain, ApiError):
        assert isinstance(padded, ApiError)
        assert padded.status == plain.status
    else:
        assert padded == plain


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("depth", [100, 5000])
def test_a_body_that_is_nested_too_deeply_is_refused(url: str, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    key = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}[url]
    for body in ({key: nested}, {key: "x", "tools": nested}, {key: "x", "tool_choice": nested}):
        found = answer(url, body)
        assert isinstance(found, ApiError)
        assert found.status == 400


def test_no_refusal_repeats_the_text_of_a_request() -> None:
    secret = "my secret"
    for key in ("stream", "tool_choice", "best_of", "echo", "suffix", "modalities", "stream_options"):
        for value in (secret, [secret], {"x": secret}):
            with pytest.raises(Unsupported) as refused:
                translate(COMPLETIONS, {"prompt": secret, key: value})
            assert secret not in str(refused.value)
