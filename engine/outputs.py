"""What a step gives back: immutable snapshots, picklable, safe to hand to another thread or process."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of an id's probability under the model's own distribution.

    That is before bias, penalties, masks, temperature and filters, over all ids that the tokenizer knows.
    """

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """For one position: the id that stands there, and the most likely ones as many as were asked for, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. Joined over a request's life they equal the final text."""

    request_id: str
    index: int
    text: str
    """Never splits a character, never holds text that a stop string may still cut."""
    token_ids: tuple[int, ...]
    """The ids that this text carries; an id goes out with the first character of its text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry an id, where asked for."""


class EngineBroken(RuntimeError):
    """The engine fails even for its canary: no request is to blame, and this process computes nothing more."""


class Outcome(enum.StrEnum):
    """How a request ended (the `status` of the wire protocol)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Fault(enum.StrEnum):
    """What failed, where the outcome is FAILED."""

    NON_FINITE_LOGITS = "non_finite_logits"
    """NaN or infinity in this request's logits; trying again would give the same."""
    GRAMMAR = "grammar"
    """The grammar's machinery met a limit, or allowed nothing at all; trying again would give the same."""
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"
    """The step raised; the message says what."""

    @property
    def doubtful(self) -> bool:
        """Whether the engine may be to blame as well as the request; its canary tells."""
        return self is not Fault.GRAMMAR


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    index: int
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    token_ids: tuple[int, ...]
    """Text, ids and logprobs end at the same place: ids that a stop string cut off are not here."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt id, where asked for; the first has no probability and is None."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The one last word on a request; its blocks are free when it is returned."""

    request_id: str
    outcome: Outcome
    choices: tuple[ChoiceResult, ...]
    """Partial text is kept whatever the outcome. Always one entry a choice."""
    prompt_tokens: int
    completion_tokens: int
    """All ids that were sampled."""
    cached_tokens: int
    fault: Fault | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Deltas of a request come before its Finished; a request in `finished` may still have deltas here."""

    deltas: tuple[Delta, ...] = ()
    finished: tuple[Finished, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.deltas or self.finished)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for gauges and counters; counters only grow."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    total_blocks: int = 0
    host_slots: int = 0
    free_host_slots: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    """Free blocks that still hold a findable prefix."""
    steps: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
