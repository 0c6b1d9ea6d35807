"""CUDA graphs of decode steps: each launches all kernels from the embedding to the logits at once. There is a graph
for some numbers of rows and some bounds of the longest context.

A graph reads and writes fixed memory. All that differs between steps is in the device's staging buffer and the block
tables; rows, sequences and work items beyond a step's own are padding, which computes nothing that is read.

The graphs share one memory pool, from the largest to the smallest, so that the smaller ones fit into the memory of the
largest. That is safe since they run one after the other; only their logits, which are read after the replay, lie in a
buffer of their own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from kernels.attention.base import AttentionBackend

log = structlog.get_logger()

_CONTEXTS = (1024, 4096, 16384)
"""Bounds of the longest context, in tokens; the longest possible context is a further one."""
NOT_CAPTURED = "not captured"
"""`Graphs.reason` before `capture`."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded step."""

    rows: int
    """Rows and sequences, padding included."""
    longest: int
    """Bound of the longest context."""
    recorded: Any
    """A `torch.cuda.CUDAGraph`."""
    logits: Tensor
    """`[rows, vocab]`; the next replay of any graph overwrites them."""

    def replay(self) -> Tensor:
        """Launch the step, and return its logits."""
        self.recorded.replay()
        return self.logits


class Graphs:
    """Captures the graphs, and finds the graph for a step."""

    def __init__(
        self, step: Callable[[int, int], Tensor], backend: AttentionBackend, max_rows: int, max_context: int
    ) -> None:
        """Create it without graphs.

        Args:
            step: computes a step of a number of rows and a bound of the context in tokens; returns all logits.
            backend: its `bound` says which contexts need different launches.
            max_rows: maximum number of sequences.
            max_context: longest context, in tokens.
        """
        self._step = step
        self._backend = backend
        self._max_context = max_context
        self.sizes: tuple[int, ...] = tuple(
            sorted({*(n for n in (1, 2, 4, 8) if n < max_rows), *range(16, max_rows, 16), max_rows})
        )
        """Numbers of rows for which `capture` records graphs."""
        self.reason: str | None = NOT_CAPTURED
        """Why decode steps run without graphs; None: they run with graphs."""
        self.active = True
        """Whether steps may use the graphs; False while they are compared with steps without graphs."""
        self._graphs: dict[tuple[int, int], Graph] = {}

    @property
    def count(self) -> int:
        """Number of graphs in use."""
        return len(self._graphs)

    @property
    def planned(self) -> int:
        """Number of graphs that `capture` records."""
        return sum(1 for _ in self._keys())

    @property
    def largest(self) -> int:
        """Largest number of rows of a graph."""
        return self.sizes[-1]

    def find(self, rows: int, longest: int) -> Graph | None:
        """Return the smallest graph for a step of decodes; None if there is none.

        Args:
            rows: number of rows.
            longest: the longest context, in tokens.
        """
        if not self._graphs or not self.active:
            return None
        size = next((size for size in self.sizes if size >= rows), None)
        return None if size is None else self._graphs.get((size, self._bound(size, longest)))

    def disable(self, reason: str) -> None:
        """Discard all graphs: steps run without them from now on."""
        self._graphs = {}
        self.reason = reason

    def capture(self, device: torch.device) -> None:
        """Record all graphs, the largest first. If one fails, discard all and keep the reason.

        The staging buffer must hold only padding, of the size of the largest graph. Each step runs once before it is
        recorded: a first launch may load or compile a kernel, or allocate a workspace, which a capture does not allow.
        """
        began = time.monotonic()
        gc.collect()  # so that no graph or tensor of an earlier runner is freed within a capture
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(device))
        graphs: dict[tuple[int, int], Graph] = {}
        logits: Tensor | None = None
        try:
            # A failing capture leaves its stream set; the outer block restores the current one.
            with torch.cuda.stream(stream):
                for rows, bound in self._keys():
                    warm = self._step(rows, bound)
                    if logits is None:
                        logits = torch.empty_like(warm)
                    del warm
                    recorded = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(recorded, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        logits[:rows].copy_(self._step(rows, bound))
                    graphs[rows, bound] = Graph(rows, bound, recorded, logits[:rows])
        except Exception as error:
            cause = error.__context__ or error  # ending a capture that failed raises, too
            log.debug("graphs_not_captured", exc_info=True)
            self.disable(f"{type(cause).__name__}: {cause}")
            return
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.empty_cache()  # what the unrecorded runs used belongs to the other stream
        self._graphs, self.reason = graphs, None
        log.info("graphs_captured", count=len(graphs), seconds=round(time.monotonic() - began, 1))

    def _keys(self) -> Iterator[tuple[int, int]]:
        """Yield (number of rows, bound of the context) of each graph, the largest first."""
        for rows in reversed(self.sizes):
            bounds = {self._bound(rows, longest) for longest in (*_CONTEXTS, self._max_context)}
            for bound in sorted(bounds, reverse=True):
                yield rows, bound

    def _bound(self, rows: int, longest: int) -> int:
        """Return the bound of the context of the graph for `rows` rows and this longest context."""
        fits = (bound for bound in _CONTEXTS if longest <= bound < self._max_context)
        return self._backend.bound(rows, next(fits, self._max_context), self._max_context)
