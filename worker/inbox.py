"""Messages to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Add a validated request to the engine."""

    request: Request
    turn: float | None = None
    """Place in the order of service of a request that was deferred, see `Engine.add`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; the engine returns its `Finished`."""

    handle: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a request's blocks; the engine returns no `Finished` for it."""

    handle: str


@dataclass(frozen=True, slots=True)
class Do:
    """Call a function on the engine's thread."""

    work: Callable[[], None]


Message = Add | Cancel | Drop | Do


class Inbox:
    """The queue of messages that the engine loop applies before each step."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def post(self, message: Message) -> None:
        """Send a message; from any thread."""
        self._messages.put(message)

    def wake(self) -> None:
        """Wake a sleeping loop, so that it checks whether it has to end."""
        self._messages.put(None)

    def get(self, block: bool, timeout: float | None = None) -> Message | None:
        """Return the next message, or None from `wake`.

        Raises:
            queue.Empty: there is no message, or no message came within `timeout` seconds.
        """
        return self._messages.get(block, timeout)
