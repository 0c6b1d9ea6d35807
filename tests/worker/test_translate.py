"""Every mistake of a producer becomes a JobError with the right code; a valid body reaches the engine unchanged."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import structlog

from engine.models.chat import ChatError, Tokenizer, _reserved
from engine.request import Bans, Request
from tests.models.tiny import tokenizer
from tests.worker.fakes import FakeEngine, FakeModel
from tokenmill.protocol.body_fields import OPERATORS
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.job import Identity, JobEntry
from worker.cli import settings_from
from worker.jobs.job import Entry, Job, Structure
from worker.jobs.translate import Translator

FILE = "generation_config.json"


class ChatRefused(Exception):
    pass


def translator(model: FakeModel | None = None, **options: object) -> Translator:
    settings = settings_from({"model": "fake", **options})
    return Translator(settings, FakeEngine(capacity=256), model or FakeModel(), ChatRefused)


def translate(body: Any, use: Translator | None = None, **entry: Any) -> tuple[Job, Request]:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    job = Job(Entry("normal", "1-0", Identity("a")))
    deadline = entry.pop("deadline", None)
    return job, (use or translator()).request(job, JobEntry(id="a", body=raw, **entry), 1, deadline)


def refusal(body: Any, use: Translator | None = None, **entry: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        translate(body, use, **entry)
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "names"),
    [
        (b"{", ErrorCode.INVALID_JSON, "body"),
        (b"[" * 100_000, ErrorCode.INVALID_JSON, "body"),
        (b'{"prompt":"x","temperature":NaN}', ErrorCode.INVALID_REQUEST, "temperature"),
        ({"prompt": "x", "colour": 1}, ErrorCode.INVALID_REQUEST, "colour"),
        ({"prompt": "x" * (1 << 20)}, ErrorCode.TOO_LARGE, "body"),
        ({"prompt": "x" * 300}, ErrorCode.PROMPT_TOO_LONG, "prompt"),
        ({"prompt": "x" * 200_000}, ErrorCode.PROMPT_TOO_LONG, "bytes"),
        ({"prompt": ""}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt": [1, 256]}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt": "x", "model": "other"}, ErrorCode.MODEL_MISMATCH, "fake"),
        ({"prompt": "x", "logprobs": 21}, ErrorCode.INVALID_REQUEST, "logprobs"),
        ({"prompt": "x", "logprobs": True, "top_logprobs": 257}, ErrorCode.INVALID_REQUEST, "top_logprobs"),
        ({"prompt": "x", "top_logprobs": 1}, ErrorCode.INVALID_REQUEST, "top_logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, ErrorCode.INVALID_REQUEST, "prompt_logprobs"),
        ({"prompt": "x", "response_format": {"type": "yaml"}}, ErrorCode.INVALID_REQUEST, "response_format"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, ErrorCode.INVALID_REQUEST, "response_format"),
        ({"prompt": "x", "structured_outputs": {}}, ErrorCode.INVALID_REQUEST, "structured_outputs"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            ErrorCode.INVALID_REQUEST,
            "chat_template",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"add_generation_prompt": False}},
            ErrorCode.INVALID_REQUEST,
            "chat_template_kwargs: add_generation_prompt",
        ),
    ],
)
def test_a_bad_body_is_refused_with_its_code_and_names_what_is_wrong(body: Any, code: ErrorCode, names: str) -> None:
    error = refusal(body)
    assert error.code is code
    assert names in error.message


def test_a_huge_prompt_is_refused_without_being_tokenised() -> None:
    model = FakeModel()
    model.tokenizer.encode = lambda text: pytest.fail("tokenised")  # type: ignore[method-assign]
    assert refusal({"prompt": "x" * 200_000}, translator(model)).code is ErrorCode.PROMPT_TOO_LONG


def test_a_template_that_refuses_its_messages_is_the_producers_error() -> None:
    def refuse(*args: Any, **kwargs: Any) -> list[int]:
        raise ChatRefused("no system role here")

    model = FakeModel()
    model.tokenizer.encode_chat = refuse  # type: ignore[method-assign]
    error = refusal({"messages": [{"role": "system", "content": "x"}]}, translator(model))
    assert (error.code, "no system role" in error.message) == (ErrorCode.INVALID_REQUEST, True)


@pytest.mark.parametrize("name", ["self", "messages", "tools", "tokenize", "conversations"])
def test_a_template_variable_with_a_reserved_name_is_the_producers_error(name: str) -> None:
    model = FakeModel()
    model.tokenizer = Tokenizer(tokenizer())  # type: ignore[assignment]
    use = Translator(settings_from({"model": "fake"}), FakeEngine(capacity=256), model, ChatError)
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
    error = refusal(body, use)
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "chat_template_kwargs: " in error.message
    assert name in error.message


def test_the_protocol_refuses_every_name_that_the_tokenizers_library_reserves() -> None:
    """The engine asks the library, so that a newer one cannot be reached either; the protocol has the list."""
    assert set() == _reserved() - OPERATORS


def test_a_job_whose_ttl_ms_has_run_out_is_not_parsed() -> None:
    assert refusal(b"{", deadline=time.monotonic() - 1, ttl_ms=5).code is ErrorCode.DEADLINE_EXCEEDED


def test_a_callback_is_refused_while_no_host_is_allowed() -> None:
    assert "callback" in refusal({"prompt": "x"}, callback="https://example.com/").message


def test_defaults_come_from_the_model_then_from_openai() -> None:
    model = FakeModel()
    model.generation = SimpleNamespace(temperature=0.6, top_p=None, top_k=40, min_p=None, repetition_penalty=1.1)
    params = translate({"prompt": "x"}, translator(model))[1].params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 1.0, 40, 1.1)
    params = translate({"prompt": "x", "temperature": 0, "top_k": -1}, translator(model))[1].params
    assert (params.temperature, params.top_k) == (0, 0)


@pytest.mark.parametrize(
    ("key", "value", "range_"),
    [
        ("min_p", 2, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number from 0.000001 to 1000000"),
        ("repetition_penalty", float("nan"), "a number from 0.000001 to 1000000"),
        ("temperature", "0.6", "a number from 0 to 2"),
        ("temperature", -1, "a number from 0 to 2"),
        ("top_p", float("inf"), "a number above 0 and at most 1"),
        ("top_p", True, "a number above 0 and at most 1"),
        ("top_k", 2.5, "an integer from -1 to 2147483647"),
        ("stop_strings", [""], "a string or a list of at most 16"),
        ("suppress_tokens", [-1], "a list of token ids"),
        ("begin_suppress_tokens", 5, "a list of token ids"),
        ("bad_words_ids", [5], "a list of token ids"),
        ("bad_words_ids", {"5": 1}, "a list of lists of token ids"),
    ],
)
def test_a_default_that_no_body_could_have_is_ignored_and_named(key: str, value: Any, range_: str) -> None:
    model = FakeModel()
    model.generation = SimpleNamespace(**{key: value})
    with structlog.testing.capture_logs() as logs:
        use = translator(model)
    (warning,) = logs
    assert (warning["event"], warning["file"], warning["key"]) == ("generation_config_ignored", FILE, key)
    assert range_ in warning["reason"]
    assert translate({"prompt": "x", "seed": 1}, use)[1].params == translate({"prompt": "x", "seed": 1})[1].params


def test_the_models_suppressed_ids_and_stop_strings_apply_to_every_job() -> None:
    model = FakeModel()
    model.generation = SimpleNamespace(
        eos_token_ids=frozenset({0}),
        stop_strings=["<end>", "Q:"],
        suppress_tokens=[5, 6],
        begin_suppress_tokens=[7],
        bad_words_ids=[[8], [0], [1, 2, 3]],  # an end of text alone is no bad word
    )
    params = translate({"prompt": "x", "stop": "me"}, translator(model))[1].params
    assert params.stop == ("me", "<end>", "Q:")
    assert params.bans == Bans(frozenset({5, 6, 8}), frozenset({7}), ((1, 2, 3),))
    assert translate({"prompt": "x", "ignore_eos": True}, translator(model))[1].params.stop == ()


def test_a_default_of_the_model_that_is_not_supported_is_named() -> None:
    model = FakeModel()
    model.generation = SimpleNamespace(not_applied=("no_repeat_ngram_size",))
    with structlog.testing.capture_logs() as logs:
        translator(model)
    assert [(log["event"], log["key"]) for log in logs] == [("generation_config_ignored", "no_repeat_ngram_size")]


def test_zero_is_a_value_and_no_absent_parameter() -> None:
    params = translate({"prompt": "x", "seed": 0, "logit_bias": {"0": 0}, "stop_token_ids": [0]})[1].params
    assert (params.seed, params.logit_bias, params.stop_token_ids) == (0, ((0, 0.0),), frozenset({0}))


def test_reduced_values_are_reported_as_clamped() -> None:
    job, request = translate({"prompt": "x" * 200, "max_tokens": 1000, "min_tokens": 100})
    assert (request.params.max_tokens, request.params.min_tokens) == (56, 56)
    assert job.options.clamped == {"max_tokens": 56, "min_tokens": 56}
    job, request = translate({"prompt": "x"})
    assert (request.params.max_tokens, job.options.clamped) == (255, {})
    job, request = translate({"prompt": "x", "max_tokens": 9}, translator(max_output_tokens=5))
    assert (request.params.max_tokens, job.options.clamped) == (5, {"max_tokens": 5})


def test_a_job_may_name_any_served_model_name() -> None:
    use = translator(served_model_name="one,two")
    assert translate({"prompt": "x", "model": "two"}, use)[1].params.n == 1
    assert refusal({"prompt": "x", "model": "fake"}, use).code is ErrorCode.MODEL_MISMATCH


def test_response_format_text_is_accepted() -> None:
    assert translate({"prompt": "x", "response_format": {"type": "text"}})[1].params.max_tokens == 255


def test_chat_goes_through_the_template_with_its_arguments() -> None:
    request = translate({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})[1]
    assert bytes(request.prompt) == b"<user>hi"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 3}, 3),
        ({"logprobs": 3, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_may_be_given_as_by_openai_or_as_a_count(body: Any, count: int | None) -> None:
    params = translate({"prompt": "x", **body})[1].params
    assert (params.logprobs, params.prompt_logprobs) == (count, None)
    assert translate({"prompt": "x", "prompt_logprobs": 2})[1].params.prompt_logprobs == 2


def test_logprobs_that_no_result_could_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x" * 10, "max_tokens": 20, "logprobs": 4, "prompt_logprobs": 9, "n": 2}
    monkeypatch.setattr("worker.jobs.translate.MAX_LOGPROBS", 2 * (20 * 5 + 10 * 10))
    assert translate(body)[1].params.logprobs == 4
    monkeypatch.setattr("worker.jobs.translate.MAX_LOGPROBS", 2 * (20 * 5 + 10 * 10) - 1)
    assert "logprobs" in refusal(body).message


@pytest.mark.parametrize(
    ("body", "key", "kind", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            "response_format",
            "json",
            {"type": "null"},
        ),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json", "json", {}),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs.json", "json", "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "choice", ["a", ""]),
        ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", "grammar", "start: A"),
    ],
)
def test_a_grammar_is_kept_and_compiled_later(body: Any, key: str, kind: str, spec: Any) -> None:
    model = FakeModel()
    use = translator(model)
    job, request = translate({"prompt": "x", **body}, use)
    assert (job.options.structure, request.grammar, model.grammars.compiled) == (Structure(key, kind, spec), None, [])
    use.grammar(Structure(key, kind, spec))
    assert model.grammars.compiled == [(kind, spec)]


def test_a_bad_grammar_is_the_producers_error_and_names_the_key() -> None:
    with pytest.raises(JobError) as caught:
        translator().grammar(Structure("structured_outputs.regex", "regex", "bad"))
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.INVALID_REQUEST,
        "structured_outputs.regex: it is bad",
    )
