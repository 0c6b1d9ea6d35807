"""The values that a step returns: immutable, and can be pickled and passed to another thread or process."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of the probability of an id, in the model's own distribution.

    The distribution is over all ids of the tokenizer, before bias, penalties, masks, temperature and filters.
    """

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the id there, and of the requested number of most likely ids, in order."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. The joined texts of all its deltas are the final text."""

    request_id: str
    index: int
    text: str
    """Whole characters; no text that a stop string may still cut off."""
    token_ids: tuple[int, ...]
    """The ids of this text; an id is in the delta that has the first character of its text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each id, if requested."""


class EngineBroken(RuntimeError):
    """The engine's canary failed: the cause is this process, not a request, and it can compute nothing more."""


class Outcome(enum.StrEnum):
    """How a request ended (the `status` of the wire protocol)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Fault(enum.StrEnum):
    """Cause of the outcome FAILED."""

    NON_FINITE_LOGITS = "non_finite_logits"
    """NaN or infinity in the logits of this request; not retryable, a retry gives the same."""
    GRAMMAR = "grammar"
    """The grammar engine reached a limit, or allowed no id at all; not retryable, a retry gives the same."""
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"
    """The step raised an error, which the message contains."""

    @property
    def may_be_engine(self) -> bool:
        """Whether the cause may be the engine rather than the request, so that the canary must run."""
        return self is not Fault.GRAMMAR


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """Final result of one choice. Text, ids and logprobs end at the same place."""

    index: int
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    token_ids: tuple[int, ...]
    """Output ids, without those whose text a stop string cut off."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry for each prompt id, if requested; the first is None, since it has no probability."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Final output of a request, emitted once, after its blocks were freed."""

    request_id: str
    outcome: Outcome
    choices: tuple[ChoiceResult, ...]
    """One entry for each choice, with its partial text if the outcome is not SUCCEEDED."""
    prompt_tokens: int
    completion_tokens: int
    """Number of sampled ids, over all choices; also those that a stop string cut off."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache when the request was first admitted."""
    fault: Fault | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step. Deltas come before final outputs: a request in `finished` may have deltas here."""

    deltas: tuple[Delta, ...] = ()
    finished: tuple[Finished, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.deltas or self.finished)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of gauges and counters; counters never decrease."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    total_blocks: int = 0
    host_slots: int = 0
    free_host_slots: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    """Free blocks that hold a findable prefix."""
    steps: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    prefix_queries: int = 0
    """Counter: prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Counter: prompt tokens found in the prefix cache."""
