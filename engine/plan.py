"""What one step will do: a `Plan` made by the scheduler, executed by the runner, then committed or abandoned."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Compute tokens `[start, start + count)` of a sequence."""

    seq: Sequence
    start: int
    count: int
    samples: bool
    """Whether this reaches the last known token, so that the next one is sampled from its logits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, immutable. An empty plan is legal: there was no room, or nothing to do."""

    slices: tuple[Slice, ...] = ()
    """Decodes first, then prefill chunks, each sequence at most once."""
    admitted: tuple[Sequence, ...] = ()
    """Who left WAITING in this step; they go back there if the plan is abandoned."""
    preempted: tuple[Sequence, ...] = ()
    """Who lost their blocks in this step."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(device block, host slot) copies to make before the forward."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host slot, device block) copies to make before the forward."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) device block copies to make before the forward: copy on write of forks."""
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(s.count for s in self.slices))

    def __bool__(self) -> bool:
        return bool(self.slices)

    @property
    def sampling(self) -> tuple[Slice, ...]:
        """The slices that get a token, in order."""
        return tuple(s for s in self.slices if s.samples)
