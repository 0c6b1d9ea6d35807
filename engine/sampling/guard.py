"""Tries a new grammar in a process of its own first, which may crash, hang or swell in the worker's place.

llguidance bounds most work by fuel of its own, but it recurses over rules and references, so that a few thousand of
them in a chain overflow the stack, and a wide schema takes it time that grows with the square of its width. Neither can
be stopped in a thread. The child has much less stack than a thread has elsewhere: what passes there passes here.

This file is also the child's program; it imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

import llguidance

SECONDS = 3.0
"""CPU time to compile a grammar and to find its first ids: a busy machine changes no verdict."""
WALL_SECONDS = 30.0
"""After which a child without an answer is given up, though it had little CPU time: that is not the grammar's fault."""
START_SECONDS = 60.0
"""For the child to start and read the tokenizer, on a machine that is busy loading a model."""
TRIES = 2
"""Children that look at a grammar before it is given up as undecided."""
MEGABYTES = 48
"""By which the child may have grown with a grammar in it."""
_TOO_LARGE = 3
_FAILED = 4
"""Exit statuses of a child: it has grown too much; llguidance raised in it."""
_STACK_BYTES = 1 << 20
_SPARE_BYTES = 1 << 30
"""Address space of the child beyond what it has at the start: ends a runaway before it hurts."""

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""For llguidance, wherever a grammar is compiled; a state takes one or two kilobytes."""


def compile_source(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Compile, and find what may come first, which builds most of what a grammar will ever need."""
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class GuardFailed(RuntimeError):
    """The child cannot be started, or was ended from outside: nothing is known of the grammar."""


class _Killed(Exception):
    """The child ended, or said nothing, for a reason that the grammar did not give."""


class Guard:
    """The child and the way to it. Any thread may call `problem`; one grammar is tried at a time."""

    def __init__(self, tokenizer_json: str, n_vocab: int, eos_token_ids: list[int], seconds: float = SECONDS) -> None:
        """`seconds`: CPU time for one grammar."""
        self._setup = json.dumps([tokenizer_json, n_vocab, eos_token_ids, seconds]).encode()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def problem(self, source: str) -> str | None:
        """Try a grammar in the child; returns what is wrong with it, or None if it can be compiled here.

        Raises:
            GuardFailed: the child cannot be started, or was ended from outside, several times: ask again later.
        """
        with self._lock:
            for _ in range(TRIES):
                try:
                    return self._try(source)
                except _Killed:
                    self._stop()
            raise GuardFailed("the process that tries grammars was ended from outside, or had no time to run")

    def _try(self, source: str) -> str | None:
        """Ask the child once.

        Raises:
            _Killed: it gave no verdict, and its end gives none.
        """
        pipe = self._pipe or self._start()
        try:
            pipe.send_bytes(source.encode())
            if pipe.poll(WALL_SECONDS):
                answer: str | None = json.loads(pipe.recv_bytes())
                return answer
        except (EOFError, OSError):
            return self._verdict_of_end()
        raise _Killed

    def _verdict_of_end(self) -> str:
        """Why the child ended, where that tells something of the grammar."""
        child = self._child
        if child is None:
            raise _Killed
        try:
            status = child.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise _Killed from None
        self._stop()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._seconds:g} s to compile"
        if status == _TOO_LARGE:
            return f"it takes more than {MEGABYTES} MiB to compile"
        if status == _FAILED:
            return "its compiler fails"
        if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return "it is nested too deeply, or takes too much memory to compile"
        raise _Killed

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        try:
            self._pipe, theirs = Pipe()
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the worker; the child ends when the pipe does
                )
        except OSError as error:  # no process or file is left for it
            self._stop()
            raise GuardFailed(f"the process that tries grammars does not start: {error.strerror}") from error
        ours = self._pipe
        with contextlib.suppress(EOFError, OSError):  # the child died: told below, like a child that says nothing
            ours.send_bytes(self._setup)
            if ours.poll(START_SECONDS):
                ours.recv_bytes()
                return ours
        self._stop()
        raise GuardFailed("the process that tries grammars does not start")

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._pipe = self._child = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()


# ── the child ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _memory() -> tuple[int, int]:
    """(address space, resident) of this process, in bytes."""
    with open("/proc/self/statm") as file:
        size, resident, *_ = file.read().split()
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _serve(pipe: Connection) -> None:
    tokenizer_json, n_vocab, eos, seconds = json.loads(pipe.recv_bytes())
    tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=n_vocab, eos_token=eos)
    compile_source(tokenizer, llguidance.LLMatcher.grammar_from_regex("a"))  # what is built once is built now
    size, base = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (size + _SPARE_BYTES, size + _SPARE_BYTES))
    pipe.send_bytes(b"null")
    while True:
        source = pipe.recv_bytes().decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        matcher = compile_source(tokenizer, source)
        problem: Any = matcher.get_error() if matcher.is_error() else None
        if problem is None and _memory()[1] - base > MEGABYTES << 20:
            os._exit(_TOO_LARGE)  # the next child starts small again
        copy = matcher.deep_copy()
        del matcher, copy  # freeing recurses too
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(json.dumps(problem).encode())


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with Connection(int(sys.argv[1])) as pipe:
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_quietly, args=(pipe,))
        thread.start()
        thread.join()


def _quietly(pipe: Connection) -> None:
    try:
        _serve(pipe)
    except (EOFError, OSError):
        return  # the parent is gone
    except MemoryError:
        os._exit(_TOO_LARGE)
    except BaseException:  # noqa: BLE001 — a panic of llguidance is no Exception; the status tells the parent
        os._exit(_FAILED)


if __name__ == "__main__":
    _main()
