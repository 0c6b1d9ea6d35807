"""The engine's thread: applies messages, runs steps, passes outputs on. No other thread touches the engine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from engine.outputs import EngineBroken, EngineStats, StepOutput
from engine.request import Request, RequestError
from tokenmill.protocol.errors import ErrorCode, JobError
from worker.inbox import Add, Cancel, Do, Drop, Inbox, Message
from worker.jobs.results import Answer
from worker.ops.exits import Exit
from worker.ops.telemetry import Telemetry
from worker.ops.threads import Fatal
from worker.queue.outbox import Outbox

log = structlog.get_logger()


class EngineLike(Protocol):
    """The part of `engine.engine.Engine` that the worker uses."""

    gate: Callable[[list[Request]], None] | None

    @property
    def has_work(self) -> bool: ...
    @property
    def waits(self) -> bool: ...
    @property
    def computing(self) -> frozenset[str]: ...
    def check(self) -> None: ...
    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int: ...
    def validate(self, request: Request) -> None: ...
    def add(self, request: Request, turn: float | None = None) -> None: ...
    def turn(self, request_id: str) -> float | None: ...
    def cancel(self, request_id: str) -> None: ...
    def drop(self, request_id: str) -> None: ...
    def hold(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> bool: ...
    def step(self) -> StepOutput: ...
    def stats(self) -> EngineStats: ...
    def check_idle(self) -> str | None: ...


TICK_SECONDS = 1.0
"""Longest sleep of an idle loop, so that `ticked_at` shows that it lives."""
HELD_SECONDS = 0.05
"""Longest sleep while every request of the engine waits for its START: their deadlines are still checked."""


class EngineLoop:
    """Owns the engine while `run` runs: messages come from `inbox`, outputs go to `outbox`."""

    def __init__(
        self, engine: EngineLike, stop: threading.Event, inbox: Inbox, outbox: Outbox, telemetry: Telemetry
    ) -> None:
        self.engine = engine
        self.stats: EngineStats = engine.stats()
        """The engine's statistics after the last step."""
        self.step_since: float | None = None
        """`time.monotonic()` at which the step under way began; None between steps."""
        self.broken: str | None = None
        """Why the engine cannot compute, if its canary failed."""
        self.died = False
        """Whether an exception ended the engine's thread."""
        self.ticked_at = time.monotonic()
        """`time.monotonic()` at which the loop last looked for something to do."""
        self._inbox = inbox
        self._outbox = outbox
        self._telemetry = telemetry
        self._later: list[Add] = []
        self._later_at = 0.0
        self._stop = stop
        self._dirty = False
        self._leak: str | None = None
        """What the last check of the idle engine found."""

    def wake(self) -> None:
        """Wake a sleeping loop, so that it checks `stop`."""
        self._inbox.wake()

    def defer(self, request: Request, seconds: float) -> None:
        """Add a request again within `seconds`. Called by the gate, on the engine's own thread."""
        if not self._later:
            self._later_at = time.monotonic() + seconds
        self._later.append(Add(request, self.engine.turn(request.id)))

    def check(self) -> None:
        """Run the engine's canary.

        Raises:
            Fatal: the canary failed.
        """
        try:
            self.engine.check()
        except EngineBroken as error:
            self._break(error)

    def run(self) -> None:
        """Step while there is work, else sleep; return when `stop` is set.

        Raises:
            Fatal: a step failed for every request, and for the engine's canary.
        """
        try:
            while not self._stop.is_set():
                self.turn()
        except EngineBroken as error:
            self._break(error)
        except BaseException:
            self.died = True
            raise

    def _break(self, error: EngineBroken) -> NoReturn:
        self.broken = str(error)
        raise Fatal(Exit.BROKEN, self.broken) from error

    def turn(self, wait: bool = True) -> None:
        """Apply all messages (with `wait`, sleep until one comes if there is no work); then step if there is work."""
        self._take_in(wait)
        self.ticked_at = time.monotonic()
        if self.engine.has_work or self._dirty:
            self._step()

    def _step(self) -> None:
        self._dirty = False
        self.step_since = began = time.monotonic()
        output = self.engine.step()
        self.step_since = None
        self._telemetry.step.add(time.monotonic() - began)
        self.stats = self.engine.stats()
        if output:
            self._telemetry.generation_tokens += sum(len(delta.token_ids) for delta in output.deltas)
            self._outbox.give(output)
        if not self.engine.has_work:
            self._check_idle()

    def _check_idle(self) -> None:
        """Log leaked blocks, once for each change of their number; the worker continues.

        Raises:
            engine.scheduling.block_pool.IntegrityError: the engine could give wrong text, or requests could wait
                forever.
        """
        leak = self.engine.check_idle()
        if leak is not None and leak != self._leak:
            message = f"{leak}: a bug, please report it; a restart of the worker frees the blocks"
            log.error("blocks_leaked", message=message)
        self._leak = leak

    def _take_in(self, wait: bool) -> None:
        """Apply all messages; with `wait`, sleep until the next message while there is nothing to compute."""
        if self._later and time.monotonic() >= self._later_at:
            later, self._later = self._later, []
            for add in later:
                self._apply(add)
        idle = wait and not self._dirty and (self.engine.waits or not self.engine.has_work)
        most = HELD_SECONDS if self.engine.has_work else TICK_SECONDS
        until = self._later_at - time.monotonic() if self._later else most
        try:
            message = self._inbox.get(block=idle, timeout=min(most, max(0.0, until)))
            while True:
                if message is not None:
                    self._apply(message)
                message = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _apply(self, message: Message) -> None:
        match message:
            case Add(request, turn):
                try:
                    self.engine.add(request, turn)
                except RequestError as error:
                    self._outbox.give(Answer.of(request.id, JobError(ErrorCode.INVALID_REQUEST, str(error))))
            case Cancel(handle):
                self._recall(handle)
                self.engine.cancel(handle)
            case Drop(handle):
                self._later = [add for add in self._later if add.request.id != handle]
                self.engine.drop(handle)
            case Do(work):
                work()
        self._dirty = True

    def _recall(self, handle: str) -> None:
        """Add a deferred request to the engine at once, so that the engine can end it.

        It stays deferred while the engine has still to drop it: the canceller sends its message again.
        """
        for add in [add for add in self._later if add.request.id == handle]:
            if self.engine.turn(handle) is None:
                self._later.remove(add)
                self.engine.add(add.request, add.turn)
