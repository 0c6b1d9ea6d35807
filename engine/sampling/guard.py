"""Compiles each new grammar in a child process first, which may crash, hang or run out of memory without harm.

llguidance limits most of its work, but it recurses over rules and references, so a chain of a few thousand overflows
the stack, and the time for a wide schema grows with the square of its width. Neither can be stopped in a thread. The
child has a much smaller stack than a thread of the worker: a grammar that compiles in the child compiles in the worker.

This file is also the program of the child; it imports nothing of the project.
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
"""CPU seconds to compile a grammar and to find its first ids. CPU time, so that load does not change the result."""
WALL_SECONDS = 30.0
"""Seconds after which a child that had little CPU time is killed; the grammar is not the cause and stays undecided."""
START_SECONDS = 60.0
"""Seconds for the child to start and read the tokenizer, on a machine that is busy loading a model."""
TRIES = 2
"""Number of children that try a grammar before it is undecided."""
MEGABYTES = 48
"""Maximum growth of the child's resident memory by one grammar, in MiB."""
_TOO_LARGE = 3
_FAILED = 4
"""Exit statuses of a child: a grammar took too much memory; llguidance raised."""
_STACK_BYTES = 1 << 20
_EXTRA_BYTES = 1 << 30
"""Bytes by which the child's address space may grow after its start."""

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits of llguidance, in the child and in the worker; a lexer state takes one or two kilobytes."""


def compile_source(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Compile a grammar and compute its first mask, which builds most of the states that it will need."""
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class GuardFailed(RuntimeError):
    """The child cannot be started, or was killed by another process: it is not known whether the grammar compiles."""


class _Killed(Exception):
    """The child ended or did not answer, and the grammar is not the cause."""


class Guard:
    """Starts and restarts the child, and sends it grammars, one at a time. Any thread may call `problem`."""

    def __init__(self, tokenizer_json: str, n_vocab: int, eos_token_ids: list[int], seconds: float = SECONDS) -> None:
        """Prepare the child, which starts with the first grammar.

        Args:
            tokenizer_json: the tokenizer in the format of `tokenizers`.
            n_vocab: number of ids.
            eos_token_ids: ids that end a text.
            seconds: CPU time for one grammar.
        """
        self._setup = json.dumps([tokenizer_json, n_vocab, eos_token_ids, seconds]).encode()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def problem(self, source: str) -> str | None:
        """Compile a grammar in the child; return what is wrong with the grammar, None if it compiles.

        Raises:
            GuardFailed: the child cannot be started, or was killed by another process, `TRIES` times; retryable.
        """
        with self._lock:
            for _ in range(TRIES):
                try:
                    return self._try(source)
                except _Killed:
                    self._stop()
            raise GuardFailed("the process that checks grammars was killed, or got no CPU time")

    def _try(self, source: str) -> str | None:
        """Send a grammar to the child once, and return the child's answer.

        Raises:
            _Killed: the child did not answer, and its end says nothing about the grammar.
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
        """Return what is wrong with the grammar, judged by the exit status of the child.

        Raises:
            _Killed: the exit status says nothing about the grammar.
        """
        child = self._child
        if child is None:
            raise _Killed
        try:
            status = child.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise _Killed from None
        self._stop()
        if status == -signal.SIGPROF:
            return f"the grammar takes more than {self._seconds:g} s to compile"
        if status == _TOO_LARGE:
            return f"the grammar takes more than {MEGABYTES} MiB to compile"
        if status == _FAILED:
            return "the grammar makes its compiler fail"
        if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return "the grammar is nested too deeply, or takes too much memory to compile"
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
                    start_new_session=True,  # Ctrl-C must not reach the child; it ends when the pipe is closed
                )
        except OSError as error:  # the system has no process or file left
            self._stop()
            raise GuardFailed(f"the process that checks grammars does not start: {error.strerror}") from error
        ours = self._pipe
        with contextlib.suppress(EOFError, OSError):  # the child died: raise below, as if it did not answer
            ours.send_bytes(self._setup)
            if ours.poll(START_SECONDS):
                ours.recv_bytes()
                return ours
        self._stop()
        raise GuardFailed("the process that checks grammars does not start")

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
    """Return (address space, resident memory) of this process, in bytes."""
    with open("/proc/self/statm") as file:
        size, resident, *_ = file.read().split()
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _serve(pipe: Connection) -> None:
    tokenizer_json, n_vocab, eos, seconds = json.loads(pipe.recv_bytes())
    tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=n_vocab, eos_token=eos)
    compile_source(tokenizer, llguidance.LLMatcher.grammar_from_regex("a"))
    size, base = _memory()  # with the memory that the first grammar allocates once
    resource.setrlimit(resource.RLIMIT_AS, (size + _EXTRA_BYTES, size + _EXTRA_BYTES))
    pipe.send_bytes(b"null")
    while True:
        source = pipe.recv_bytes().decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        matcher = compile_source(tokenizer, source)
        problem: Any = matcher.get_error() if matcher.is_error() else None
        if problem is None and _memory()[1] - base > MEGABYTES << 20:
            os._exit(_TOO_LARGE)  # the next child starts with little memory
        copy = matcher.deep_copy()
        del matcher, copy  # freeing recurses, too
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
