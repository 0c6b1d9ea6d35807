"""The input of the engine: a `Request` with its `SamplingParams`. Immutable; any thread may read it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling.structured import Grammar


class RequestError(Exception):
    """The engine refuses a request; the message is for the user who sent it."""


class InvalidRequest(RequestError):
    """A parameter or a token id is out of range for this model."""


class GrammarError(RequestError):
    """The grammar that the text must match cannot be compiled."""


class GrammarUndecided(Exception):
    """Whether a grammar compiles could not be determined. Retryable: the cause is this process, not the grammar."""


class PromptTooLong(RequestError):
    """The request can never fit into the KV pool or the model's context, however empty the pool is."""


@dataclass(frozen=True, slots=True)
class Bans:
    """Ids that are not sampled, unless every other id is forbidden as well."""

    always: frozenset[int] = frozenset()
    """Banned at every position."""
    first: frozenset[int] = frozenset()
    """Banned as the first output id."""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Tuples of two or more ids: the last id is banned directly after all ids before it, which may be in the prompt."""

    def now(self, tokens: Seq[int], position: int) -> frozenset[int]:
        """Return the ids that are banned as the next output id.

        Args:
            tokens: ids of the prompt and of the output so far.
            position: index of the next output id, from 0.
        """
        found = {ids[-1] for ids in self.sequences if tuple(tokens[-len(ids) + 1 :]) == ids[:-1]}
        return self.always.union(found, () if position else self.first)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Ranges are not checked here: the worker does when it parses a request.

    The docstring of `engine.sampling.sampler` has the order in which they are applied. A field with the name of a key
    of a job's body gets its value from that key (`worker.jobs.translate`); the default here is the job's, too.
    """

    max_tokens: int
    """Maximum number of output ids, at least 1."""
    min_tokens: int = 0
    """Number of output ids before which no EOS, stop id or stop string ends the text."""
    temperature: float = 1.0
    """0 means greedy: the highest logit after bias and penalties."""
    top_p: float = 1.0
    top_k: int = 0
    """Sample from the k highest logits only; 0: off."""
    min_p: float = 0.0
    """Minimum probability relative to that of the most likely id; 0: off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its logit)."""
    seed: int | None = None
    """None: a random seed, so that requests without a seed differ between workers and restarts."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    bans: Bans | None = None
    skip_special_tokens: bool = True
    n: int = 1
    """Number of choices."""
    logprobs: int | None = None
    """Return the log-probability of each output id and of this many most likely ids; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Same as `logprobs`, for the ids of the prompt."""

    @property
    def penalised(self) -> bool:
        """Whether the request has a repetition, presence or frequency penalty."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One prompt and its parameters. The engine keeps its own state of a request in `engine.sequence.RequestState`.

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
    """Only requests with the same salt share prefix blocks."""
    grammar: Grammar | None = None
    """Grammar that the text must match; None: free text."""
    place: tuple[int, int] = (0, 0)
    """Position in the request's lane: the number pair of its stream entry. A request that reaches the engine late is
    served before the waiting requests of its lane that have a higher place."""
    noise_seed: int = field(init=False)
    """Seed of the random numbers: `params.seed`, or a random number drawn when this object is created."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens")
        seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        object.__setattr__(self, "noise_seed", seed)
