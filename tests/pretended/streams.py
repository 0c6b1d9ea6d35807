"""The queue of the pretended GPU, which is as late as it may be: nothing runs before the host waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretended.memory import Block

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu


class Queue:
    """Operations in the order of their launch, across all streams."""

    def __init__(self) -> None:
        self._items: deque[tuple[str, Callable[[], object]]] = deque()
        self.launched = 0
        """Ticket of the operation that was launched last."""
        self.done = 0
        """Ticket of the operation that has run last."""
        self._lost: str | None = None

    def add(self, name: str, run: Callable[[], object]) -> None:
        """Launch an operation."""
        self._items.append((name, run))
        self.launched += 1

    def drain(self, ticket: int | None = None) -> None:
        """Run what was launched, up to a ticket.

        Raises:
            torch.AcceleratorError: an operation failed, now or earlier: the device is lost.
        """
        last = self.launched if ticket is None else ticket
        if self._lost is not None:
            raise torch.AcceleratorError(self._lost)
        if self.done >= last:
            return
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            while self.done < last:
                name, run = self._items.popleft()
                self.done += 1
                try:
                    run()
                except Exception as error:
                    self._lost = f"CUDA error: device-side assert triggered ({name}: {type(error).__name__}: {error})"
                    raise torch.AcceleratorError(self._lost) from error


class Stream:
    """Plays `torch.cuda.Stream`."""

    def __init__(self, gpu: Gpu, *_: object, **__: object) -> None:
        self.gpu = gpu
        self.seen: dict[Stream, int] = {}
        """Stream → ticket up to which work on this stream comes after the other's."""
        self.last = 0
        """Ticket of the last operation on this stream."""

    def wait_event(self, event: Event) -> None:
        """Order later work on this stream behind an event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Order later work on this stream behind all that was launched on another."""
        self.seen[other] = other.last

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event on this stream."""
        event = Event(self.gpu) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.gpu.wait("stream", self.last)

    def query(self) -> bool:
        """Return whether the stream is idle."""
        return self.gpu.queue.done >= self.last

    def check(self, blocks: list[Block], *, writes: bool) -> None:
        """Note that the next operation uses these blocks.

        Raises:
            RuntimeError: another stream used a block, and no event orders the two.
        """
        ticket = self.last = self.gpu.queue.launched + 1
        for block in blocks:
            used = [block.written] if block.written is not None else []
            used += block.read.items() if writes else []
            for stream, at in used:
                assert isinstance(stream, Stream)
                if stream is not self and self.seen.get(stream, 0) < at and self.gpu.queue.done < at:
                    raise RuntimeError(f"two streams use a tensor {[*block.shape]}, and no event orders them")
            if writes:
                block.written = (self, ticket)
            else:
                block.read[self] = ticket


class Event:
    """Plays `torch.cuda.Event`."""

    PATIENCE = 2
    """Queries that find a recorded event incomplete."""

    def __init__(self, gpu: Gpu, *_: object, **__: object) -> None:
        self.gpu = gpu
        self._ticket = 0
        self._queries = 0
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that was launched up to now."""
        self.gpu.forbid_in_capture("an event is recorded")
        self._stream = self.gpu.stream if stream is None else stream
        self._ticket, self._queries = self._stream.last, 0

    def synchronize(self) -> None:
        """Wait until the marked work is done. An event that is complete or was never recorded costs no wait."""
        self.gpu.forbid_in_capture("the host waits (event)")
        if self.gpu.queue.done < self._ticket:
            self.gpu.wait("event", self._ticket)

    def query(self) -> bool:
        """Return whether the marked work is done: it is after a few queries."""
        self.gpu.forbid_in_capture("an event is queried")
        self._queries += 1
        if self._queries > self.PATIENCE:
            self.gpu.queue.drain(self._ticket)
        return self.gpu.queue.done >= self._ticket

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work on a stream behind the marked work."""
        stream = self.gpu.stream if stream is None else stream
        if self._stream is not None:
            stream.seen[self._stream] = max(self._ticket, stream.seen.get(self._stream, 0))

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds between two events, which this device cannot tell."""
        self.gpu.forbid_in_capture("an event is asked for its time")
        return 0.0 if end.gpu is self.gpu else -1.0


@contextmanager
def on_stream(gpu: Gpu, stream: Stream | None) -> Iterator[None]:
    """Launch on a stream until the end of the block."""
    before, gpu.stream = gpu.stream, stream or gpu.stream
    try:
        yield
    finally:
        gpu.stream = before
