"""Every grammar is accepted or refused within a time limit, and the calling process survives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from engine.models.chat import Tokenizer
from engine.sampling.guard import Guard, GuardFailed
from engine.sampling.structured import (
    MAX_SPEC_BYTES,
    REFUSED_SECONDS,
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarUndecided,
)
from tests.engine.grammars import tokenizer as letter_tokenizer
from tests.models import tiny
from tests.support import eventually


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = Tokenizer(tiny.tokenizer()).grammars({tiny.EOS})
    yield made
    assert made._guard is not None
    made._guard.close()


def _deep(text: str, depth: int) -> str:
    before, after = text.split("…")
    return before * depth + "{}" + after * depth


def _chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(rules)) + f'\nr{rules}: "a"'


def _references(count: int) -> dict[str, Any]:
    definitions = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "null"}}}


BOMBS: dict[str, tuple[Any, Any]] = {
    "unclosed groups": ("regex", "(" * 5000),
    "nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "look-behind repeated": ("regex", "(?<=x)*"),
    "nothing to repeat": ("regex", "*"),
    "stars": ("regex", "a" + "*" * 5000),
    "repeats of repeats": ("regex", "(((a{1000}){1000}){1000}){1000}"),
    "deep properties": ("json", _deep('{"properties":{"a":…}}', 2000)),
    "deep items": ("json", _deep('{"items":…}', 2000)),
    "deep anyOf": ("json", _deep('{"anyOf":[…]}', 2000)),
    "wide properties": ("json", {"type": "object", "properties": {f"p{i}": {} for i in range(12_000)}}),
    "chain of rules": ("grammar", _chain(8000)),
    "chain of references": ("json", _references(3000)),
    "nested alternatives": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a circle": ("json", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "too many combinations": (
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": 1}}} for j in range(6)]} for i in range(6)]},
    ),
    "too large": ("choice", ["x" * MAX_SPEC_BYTES]),
    "one long word": ("choice", ["x" * 200_000]),
    "infinite": ("json", '{"type":"number","maximum":1e999}'),
    "no lark": ("grammar", "{}"),
}
HARMLESS: dict[str, tuple[Any, Any]] = {
    "nested plus": ("regex", "(a+)+$"),
    "exponential automaton": ("regex", "(a|b)*a(a|b){200}"),
    "large repeat": ("regex", "a{1,10000}"),
    "enum": ("json", {"enum": [f"value {i}" for i in range(5000)]}),
    "numbers": ("json", {"enum": list(range(20_000))}),
    "many items": ("json", {"type": "array", "items": {"type": "integer"}, "minItems": 100_000, "maxItems": 200_000}),
    "long string": ("json", {"type": "string", "minLength": 100_000, "maxLength": 200_000}),
    "60 deep": ("json", _deep('{"properties":{"a":…}}', 60)),
    "left recursion": ("grammar", 'start: x\nx: x x | "a" |'),
    "choices": ("choice", [f"choice {i}" for i in range(2000)]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_soon(compiler: GrammarCompiler, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        compiler.compile(*BOMBS[name])
    assert time.monotonic() - began < 10
    assert len(str(caught.value)) < 500
    assert isinstance(compiler.compile("regex", "a"), Grammar)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_grammar_that_looks_like_a_bomb_compiles(compiler: GrammarCompiler, name: str) -> None:
    assert isinstance(compiler.compile(*HARMLESS[name]), Grammar)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_2000_schemas_leave_no_memory_behind(compiler: GrammarCompiler) -> None:
    def compile_some(first: int) -> None:
        for i in range(first, first + 500):
            properties = {f"a{i}": {"type": "string"}, "b": {"type": "array", "items": {"enum": ["x", "y", i]}}}
            compiler.compile("json", {"type": "object", "properties": properties, "required": ["b"]})

    compile_some(0)
    before = _resident()
    for first in (500, 1000, 1500):
        compile_some(first)
    assert _resident() - before < 16 << 20
    assert len(compiler._cache) == 128


def test_equal_grammars_and_refusals_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(letter_tokenizer())
    calls = []
    compile_ = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *args: calls.append(args) or compile_(*args))
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert compiler.compile("json", schema) is compiler.compile("json", dict(schema))
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.compile("regex", "(")
    assert len(calls) == 2
    # The order of properties is the order in which they are written.
    assert compiler.compile("json", {**schema, "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    assert len(calls) == 3


def _guard(**options: Any) -> Guard:
    return Guard(Tokenizer(tiny.tokenizer())._backend.to_str(), 320, [2], **options)


SOURCE = '{"grammars":[{"lark_grammar":"start: \\"a\\""}]}'


def test_a_child_that_was_killed_is_replaced_and_the_grammar_is_tried_again() -> None:
    guard = _guard()
    assert guard.problem(SOURCE) is None
    assert guard._child is not None
    guard._child.kill()
    guard._child.wait()
    assert guard.problem(SOURCE) is None
    guard.close()
    assert guard._child is None


def test_a_child_without_time_to_run_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = _guard()
    assert guard.problem(SOURCE) is None
    assert guard._child is not None
    monkeypatch.setattr("engine.sampling.guard.WALL_SECONDS", 0.5)
    guard._child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(guard, "_start", lambda start=guard._start: [monkeypatch.undo(), start()][1])
    assert guard.problem(SOURCE) is None
    guard.close()


def test_children_that_keep_dying_give_no_verdict_and_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = _guard()
    start = guard._start

    def start_and_kill() -> Any:
        pipe = start()
        assert guard._child is not None
        guard._child.kill()
        return pipe

    compiler = GrammarCompiler(letter_tokenizer(), guard)
    monkeypatch.setattr(guard, "_start", start_and_kill)
    with pytest.raises(GrammarUndecided):
        compiler.compile("regex", "a")
    with pytest.raises(GrammarUndecided):
        compiler.check()
    monkeypatch.setattr(guard, "_start", start)
    compiler.check()
    assert compiler.compile("regex", "a")
    guard.close()


def test_a_refusal_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = ["the grammar takes more than 3 s to compile", None]
    guard = _guard()
    monkeypatch.setattr(guard, "problem", lambda source: verdicts.pop(0))
    compiler = GrammarCompiler(letter_tokenizer(), guard)
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(GrammarError, match="3 s"):
            compiler.compile("regex", "a")
    now = time.monotonic()
    monkeypatch.setattr("engine.sampling.structured.time.monotonic", lambda: now + REFUSED_SECONDS + 1)
    assert compiler.compile("regex", "a")


def test_a_grammar_that_takes_too_long_is_refused_for_each_of_many_threads() -> None:
    guard = _guard(seconds=0.05)
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}
    source = llguidance.LLMatcher.grammar_from_json_schema(wide)
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(guard.problem(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    guard.close()
    assert [bool(answer and "0.05 s" in answer) for answer in found] == [True] * 4


def test_a_child_that_cannot_start_blames_no_grammar() -> None:
    guard = Guard("{", 320, [2])
    with pytest.raises(GuardFailed):
        guard.problem("start: /a/")
    assert guard._child is None


_PARENT = """
import sys
from engine.sampling.guard import Guard
guard = Guard(open(sys.argv[1]).read(), 320, [2])
guard.problem("start: /a/")
print(guard._child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["Pipe", "subprocess.Popen"])
def test_a_machine_without_processes_or_files_left_blames_no_grammar(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compiler = Tokenizer(tiny.tokenizer()).grammars({tiny.EOS})

    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as context:
        context.setattr(f"engine.sampling.guard.{name}", fail)
        with pytest.raises(GrammarUndecided, match="Resource temporarily unavailable"):
            compiler.compile("regex", "[a-c]+")
    assert compiler.compile("regex", "[a-c]+")
    assert compiler._guard is not None
    compiler._guard.close()


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(Tokenizer(tiny.tokenizer())._backend.to_str())
    command = [sys.executable, "-c", _PARENT, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert child.exists()
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")
