"""Structured output: grammars compiled by llguidance, and masks of the ids that may come next.

A `Grammar` is compiled once, off the step's thread, and kept in a bounded cache; each choice gets a `Matcher` of its
own, which lives in its `Sequence` and so survives preemption.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import llguidance
import llguidance.numpy  # not llguidance.torch, whose import starts torch's compiler: seconds
import orjson
import torch
from torch import Tensor

from engine.request import GrammarError, GrammarUndecided
from engine.sampling.guard import Guard, GuardFailed, compile_source
from engine.sampling.patterns import exactly, translate
from engine.sampling.schema import prepare

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarUndecided",
    "GuidanceMatcher",
    "Matcher",
    "apply_masks",
]

Kind = Literal["json_object", "json", "regex", "grammar", "choice"]

MAX_SPEC_BYTES = 256 * 1024
"""Larger schemas, patterns and grammars are refused."""
REFUSED_SECONDS = 60.0
"""How long a refusal is remembered: what was refused for its cost may pass on a quieter machine."""
_LINE = 200
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
"""Compact JSON: free white space would let a model go on for ever without breaking a rule. No `\\uXXXX`: an open object
could otherwise repeat a property under an escaped name, past that property's schema."""


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
    """A compiled grammar; `matcher` gives a fresh start.

    Raises:
        GrammarError: it cannot be compiled, or no text matches it.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, source: str) -> None:
        self._words = -(-tokenizer.vocab_size // 32)
        self._first = compile_source(tokenizer, source)
        if self._first.is_error():
            raise GrammarError(explain(self._first.get_error()))

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self._words)


class GuidanceMatcher:
    """`Matcher` by llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        """`words`: int32s of a mask over all ids that the matcher knows."""
        self._matcher = matcher
        self._words = words

    def fill(self, mask: Tensor, row: int) -> None:
        if mask.shape[1] == self._words:
            llguidance.numpy.fill_next_token_bitmask(self._matcher, mask.numpy(), row)
            return
        whole = torch.zeros((1, self._words), dtype=torch.int32)  # a tokenizer may know more ids than the model has
        llguidance.numpy.fill_next_token_bitmask(self._matcher, whole.numpy())
        mask[row] = whole[0, : mask.shape[1]]

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return explain(self._matcher.get_error()) if self._matcher.is_error() else None


class _Known(NamedTuple):
    """What came of compiling a grammar, and until which `time.monotonic()` that is remembered."""

    outcome: Grammar | GrammarError
    until: float


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and remembers them, and for a while what it refused.

    A new grammar is tried in another process first, see `engine.sampling.guard`. Any thread may call `compile`.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, guard: Guard | None = None, cache_size: int = 128) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self._size = cache_size
        self._cache: OrderedDict[tuple[Kind, str], _Known] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: Kind, spec: Any) -> Grammar:
        """A grammar of `spec`: a JSON schema, a pattern, a Lark grammar or a list of strings, by `kind`.

        Raises:
            GrammarError: it is not one, is too large, or uses what is not supported; the message names it.
            GrammarUndecided: nothing was found out, and nothing is remembered: ask again later.
        """
        text = spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)
        if len(text.encode(errors="surrogatepass")) > MAX_SPEC_BYTES:
            raise GrammarError(f"larger than {MAX_SPEC_BYTES} bytes")
        key = (kind, text)
        known = self._find(key)
        if known is None:
            outcome = self._compile(kind, spec)
            known = _Known(outcome, time.monotonic() + (REFUSED_SECONDS if isinstance(outcome, GrammarError) else inf))
            with self._lock:
                self._cache[key] = known
                while len(self._cache) > self._size:
                    self._cache.popitem(last=False)
        if isinstance(known.outcome, GrammarError):
            raise GrammarError(str(known.outcome))
        return known.outcome

    def check(self) -> None:
        """Try a small fixed grammar in the other process.

        Raises:
            GrammarUndecided: that process fails even for this grammar, so no other grammar is to blame.
        """
        self._compile("choice", ["a"])

    def _find(self, key: tuple[Kind, str]) -> _Known | None:
        with self._lock:
            known = self._cache.get(key)
            if known is None or known.until < time.monotonic():
                return None
            self._cache.move_to_end(key)
            return known

    def _compile(self, kind: Kind, spec: Any) -> Grammar | GrammarError:
        try:
            source = _source(kind, spec)
            problem = self._guard.problem(source) if self._guard else None
            return GrammarError(explain(problem)) if problem else Grammar(self._tokenizer, source)
        except RecursionError:
            return GrammarError("nested too deeply")
        except GrammarError as error:
            return error
        except GuardFailed as error:
            raise GrammarUndecided(str(error)) from error
        except (ValueError, TypeError) as error:
            return GrammarError(explain(str(error)))


def _source(kind: Kind, spec: Any) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ValueError, TypeError, RecursionError: it is none.
    """
    match kind:
        case "json_object":
            return _json_source({"type": "object"})
        case "json":
            return _json_source(prepare(orjson.loads(spec) if isinstance(spec, str) else spec))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(translate(spec))
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex("|".join(f"({exactly(option)})" for option in spec))
        case "grammar":
            return llguidance.grammar_from("grammar", spec)


def _json_source(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def explain(problem: str) -> str:
    """One short line of what llguidance says: the first, and the one that gives a reason, if any."""
    lines = problem.strip().splitlines() or ["not a valid grammar"]
    if lines[0].startswith("NoExtension"):
        return "no text matches it"
    if "coerce_one_of" in lines[0]:
        return "oneOf is supported only where its schemas exclude one another by type or constant: write anyOf"
    first = lines[0] if len(lines[0]) <= _LINE else lines[0][:_LINE] + "…"
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return f"{first} {reason[:_LINE]}".strip()


def apply_masks(logits: Tensor, matchers: dict[int, Matcher]) -> None:
    """Set to -inf what the matcher of each row forbids; `logits` is `[R, ids]`, keys are rows."""
    if not matchers:
        return
    rows = list(matchers)
    mask = torch.full((len(rows), -(-logits.shape[-1] // 32)), -1, dtype=torch.int32)
    for i, matcher in enumerate(matchers.values()):
        matcher.fill(mask, i)
    mask = mask.to(logits.device)
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    allowed = bits.reshape(len(rows), -1)[:, : logits.shape[-1]].bool()
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
