"""What the engine is asked for: a `Request` with its `SamplingParams`, owning one `Sequence` a choice."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.sampling.structured import Grammar


class RequestError(Exception):
    """A request that the engine refuses; the message is for its sender."""


class InvalidRequest(RequestError):
    """A parameter or a token id is out of range for this model."""


class GrammarError(RequestError):
    """What a text is to match cannot be compiled."""


class GrammarUndecided(Exception):
    """Whether a grammar can be compiled was not found out; that is this process's fault, not the grammar's."""


class PromptTooLong(RequestError):
    """The prompt can never fit, whatever else finishes ("no room ever", as opposed to "no room now")."""


@dataclass(frozen=True, slots=True)
class Bans:
    """Ids that are never drawn, unless a grammar allows nothing else."""

    always: frozenset[int] = frozenset()
    first: frozenset[int] = frozenset()
    """Not as the first id of the output."""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Of two ids or more: the last one is not drawn after the others, which may lie in the prompt."""

    def now(self, tokens: Seq[int], position: int) -> frozenset[int]:
        """Return the banned ids at a position of the output, after the ids of prompt and output `tokens`."""
        found = {ids[-1] for ids in self.sequences if tuple(tokens[-len(ids) + 1 :]) == ids[:-1]}
        return self.always.union(found, () if position else self.first)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Ranges are checked where requests come in, not here.

    Order of application: logit_bias, penalties, the grammar, bans and `min_tokens`, temperature, top_k, top_p, min_p.
    """

    max_tokens: int
    """Output ids at most, ≥ 1."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy: the highest logit after bias and penalties."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    """None draws a fresh seed, so that unseeded requests differ between workers and restarts."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    bans: Bans | None = None
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    """How many of the most likely ids come with each id's log-probability; None: not asked for."""
    prompt_logprobs: int | None = None
    """The same for the ids of the prompt."""


@dataclass(eq=False)
class Request:
    """One prompt and its choices.

    Raises:
        InvalidRequest: the prompt is empty.
    """

    id: str
    prompt: Seq[int]
    """Token ids, at least one."""
    params: SamplingParams
    priority: int = 1
    """0 high, 1 normal, 2 low: the lanes of the queue."""
    deadline: float | None = None
    """`time.monotonic()` seconds after which the request is expired."""
    cache_salt: str = ""
    """Only requests of one salt share prefix blocks."""
    arrival: int = -1
    """Position in the order of arrival, given by the engine."""
    grammar: Grammar | None = None
    """What the text must match."""
    place: tuple[int, int] = (0, 0)
    """Its place in the order of its lane. A request that comes late, since it was held up, goes before those waiting
    ones that stand behind it."""
    turn: float | None = None
    """The arrival time in seconds, later by an allowance for each lower lane; given by the engine, and kept where a
    request is added again."""
    on_hold: bool = field(init=False, default=False)
    """Whether it waits for the gate's answer and is not computed, see `Engine.hold`."""
    noise_seed: int = field(init=False)
    sequences: list[Sequence] = field(init=False, default_factory=list)
    """Its choices, made when the engine accepts the request."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens")
        self.noise_seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
