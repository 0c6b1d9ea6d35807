"""What README.md tells a newcomer to type works as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.batch.files import check_whole
from worker.child import worker_process
from worker.embedded import embedded_redis

pytestmark = pytest.mark.model

README = (Path(__file__).parents[2] / "README.md").read_text()
BATCH = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
DEFAULT_URL = "redis://localhost:6379/0"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An embedded Redis with the README's worker on its default queue."""
    with (
        embedded_redis() as address,
        worker_process("--model", "smollm2-135m", "--redis", address, "--kv-cache-memory", "256MiB"),
    ):
        yield address


def run(url: str, *command: str) -> str:
    """Run a command of the README against our Redis; its output."""
    done = subprocess.run(
        [part.replace(DEFAULT_URL, url) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_python_producer_runs_as_printed(url: str) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippet.splitlines()) <= 20
    output = run(url, sys.executable, "-c", snippet.replace(DEFAULT_URL, url))
    assert output.count("succeeded") == 4
    assert "60 tokens" in output or "first after" in output


def test_the_shell_commands_run_as_printed(url: str) -> None:
    lines = re.findall(r"^ {4}tokenmill (submit|tail|result|cancel)(.*)$", README, re.MULTILINE)
    assert [verb for verb, _ in lines] == ["submit", "submit", "tail", "result", "cancel"]
    outputs = [run(url, *_command(verb, rest, url)) for verb, rest in lines[:-1]]
    assert outputs[0].strip()
    assert "story-1" in outputs[1] or outputs[1] == ""
    assert '"succeeded"' in outputs[3]


def test_the_batch_page_runs_as_printed(url: str, tmp_path: Path) -> None:
    (shell,) = re.findall(r"```sh\n(.*?)```", BATCH, re.DOTALL)
    (python,) = re.findall(r"```python\n(.*?)```", BATCH, re.DOTALL)
    (command,) = re.findall(r"^ {4}tokenmill (batch run .*)$", README, re.MULTILINE)
    assert command in shell
    shim = tmp_path / "tokenmill"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m producer.cli "$@"\n')
    shim.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKENMILL_REDIS": url}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    for script in (["bash", "-ec", shell], [sys.executable, "-c", python.replace(DEFAULT_URL, url)]):
        done = subprocess.run(
            script, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "2 of 2\n"
    check_whole(["sky", "sea"], tmp_path / "out.jsonl", tmp_path / "errors.jsonl")


def test_every_make_target_of_the_documents_exists() -> None:
    root = Path(__file__).parents[2]
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for page in (root / "README.md", root / "CONTRIBUTING.md"):
        for name in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert name in targets, f"{page.name}: make {name}"


def _command(verb: str, rest: str, url: str) -> list[str]:
    arguments = shlex.split(rest, comments=True)
    return [sys.executable, "-m", "producer.cli", verb, *arguments, "--redis", url]
