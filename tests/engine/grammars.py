"""Grammars over the stub's alphabet: one letter an id."""

from __future__ import annotations

import functools

import llguidance

from engine.sampling.structured import Grammar
from tests.engine.stub import EOS, VOCAB, decode


class _Letters:
    """What llguidance wants to know of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = tuple(b"<eos>" if i == EOS else decode([i]).encode() for i in range(VOCAB))

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, str) else text.decode()
        return [ord(letter) - ord("a") for letter in data]


@functools.cache
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Letters()))


@functools.cache
def letters(pattern: str) -> Grammar:
    """A grammar of texts that match `pattern`."""
    return Grammar(tokenizer(), llguidance.LLMatcher.grammar_from_regex(pattern))
