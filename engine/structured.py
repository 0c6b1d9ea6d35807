"""Structured output: grammars compiled by llguidance, and masks of the ids that may come next.

A `Grammar` is compiled once, off the step's thread, and kept in a bounded cache; each choice gets a `Matcher` of its
own, which lives in its `Sequence` and so survives preemption.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal, Protocol

import llguidance
import llguidance.torch
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json_object", "json", "regex", "grammar", "choice"]

MAX_SPEC_BYTES = 256 * 1024
"""Larger schemas, patterns and grammars are refused."""
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False}
"""Compact JSON: free white space would let a model go on for ever without breaking a rule."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for its sender."""


class Matcher(Protocol):
    """How far one text has come in its grammar."""

    def fill(self, mask: Tensor, row: int) -> None:
        """Write which ids may come next to `mask[row]` (int32 bits)."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one id; False if the grammar does not allow it here."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """What went wrong in the grammar's machinery, if anything did; it stays wrong."""
        ...


class Grammar:
    """A compiled grammar; `matcher` gives a fresh start."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, source: str) -> None:
        self._first = llguidance.LLMatcher(tokenizer, source)
        if self._first.is_error():
            raise GrammarError(_first_line(self._first.get_error()))

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy())


class GuidanceMatcher:
    """`Matcher` by llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, mask: Tensor, row: int) -> None:
        llguidance.torch.fill_next_token_bitmask(self._matcher, mask, row)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles and caches grammars for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, cache_size: int = 256) -> None:
        self._tokenizer = tokenizer
        self._size = cache_size
        self._cache: OrderedDict[tuple[Kind, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: Kind, spec: Any) -> Grammar:
        """A grammar of `spec`: a JSON schema, a pattern, a Lark grammar or a list of strings, by `kind`.

        Raises:
            GrammarError: it is not one, is too large, or uses what is not supported; the message names it.
        """
        text = spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)
        if len(text.encode(errors="surrogatepass")) > MAX_SPEC_BYTES:
            raise GrammarError(f"larger than {MAX_SPEC_BYTES} bytes")
        key = (kind, text)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        grammar = self._compile(kind, spec)
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > self._size:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, kind: Kind, spec: Any) -> Grammar:
        try:
            source = _source(kind, spec)
            problem = llguidance.LLMatcher.validate_grammar(source, self._tokenizer)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(_first_line(str(error))) from error
        if problem:
            raise GrammarError(_first_line(problem))
        return Grammar(self._tokenizer, source)


def _source(kind: Kind, spec: Any) -> str:
    match kind:
        case "json_object":
            schema: Any = {"type": "object"}
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case "json":
            schema = json.loads(spec) if isinstance(spec, str) else spec
            if not isinstance(schema, dict | bool):
                raise GrammarError("a JSON schema is an object, true or false")
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec)
        case "choice":
            options = " | ".join(json.dumps(option, ensure_ascii=False) for option in spec)
            return llguidance.LLMatcher.grammar_from_lark(f"start: {options}")
        case "grammar":
            return llguidance.grammar_from("grammar", spec)


def _first_line(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "not a valid grammar"
    return line[:500]


def apply_masks(logits: Tensor, matchers: dict[int, Matcher]) -> None:
    """Set to -inf what the matcher of each row forbids; `logits` is `[R, ids]`, keys are rows."""
    if not matchers:
        return
    rows = list(matchers)
    mask = llguidance.torch.allocate_token_bitmask(len(rows), logits.shape[-1])
    for i, matcher in enumerate(matchers.values()):
        matcher.fill(mask, i)
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.reshape(len(rows), -1)[:, : logits.shape[-1]].bool().to(logits.device)
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
