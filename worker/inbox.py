"""Messages to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Run a request that was validated."""

    request: Request
    turn: float | None = None
    """Place in the order of service of a request that was deferred, see `Engine.add`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; the engine gives its `Finished` out."""

    handle: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a request's blocks; the engine gives nothing out."""

    handle: str


@dataclass(frozen=True, slots=True)
class Do:
    """Call a function on the engine's thread."""

    work: Callable[[], None]


Message = Add | Cancel | Drop | Do


class Inbox:
    """The queue of messages that the engine loop takes in before each step."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def post(self, message: Message) -> None:
        """Send a message; from any thread."""
        self._messages.put(message)

    def wake(self) -> None:
        """Make a sleeping loop look whether it has to end."""
        self._messages.put(None)

    def get(self, block: bool, timeout: float | None = None) -> Message | None:
        """Return the next message, or None from `wake`.

        Raises:
            queue.Empty: there is none, or none came within `timeout` seconds.
        """
        return self._messages.get(block, timeout)
