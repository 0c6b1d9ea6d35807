"""The input and the output of a sampler: rows, prompt rows, sampled ids and logprobs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.outputs import TokenLogprobs
from engine.request import SamplingParams
from engine.sampling.structured import Matcher

MIN_TEMPERATURE = 1e-6
"""Temperatures above 0 that are lower count as this one, so that no quotient overflows."""


@dataclass(frozen=True, slots=True)
class Row:
    """The sampler's input for one choice."""

    uid: int
    params: SamplingParams
    noise_seed: int
    index: int
    """Index of the choice in its request."""
    num_prompt_tokens: int
    tokens: list[int]
    """Prompt and output ids that the host knows (read only)."""
    eos_token_ids: frozenset[int]
    matcher: Matcher | None = None
    pending: bool = False
    """Whether an id after `tokens` is pending: it was sampled, and only the device knows it, in `last[place]`."""
    place: int = 0
    """Row of the choice in the tables of the device, see `engine.device.places`."""

    @property
    def position(self) -> int:
        """Index of the output id that is sampled now, from 0."""
        return len(self.tokens) + self.pending - self.num_prompt_tokens

    @property
    def early(self) -> frozenset[int]:
        """Ids that must not be sampled now because they end the text before `min_tokens`."""
        params = self.params
        return self.eos_token_ids | params.stop_token_ids if self.position < params.min_tokens else frozenset()

    @property
    def banned(self) -> frozenset[int]:
        """Ids that must not be sampled now: `early`, and those of `params.bans`. No id may be pending."""
        bans = self.params.bans
        return self.early if bans is None else self.early | bans.now(self.tokens, self.position)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive rows of logits for which the log-probabilities of the next prompt ids are requested."""

    tokens: Seq[int]
    """The prompt id after each of the rows."""
    top: int
    """Number of most likely ids to return for each row."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """For each row the sampled id, or None if the logits of the row were not finite."""

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """For each row its logprobs; None if not requested."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each slice with `prompt_rows`: logprobs of the prompt ids after these rows."""


class Drawn(Protocol):
    """Ids whose sampling was started; a GPU may still compute them."""

    @property
    def ids(self) -> Tensor:
        """int32 `[R]` on the device of the logits: the sampled ids; -1: the logits of the row were not finite."""
        ...

    def result(self) -> Sampled:
        """Wait until the device has sampled, and return the ids and logprobs.

        Raises:
            torch.AcceleratorError: the device is lost.
        """
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """Ids that are known already (a `Drawn`)."""

    sampled: Sampled

    @property
    def ids(self) -> Tensor:
        return torch.tensor([-1 if i is None else i for i in self.sampled.token_ids], dtype=torch.int32)

    def result(self) -> Sampled:
        return self.sampled
