"""An id stands for the same in text, log-probabilities, grammars and stop strings, with every kind of tokenizer."""

from __future__ import annotations

import codecs
import re

import llguidance
import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from engine.models.chat import Tokenizer
from engine.models.pieces import Pieces
from engine.request import Request, SamplingParams
from engine.sampling.text import TextStream
from tests.engine.noise import constrained, noise_engine
from tests.engine.stub import run
from tests.models import vocabularies
from tests.models.vocabularies import EOS, NASTY

KINDS = {
    "llama": lambda: vocabularies.sentencepiece("prepend"),
    "mistral": lambda: vocabularies.sentencepiece("metaspace"),
    "gemma": lambda: vocabularies.sentencepiece("none"),
    "gpt2": vocabularies.byte_level,
}
SENTENCEPIECE = ["llama", "mistral", "gemma"]


def wrap(backend: RustTokenizer) -> Tokenizer:
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return Tokenizer(made)


def pieces(kind: str) -> Pieces:
    backend = KINDS[kind]()
    return Pieces(backend, backend.get_vocab_size())


def text_of(ours: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[str, str | None]:
    stream = TextStream(ours.token_bytes, stops)
    for i in ids:
        if (stop := stream.push(i)) is not None:
            return stream.text, stop
    stream.finish()
    return stream.text, None


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_has_the_bytes_that_grammars_match_it_by(kind: str) -> None:
    backend = KINDS[kind]()
    size = backend.get_vocab_size()
    grammars, ours = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=[EOS]), Pieces(backend, size)
    for i in range(size):
        if backend.id_to_token(i) not in ("<0xFF>", "ÿ"):  # llguidance keeps this byte for special ids
            assert ours.bytes_of(i) == grammars.decode_bytes([i]), backend.id_to_token(i)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_are_the_text(kind: str) -> None:
    ours = wrap(KINDS[kind]())
    for text in NASTY:
        ids = ours.encode(f"go {text}")
        joined = b"".join(ours.token_bytes(i, True) for i in ids).decode()
        assert text_of(ours, ids)[0] == joined == ours.decode(ids)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_output_that_continues_a_prompt_keeps_its_first_space(kind: str) -> None:
    ours = wrap(KINDS[kind]())
    the = ours._backend.token_to_id("▁the")
    assert text_of(ours, [the, the]) == (" the the", None)
    assert text_of(ours, [the, the], (" the",)) == ("", " the")


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_exactly_what_its_grammar_allows(kind: str) -> None:
    ours, eos = wrap(KINDS[kind]()), frozenset({EOS})
    compiler = ours.grammars(eos)
    engine = noise_engine(ours, eos)
    for seed, pattern in enumerate([r" the [a-z]{3}", r" {1,2}(of|in)", r"the [a-z]{2}"]):
        finished = run(engine, constrained(f"r{seed}", compiler.compile("regex", pattern), seed=seed))[f"r{seed}"]
        assert re.fullmatch(pattern, finished.choices[0].text)
    finished = run(engine, constrained("choice", compiler.compile("choice", [" of"]), seed=1))["choice"]
    assert finished.choices[0].text == " of"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_events_text_and_the_bytes_of_log_probabilities_agree_on_noise(kind: str, skip: bool) -> None:
    ours = wrap(KINDS[kind]())
    engine = noise_engine(ours, frozenset({EOS}))
    params = SamplingParams(max_tokens=200, seed=3, ignore_eos=True, logprobs=0, skip_special_tokens=skip)
    (choice,) = run(engine, Request("r", [7, 8], params))["r"].choices
    assert choice.logprobs is not None
    raw = b"".join(ours.token_bytes(one.chosen.token_id, skip) for one in choice.logprobs)
    assert choice.text == codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_spelled_only_where_they_are_not_skipped(kind: str) -> None:
    ours = pieces(kind)
    assert ours.bytes_of(EOS) == b"</s>"
    assert ours.bytes_of(EOS, skip_special=True) == b""
    assert ours.bytes_of(-1) == ours.bytes_of(10**6) == b""


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_special_ids_within_a_character_do_not_break_the_character(kind: str) -> None:
    ours = wrap(KINDS[kind]())
    fire = [i for i in ours.encode("🔥") if ours.token_bytes(i, True).strip()]
    assert len(fire) > 1
    assert text_of(ours, [fire[0], *[3] * 6, *fire[1:]])[0] == text_of(ours, [*[3] * 6, *fire])[0] == "🔥"
