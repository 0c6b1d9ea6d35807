"""The engine's record of a request and of each of its choices, and the state machine of a choice.

                     admit                    finish
    ┌───────────┐ ──────────► ┌───────────┐ ──────────► ┌────────────┐
    │  WAITING  │             │  RUNNING  │             │  FINISHED  │
    └───────────┘ ◄────────── └───────────┘             └────────────┘
          ▲        preempt,     │       ▲
          │       by recompute  │       │ resume
          │                     ▼       │
          │                   ┌───────────┐             ┌─────────────┐
          └────────────────── │  SWAPPED  │             │  CANCELLED  │
             host tier lost   └───────────┘             └─────────────┘

From every live status a sequence may also move to FINISHED (expired, failed) or CANCELLED, which it never leaves.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import Request

if TYPE_CHECKING:
    from engine.outputs import TokenLogprobs
    from engine.sampling.structured import Matcher
    from engine.sampling.text import TextStream


class SequenceStatus(enum.IntEnum):
    """Status of a sequence; FINISHED and all later ones mean that it has ended."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3
    CANCELLED = 4

    @property
    def ended(self) -> bool:
        return self >= SequenceStatus.FINISHED


_ENDINGS = frozenset({SequenceStatus.FINISHED, SequenceStatus.CANCELLED})

TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: _ENDINGS | {SequenceStatus.RUNNING},
    SequenceStatus.RUNNING: _ENDINGS | {SequenceStatus.WAITING, SequenceStatus.SWAPPED},
    SequenceStatus.SWAPPED: _ENDINGS | {SequenceStatus.RUNNING, SequenceStatus.WAITING},
    SequenceStatus.FINISHED: frozenset(),
    SequenceStatus.CANCELLED: frozenset(),
}
"""All legal transitions of the state machine."""


class IllegalTransition(RuntimeError):
    """A transition that is not in `TRANSITIONS`: a bug in the engine."""


class FinishReason(enum.StrEnum):
    """Why a choice ended (the `finish_reason` of the wire protocol)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


Rank = tuple[float, tuple[int, int], int, int]


@dataclass(eq=False, slots=True)
class RequestState:
    """The engine's record of an accepted request, from `Engine.add` until the request ends."""

    request: Request
    arrival: int = 0
    """Number of requests that the engine accepted before this one."""
    turn: float = 0.0
    """Sort key for scheduling, in seconds: arrival time plus `EngineConfig.aging_seconds` for each lower lane."""
    sequences: list[Sequence] = field(default_factory=list)
    """One sequence for each choice, in the order of the choices."""
    gated: bool = False
    """Whether the request was passed to `Engine.gate`."""
    on_hold: bool = False
    """Whether the request waits for the gate's answer; no token of it is computed then, see `Engine.hold`."""
    failed_alone: bool = False
    """Whether the request ran alone in a step that raised. If such a step raises again, the request fails."""


class Sequence:
    """The state of one choice.

    A step moves `num_computed_tokens` (tokens whose K and V are in the pool) towards `num_tokens`; chunked prefill,
    prefix hits, decoding and recomputing after a preemption are all cases of this rule. What follows from `tokens`,
    `num_pending`, `num_computed_tokens` and `block_table` is a property, so that a preemption cannot make it stale.
    """

    _uids = itertools.count()

    __slots__ = (
        "block_hashes",
        "block_table",
        "finish_reason",
        "host_table",
        "index",
        "logprobs",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_sent_tokens",
        "overtaken",
        "prompt_logprobs",
        "rank",
        "request",
        "state",
        "status",
        "stop",
        "text",
        "tokens",
        "uid",
    )

    def __init__(self, state: RequestState, index: int, text: TextStream) -> None:
        request = state.request
        self.uid: int = next(Sequence._uids)
        """Unique in this process."""
        self.request = request
        self.state = state
        self.index = index
        """Index of this choice among those of the request, from 0."""
        self.rank: Rank = (state.turn, request.place, state.arrival, index)
        """Order of service: the lowest rank is served first. Unique, and the same before and after a preemption."""
        self.tokens: list[int] = list(request.prompt)
        """Prompt ids, then the known output ids; append-only."""
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_pending = 0
        """Number of ids after `tokens` that launched steps sample and that are not known yet: 0 or 1 when a step is
        scheduled or launched."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None before."""
        self.num_sent_tokens = 0
        """Number of output ids in the deltas so far."""
        self.block_table: list[int] = []
        """Block ids in the order of the tokens they hold."""
        self.host_table: list[int] = []
        """Slots of the host tier, while the status is SWAPPED."""
        self.overtaken = 0
        """How many sequences were admitted before this one while there was no room for it."""
        self.block_hashes: list[bytes] = []
        """Cache of the chained hashes of the full blocks of `tokens`; they depend on nothing else."""
        self.text = text
        self.logprobs: list[TokenLogprobs] = []
        """One entry for each output id, if requested."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """One entry for each prompt id computed so far, if requested; the first has no probability."""
        self.matcher: Matcher | None = request.grammar.matcher() if request.grammar is not None else None
        """State of the grammar after the output so far; None: free text."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        """The stop string or stop id that ended the text, if any."""

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status.

        Raises:
            IllegalTransition: `TRANSITIONS` does not list the move.
        """
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self!r}: {self.status.name} to {status.name}")
        self.status = status

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the pending one included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Number of known output ids."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def ends_by_length(self) -> bool:
        """Whether the output, the pending id included, has `max_tokens` ids."""
        return len(self.tokens) + self.num_pending - self.num_prompt_tokens >= self.request.params.max_tokens

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt ids are still to be computed; only the first choice computes them."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not computed: 1 while decoding, never 0 while the sequence is live."""
        return len(self.tokens) + self.num_pending - self.num_computed_tokens

    @property
    def max_tokens(self) -> int:
        return self.request.params.max_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id!r}[{self.index}], {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, blocks={self.block_table})"
        )
