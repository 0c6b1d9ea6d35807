"""Structured output: grammars compiled by llguidance, and masks of the ids that they allow next.

A `Grammar` is compiled once, not on the engine's thread, and kept in a bounded cache. The `Matcher` of each choice is
part of its `Sequence`, so a preemption does not lose it.
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
"""Maximum size of a schema, pattern or grammar."""
REFUSED_SECONDS = 60.0
"""Seconds for which a refusal is cached: a grammar that took too long may compile later."""
_LINE = 200
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
"""Compact JSON, since a model could generate white space without end. No `\\uXXXX`, since an open object could repeat a
property under an escaped name, which the schema of the property would not apply to."""


class Matcher(Protocol):
    """State of a grammar after the ids of one text."""

    def fill(self, mask: Tensor, row: int) -> None:
        """Write the allowed next ids to `mask[row]`, one bit for each id, int32 `[rows, ids / 32]`."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one id; return False if the grammar does not allow it here."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text matches the grammar and no id may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Error of the grammar engine, if there was one; the matcher cannot be used any more."""
        ...


class Grammar:
    """A compiled grammar.

    Raises:
        GrammarError: the grammar cannot be compiled, or no text matches it.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, source: str) -> None:
        self._words = -(-tokenizer.vocab_size // 32)
        self._first = compile_source(tokenizer, source)
        if self._first.is_error():
            raise GrammarError(explain(self._first.get_error()))

    def matcher(self) -> GuidanceMatcher:
        """Return a matcher at the beginning of a text."""
        return GuidanceMatcher(self._first.deep_copy(), self._words)


class GuidanceMatcher:
    """`Matcher` that uses llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        """Wrap a matcher of llguidance, whose mask over all of its ids has `words` int32."""
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
    """The outcome of compiling a grammar, and the `time.monotonic()` at which the cache forgets it."""

    outcome: Grammar | GrammarError
    until: float


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with a cache of grammars and of refusals.

    A new grammar is first compiled in a child process, see `engine.sampling.guard`. Any thread may call `compile`.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, guard: Guard | None = None, cache_size: int = 128) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self._size = cache_size
        self._cache: OrderedDict[tuple[Kind, str], _Known] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: Kind, spec: Any) -> Grammar:
        """Compile `spec`, which is, by `kind`, a JSON schema, a pattern, a Lark grammar or a list of strings.

        Raises:
            GrammarError: `spec` is invalid or too large, or it uses something that is not supported, which the message
                names.
            GrammarUndecided: the check could not run; nothing is cached, and a retry may succeed.
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
        """Compile a small fixed grammar in the child process.

        Raises:
            GrammarUndecided: the child fails even for this grammar, so no grammar of a request is to blame.
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
    """Return the grammar in the format of llguidance.

    Raises:
        ValueError, TypeError, RecursionError: `spec` is invalid.
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
    """Shorten a message of llguidance to one line: its first line, and the line with the reason, if any."""
    lines = problem.strip().splitlines() or ["not a valid grammar"]
    if lines[0].startswith("NoExtension"):
        return "no text matches the grammar"
    if "coerce_one_of" in lines[0]:
        return "oneOf is supported only where its schemas exclude each other by type or constant: write anyOf"
    first = lines[0] if len(lines[0]) <= _LINE else lines[0][:_LINE] + "…"
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return f"{first} {reason[:_LINE]}".strip()


def apply_masks(logits: Tensor, matchers: dict[int, Matcher]) -> None:
    """Set the logits of forbidden ids to -inf.

    Args:
        logits: `[R, ids]`; changed in place.
        matchers: row → matcher of its text; other rows stay as they are.
    """
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
