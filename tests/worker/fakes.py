"""A fake engine and a fake model with the real interfaces; the text is a function of the prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.outputs import (
    ChoiceResult,
    Delta,
    EngineBroken,
    EngineStats,
    Fault,
    Finished,
    Logprob,
    Outcome,
    StepOutput,
    TokenLogprobs,
)
from engine.request import GrammarError, GrammarUndecided, InvalidRequest, PromptTooLong, Request
from engine.sequence import FinishReason

POISON = 66
"""A prompt with this token id fails in the engine."""


class FakeTokenizer:
    """Has one token id for each byte."""

    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Any, tools: Any = None, **template_kwargs: Any) -> list[int]:
        extras = "".join(str(extra) for extra in (tools, template_kwargs) if extra)
        return self.encode(extras + "".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


@dataclass
class FakeCompiler:
    """Compiles every grammar but `bad`; `slow` waits for `release`, `undecided` fails as often as that field says."""

    release: threading.Event = field(default_factory=threading.Event)
    compiled: list[tuple[str, Any]] = field(default_factory=list)
    undecided: int = 0
    broken: bool = False
    """Whether no grammar can be tried."""

    def check(self) -> None:
        if self.broken:
            raise GrammarUndecided("no process to try it in")

    def compile(self, kind: Any, spec: Any) -> Any:
        if spec == "slow":
            self.release.wait(10)
        if spec == "panic":
            raise BaseException("as pyo3 raises what Rust panics with")
        if spec == "bad":
            raise GrammarError("it is bad")
        self.check()
        if spec == "undecided" and self.undecided:
            self.undecided -= 1
            raise GrammarUndecided("no process to try it in")
        self.compiled.append((kind, spec))
        return SimpleNamespace(kind=kind, spec=spec)


@dataclass
class FakeModel:
    name: str = "fake"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    generation: Any = field(default_factory=lambda: SimpleNamespace(eos_token_ids=frozenset({0})))
    max_model_len: int = 256
    grammars: FakeCompiler = field(default_factory=FakeCompiler)


@dataclass
class _Live:
    request: Request
    started: bool = False
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.params.n)]


def text_of(prompt: Sequence[int], choice: int, count: int) -> str:
    """Return the text that the fake engine generates."""
    return "".join(f"{(sum(prompt) + choice + n) % 97} " for n in range(count))


def logprobs_of(request: Request, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
    """Return the fake log-probabilities of tokens, if the request asks for them."""
    top = request.params.logprobs
    return None if top is None else tuple(_logprobs(token, top) for token in tokens)


def _logprobs(token: int, top: int) -> TokenLogprobs:
    """Include minus infinity and NaN, which JSON cannot hold."""
    bad = (float("-inf"), float("nan"))
    return TokenLogprobs(
        Logprob(token, -token / 8), tuple(Logprob(200 + i, bad[i] if i < 2 else -float(i)) for i in range(top))
    )


class FakeEngine:
    """Generates one token in each step for each running choice. Not thread-safe, like the real engine."""

    def __init__(self, max_num_seqs: int = 8, capacity: int = 256, step_seconds: float = 0.0) -> None:
        self.gate: Callable[[list[Request]], None] | None = None
        self.max_num_seqs = max_num_seqs
        self.capacity = capacity
        self.step_seconds = step_seconds
        self.shift = 0
        """Added to each token, so that the text differs from that of another engine."""
        self.draws = False
        """Whether the tokens of a request depend on its noise, unless its temperature is 0."""
        self.steps = 0
        self.computed: list[str] = []
        """The request id of every token that was computed, in order."""
        self.broken = False
        """Whether every request and the canary fail."""
        self.waits = False
        self._on_hold: set[str] = set()
        self.computing: frozenset[str] = frozenset()
        self._live: dict[str, _Live] = {}
        self._cancelled: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        room = self.capacity - prompt_tokens
        if room < 1:
            raise PromptTooLong(f"the prompt has {prompt_tokens} tokens, at most {self.capacity - 1} fit")
        return room if asked is None else min(asked, room)

    def validate(self, request: Request) -> None:
        if any(not 0 <= i < 256 for i in request.prompt):
            raise InvalidRequest("prompt: a token id is out of range")

    def turn(self, request_id: str) -> float | None:
        return None

    def add(self, request: Request, turn: float | None = None) -> None:
        if request.id in self._live:
            raise InvalidRequest(f"{request.id} runs already")
        self._live[request.id] = _Live(request)

    def cancel(self, request_id: str) -> None:
        if request_id in self._live and request_id not in self._cancelled:
            self._cancelled.append(request_id)

    def hold(self, request_id: str) -> None:
        self._on_hold.add(request_id)

    def release(self, request_id: str) -> bool:
        known = request_id in self._on_hold and request_id in self._live and request_id not in self._cancelled
        self._on_hold.discard(request_id)
        return known

    def drop(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._on_hold.discard(request_id)
        if request_id in self._cancelled:
            self._cancelled.remove(request_id)

    def stats(self) -> EngineStats:
        running = sum(live.started for live in self._live.values())
        return EngineStats(
            waiting=len(self._live) - running,
            running=running,
            total_blocks=64,
            free_blocks=64 - running,
            steps=self.steps,
        )

    def check(self) -> None:
        if self.broken:
            raise EngineBroken("the canary died")

    def check_idle(self) -> str | None:
        self.check_integrity()
        return None

    def check_integrity(self) -> None:
        if self._cancelled:
            raise RuntimeError("cancels left over at idle")

    def step(self) -> StepOutput:
        self.steps += 1
        finished = self._sweep()
        self._admit()
        finished += self._sweep()
        deltas: list[Delta] = []
        running = [live for live in self._live.values() if live.started and live.request.id not in self._on_hold]
        self.waits = bool(self._on_hold) and not running
        if running and self.step_seconds:
            time.sleep(self.step_seconds)
        if running:
            self.check()
        for live in running:
            deltas += self._advance(live)
            ended = self._ended(live)
            if ended is not None:
                finished.append(ended)
        return StepOutput(tuple(deltas), tuple(finished))

    def _sweep(self) -> list[Finished]:
        now = time.monotonic()
        out = [self._end(self._live[i], Outcome.CANCELLED, FinishReason.CANCELLED) for i in self._cancelled]
        self._cancelled.clear()
        late = [x for x in self._live.values() if x.request.deadline is not None and x.request.deadline <= now]
        return out + [self._end(live, Outcome.EXPIRED, FinishReason.EXPIRED) for live in late]

    def _admit(self) -> None:
        free = self.max_num_seqs - sum(live.started for live in self._live.values())
        new = [live for live in self._live.values() if not live.started][: max(free, 0)]
        for live in new:
            live.started = True
        if new and self.gate is not None:
            self.gate([live.request for live in new])

    def _advance(self, live: _Live) -> list[Delta]:
        request = live.request
        self.computed.append(request.id)
        noise = request.noise_seed if self.draws and request.params.temperature > 0 else 0
        out = []
        for index, tokens in enumerate(live.tokens):
            value = (sum(request.prompt) + index + len(tokens) + self.shift + noise) % 97
            tokens.append(value)
            out.append(Delta(request.id, index, f"{value} ", (value,), logprobs_of(request, [value])))
        return out

    def _ended(self, live: _Live) -> Finished | None:
        if POISON in live.request.prompt:
            return self._end(live, Outcome.FAILED, FinishReason.ERROR, Fault.INTERNAL)
        if len(live.tokens[0]) >= live.request.params.max_tokens:
            return self._end(live, Outcome.SUCCEEDED, FinishReason.LENGTH)
        return None

    def _end(self, live: _Live, outcome: Outcome, reason: FinishReason, fault: Fault | None = None) -> Finished:
        request = live.request
        del self._live[request.id]
        self._on_hold.discard(request.id)
        choices = tuple(
            ChoiceResult(
                i,
                "".join(f"{value} " for value in t),
                reason,
                None,
                tuple(t),
                logprobs_of(request, t),
                None
                if request.params.prompt_logprobs is None
                else (None, *(_logprobs(p, request.params.prompt_logprobs) for p in request.prompt[1:])),
            )
            for i, t in enumerate(live.tokens)
        )
        return Finished(
            request.id,
            outcome,
            choices,
            len(request.prompt),
            sum(map(len, live.tokens)),
            0,
            fault,
            "poisoned" if fault else None,
        )
