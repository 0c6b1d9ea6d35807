"""The work of one step: a `Plan`, which the scheduler makes and the runner executes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.sequence import RequestState, Sequence

Copies = tuple[tuple[int, int], ...]
"""(source, target) of each copy of a block."""

_NO_ROWS = range(0)


class Slice(NamedTuple):
    """Compute the tokens `[start, start + num_tokens)` of a sequence."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the slice ends at the last token, so that the next token is sampled from its logits."""
    forks: tuple[Sequence, ...] = ()
    """Choices to fork after this slice: each samples its own token from the same logits and shares the blocks."""

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that sample a token from the last row of this slice."""
        return (self.seq, *self.forks) if self.samples else ()

    @property
    def prompt_rows(self) -> range:
        """The positions in this slice whose logits give the logprob of the next prompt id, where requested."""
        seq = self.seq
        if self.start >= seq.num_prompt_tokens - 1 or not seq.wants_prompt_logprobs:
            return _NO_ROWS
        return range(
            max(self.start, len(seq.prompt_logprobs) - 1), min(self.start + self.num_tokens, seq.num_prompt_tokens - 1)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, immutable. A plan without slices is legal: no block was free, or no sequence can run."""

    slices: tuple[Slice, ...] = ()
    """Decodes first, then prefill chunks, each sequence at most once."""
    admitted: tuple[Sequence, ...] = ()
    """Sequences that left WAITING in this step; `abandon` moves them back."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that lost their device blocks in this step."""
    swap_out: Copies = ()
    """(device block, host slot): to be copied before the forward pass, first of all."""
    swap_in: Copies = ()
    """(host slot, device block): to be copied after `swap_out`."""
    copies: Copies = ()
    """(device block, device block): to be copied after `swap_in`; all are read before any is written."""

    @property
    def moves(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.swap_out or self.swap_in or self.copies)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that sample a token, in the order of the sampled rows."""
        return tuple(seq for piece in self.slices for seq in piece.sampling)

    def runnable(self) -> Plan:
        """Return this plan without sequences that have ended since it was made or that are on hold. Copies stay."""
        return dataclasses.replace(
            self,
            slices=tuple(
                piece._replace(forks=tuple(f for f in piece.forks if not f.status.ended))
                for piece in self.slices
                if not piece.seq.status.ended and not piece.seq.state.on_hold
            ),
            admitted=tuple(seq for seq in self.admitted if not seq.status.ended),
        )


@dataclass
class Draft:
    """A plan that the scheduler is still making."""

    budget: int
    """Tokens that the step may compute beyond `counts`."""
    only: RequestState | None
    """The only request whose sequences may run; None: all requests."""
    counts: dict[Sequence, int] = field(default_factory=dict)
    """Tokens to compute of each sequence."""
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    forks: dict[Sequence, tuple[Sequence, ...]] = field(default_factory=dict)
    num_started: int = 0
    """Number of WAITING and SWAPPED sequences that moved to RUNNING."""

    def includes(self, seq: Sequence) -> bool:
        """Return whether this sequence may run in the step."""
        return self.only is None or seq.state is self.only
