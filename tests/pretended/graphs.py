"""Plays CUDA graphs: a capture records operations and runs none; a replay runs them on the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tests.pretended.memory import Block, Share
from tests.pretended.streams import on_stream

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu
    from tests.pretended.streams import Stream

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"


class CudaGraph:
    """Plays `torch.cuda.CUDAGraph`."""

    def __init__(self, gpu: Gpu, *_: object, **__: object) -> None:
        self.gpu = gpu
        self.operations: list[tuple[str, Callable[[], object]]] = []
        self.refused: str | None = None
        """Why the capture cannot be used."""
        self._share: Share | None = None
        self._handle: object = None
        self._inside: weakref.WeakSet[Block] = weakref.WeakSet()
        self._outside: dict[int, tuple[weakref.ref[Block], tuple[int, ...]]] = {}
        self._ready = False

    @property
    def outliving(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors that were made in the capture and live."""
        return sorted(block.shape for block in self._inside)

    def pool(self) -> object:
        """Return the handle of the graph's memory pool."""
        return self._handle

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: object) -> None:
        """Record from now on."""
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"unknown capture error mode {capture_error_mode!r}")
        if self.gpu.capturing is not None or self._ready:
            raise RuntimeError("a capture is under way, or the graph was captured before")
        if self.gpu.stream is self.gpu.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._handle = object() if pool is None else pool
        self._share = self.gpu.memory.pool(self._handle)
        self._share.graphs += 1
        self.gpu.capturing = self

    def capture_end(self) -> None:
        """Stop to record.

        Raises:
            torch.AcceleratorError: something was refused during the capture.
        """
        self.gpu.capturing = None
        if self.refused is not None:
            raise torch.AcceleratorError(f"CUDA error: the capture was invalidated: {self.refused}")
        self._ready = True

    def allocate(self, nbytes: int, shape: tuple[int, ...]) -> Block:
        """Return a block of the pool."""
        assert self._share is not None
        block = self._share.allocate(nbytes, shape)
        block.computed = False
        self._inside.add(block)
        return block

    def record(self, name: str, run: Callable[[], object], blocks: list[Block]) -> None:
        """Record an operation on these blocks."""
        self.operations.append((name, run))
        for block in blocks:
            if block not in self._inside and id(block) not in self._outside:
                self._outside[id(block)] = weakref.ref(block), block.shape

    def replay(self) -> None:
        """Launch the recorded operations.

        Raises:
            RuntimeError: nothing was captured, or a tensor that the graph uses was freed since.
        """
        self.gpu.forbid_in_capture("a graph is replayed")
        if not self._ready:
            raise RuntimeError("a graph is replayed that was never captured")
        gone = [shape for block, shape in self._outside.values() if block() is None]
        if gone:
            raise RuntimeError(f"the graph uses tensors that were freed since its capture, of shapes {gone}")
        for block in self._inside:
            block.computed = True
        alive = [found for block, _ in self._outside.values() if (found := block()) is not None]
        self.gpu.stream.check([*alive, *self._inside], writes=True)
        self.gpu.queue.add("graph", self._run)
        self.gpu.replays += 1

    def reset(self) -> None:
        """Delete what was captured."""
        if self._share is not None:
            self._share.drop_graph()
        self._share, self._ready = None, False
        self.operations.clear()
        self._outside.clear()

    def __del__(self) -> None:
        self.reset()

    def _run(self) -> None:
        for name, run in self.operations:
            try:
                run()
            except Exception as error:
                raise RuntimeError(f"{name} of a graph: {error}") from error


@contextmanager
def capture(
    gpu: Gpu,
    cuda_graph: CudaGraph,
    pool: object = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Play `torch.cuda.graph`."""
    gpu.wait("synchronize")
    gpu.memory.empty_cache()
    with on_stream(gpu, stream or gpu.capture_stream):
        gpu.stream.wait_stream(gpu.default_stream)
        cuda_graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()
