"""What one step will do: a `Plan` made by the scheduler, executed by the runner, then committed or abandoned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Sequence

Copies = tuple[tuple[int, int], ...]


class Slice(NamedTuple):
    """Compute tokens `[start, start + num_tokens)` of a sequence."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether this reaches the last known token, so that the next one is sampled from its logits."""
    forks: tuple[Sequence, ...] = ()
    """Choices that start from here: each samples a token of its own from the same logits and shares the blocks."""

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """Who gets a token from the last row of this slice."""
        return (self.seq, *self.forks) if self.samples else ()

    @property
    def prompt_rows(self) -> range:
        """The positions in this slice whose logits are wanted for the prompt id after them."""
        seq = self.seq
        if not seq.wants_prompt_logprobs:
            return range(0)
        return range(
            max(self.start, len(seq.prompt_logprobs) - 1), min(self.start + self.num_tokens, seq.num_prompt_tokens - 1)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, immutable. An empty plan is legal: there was no room, or nothing to do."""

    slices: tuple[Slice, ...] = ()
    """Decodes first, then prefill chunks, each sequence at most once."""
    admitted: tuple[Sequence, ...] = ()
    """Who left WAITING in this step; they go back there if the plan is abandoned."""
    preempted: tuple[Sequence, ...] = ()
    """Who lost their device blocks in this step."""
    swap_out: Copies = ()
    """(device block, host slot): copies to make before the forward, first of all."""
    swap_in: Copies = ()
    """(host slot, device block): copies to make after those."""
    copies: Copies = ()
    """(device block, device block): copies to make after those; all are read before any is written."""

    @property
    def moves(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.swap_out or self.swap_in or self.copies)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """Who gets a token, in order."""
        return tuple(seq for piece in self.slices for seq in piece.sampling)

    def runnable(self) -> Plan:
        """The same plan less the sequences that have ended since it was made, or that are on hold. Copies stay."""
        return dataclasses.replace(
            self,
            slices=tuple(
                piece._replace(forks=tuple(f for f in piece.forks if not f.status.ended))
                for piece in self.slices
                if not piece.seq.status.ended and not piece.seq.state.on_hold
            ),
            admitted=tuple(seq for seq in self.admitted if not seq.status.ended),
        )
