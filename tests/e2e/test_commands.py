"""The commands in the documents work as printed.

Blocks marked `sh`, `python` and `js` are run, in the order of the page, over a Redis of the page's own; the ports of
the text are replaced by free ones. README.md has the real model, the other pages a fake engine. What cannot be run in a
test is marked `sh no-run` in the document; of that, what it names must exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.node.run import run_module
from tests.support import REDIS_SERVER, RedisServer, eventually, free_port, running_redis
from tests.test_docs import PAGES, ROOT
from tokenmill.probe import probe
from tokenmill.protocol.keys import Keys

DEFAULT_URL = "redis://localhost:6379/0"
INFO = {"sh", "sh no-run", "python", "js", "json", "text"}
COMMANDS = "tokenmill|make|redis-cli|pip|npm|docker|git|rq|python3?|sh|curl|\\.venv/bin"
SERVERS = re.compile(r"(?:^|\s)(tokenmill worker|tokenmill gateway|rq worker) (?!.*(--burst|--help))")
BATCH = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 4}}\n'


@dataclass(frozen=True)
class Block:
    page: Path
    info: str
    code: str
    line: int

    def lines(self) -> list[str]:
        """Return the commands of the block: continued lines joined, comments removed."""
        joined = self.code.replace("\\\n", " ").splitlines()
        return [line.strip() for line in joined if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, one[1].strip(), one[2], text[: one.start()].count("\n") + 1) for one in found]


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = sorted({block.page for block in BLOCKS if block.info in ("sh", "python", "js")})
NAMED = [(block, line) for block in BLOCKS if block.info == "sh no-run" for line in block.lines()]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_known_kind_and_every_command_is_in_a_block(page: Path) -> None:
    for block in blocks(page):
        assert block.info in INFO, f"{name(page)}:{block.line}: `{block.info}` is none of {sorted(INFO)}"
    bare = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    loose = re.findall(rf"^ {{4}}((?:[A-Z_]+=\S+ )*(?:{COMMANDS})\b.*)$", bare, re.MULTILINE)
    assert not loose, f"{name(page)}: commands outside of a block that says whether they are run: {loose}"


@dataclass
class Shell:
    """The environment in which the commands of a page run."""

    server: RedisServer
    folder: Path
    environ: dict[str, str]
    left: list[subprocess.Popen[bytes]]
    ports: dict[str, int]
    """Port of a gateway in the text → free port of this machine."""

    def script(self, code: str) -> str:
        """Run a piece of shell; return its output.

        Raises:
            AssertionError: a command failed.
        """
        return self._run(["bash", "-euo", "pipefail", "-c", self._here(code)], code)

    def python(self, code: str) -> str:
        return self._run([sys.executable, "-c", self._here(code)], code)

    def javascript(self, code: str) -> str:
        """Run a module that may import the packages of tests/node."""
        return self._ended(run_module(self._here(code), self.folder, self.environ), code)

    def serve(self, line: str) -> None:
        """Start a command that does not end by itself, and wait until it serves."""
        with (self.folder / "servers.log").open("ab") as log:
            command = ["bash", "-c", re.sub(r"^((?:\w+=\S+ +)*)", r"\1exec ", self._here(line))]
            self.left.append(subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=log, stderr=log))
        kind = re.search(SERVERS, line)
        assert kind is not None, line
        eventually({"tokenmill worker": self._ready, "rq worker": self._listed}.get(kind[1], self._answers), timeout=60)

    def _here(self, code: str) -> str:
        code = code.replace(DEFAULT_URL, self.server.url)
        return re.sub(r"(?<=localhost:)80\d\d\b|(?<=--port )80\d\d\b", lambda port: str(self._port(port[0])), code)

    def _port(self, number: str) -> int:
        return self.ports.setdefault(number, free_port())

    def _run(self, command: list[str], code: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )
        return self._ended(done, code)

    def _ended(self, done: subprocess.CompletedProcess[str], code: str) -> str:
        assert done.returncode == 0, f"{code}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}{self._log()}"
        return done.stdout

    def _alive(self) -> None:
        assert self.left[-1].poll() is None, f"it has ended:\n{self._log()}"

    def _log(self) -> str:
        log = self.folder / "servers.log"
        return log.read_text() if log.exists() else ""

    def _ready(self) -> bool:
        self._alive()
        with self.server.client() as client:
            workers = client.scan_iter(match=Keys("default").worker("*"))
            return any(client.hget(key, "status") == b"ready" for key in workers)

    def _answers(self) -> bool:
        """Return whether each gateway answers that a block has started."""
        self._alive()
        return all(probe(port, path="/healthz")[0] for port in self.ports.values())

    def _listed(self) -> bool:
        self._alive()
        with self.server.client() as client:
            return bool(client.scard("rq:workers"))


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """A Redis, the commands on the path, a batch file, and a worker where the page starts none itself."""
    page: Path = request.getfixturevalue("page")
    if REDIS_SERVER is None:
        pytest.skip("no redis-server on this machine")
    real = page.name == "README.md"
    (tmp_path / "bin").mkdir()
    (tmp_path / "redis").mkdir()
    (tmp_path / "in.jsonl").write_text(BATCH)
    with running_redis(tmp_path / "redis") as server:
        tokenmill = "tokenmill.cli.main" if real else "tests.e2e.stub_cli"
        commands = {
            "tokenmill": f"{shlex.quote(sys.executable)} -m {tokenmill}",
            "rq": f"{shlex.quote(sys.executable)} -m rq.cli",
            "redis-cli": f"redis-cli -p {server.port} -e",
        }
        for command, what in commands.items():
            script = tmp_path / "bin" / command
            script.write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}"\nexec {what} "$@"\n')
            script.chmod(0o755)
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environ |= {
            "TOKENMILL_REDIS": server.url,
            "TOKENMILL_KV_CACHE_MEMORY": "128MiB",
            "TOKENMILL_DRAIN_SECONDS": "1",
        }
        port = free_port()
        one = Shell(server, tmp_path, environ | {"TOKENMILL_PORT": str(port)}, [], {"8000": port})
        try:
            if not any("tokenmill worker" in block.code for block in blocks(page) if block.info == "sh"):
                one.serve("tokenmill worker --model fake --served-model-name smollm2-135m")
            yield one
        finally:
            for process in reversed(one.left):  # who waits for a worker ends before it
                process.terminate()
                process.wait(30)


@pytest.mark.model
@pytest.mark.redis_server
@pytest.mark.parametrize("page", RUN, ids=name)
def test_a_page_works_as_printed_from_its_first_line_to_its_last(page: Path, shell: Shell) -> None:
    printed = ""
    for block in blocks(page):
        if block.info == "python":
            said = shell.python(block.code)
            assert said.strip(), f"{name(page)}:{block.line} prints nothing"
            printed += said
        elif block.info == "js":
            said = shell.javascript(block.code)
            assert said.strip(), f"{name(page)}:{block.line} prints nothing"
            printed += said
        elif block.info == "sh":
            printed += _type(shell, block.lines())
    if page.name == "README.md":
        assert printed.count("succeeded") == 5, "the four jobs of the example, and story-1"


def _type(shell: Shell, lines: list[str]) -> str:
    """Type the lines of one block; return their output. A server keeps running beside later blocks."""
    printed, script = "", []
    for line in lines:
        if SERVERS.search(line):
            printed += shell.script("\n".join(script))
            shell.serve(line)
            script = []
        else:
            script.append(line)
    return printed + shell.script("\n".join(script))


def test_the_first_example_is_short() -> None:
    (snippet,) = [block for block in blocks(ROOT / "README.md") if block.info == "python"]
    assert len(snippet.code.splitlines()) <= 20


def test_every_make_target_of_the_documents_exists() -> None:
    for page in PAGES:
        for goal in re.findall(r"`make ([a-z-]+)", page.read_text()):
            _exists(["make", goal])


@pytest.mark.parametrize(("block", "line"), NAMED, ids=lambda one: None if isinstance(one, Block) else one[:40])
def test_commands_that_no_test_runs_name_things_that_exist(block: Block, line: str) -> None:
    words = shlex.split(line, comments=True)
    for part in " ".join(words).split(" && "):
        _exists(part.split())


def _exists(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    services = set(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])
    if words[0] == "make":
        goals = [word for word in words[1:] if "=" not in word]
        assert set(goals) <= targets, f"make {goals}"
    elif words[:2] == ["docker", "compose"]:
        plain = [word for word in words[3:] if not word.startswith("-")]
        plain = plain[:1] if words[2] in ("exec", "run") else plain  # what follows is a command
        plain = [word.partition("=")[0].partition(":")[0] for word in plain if not word.startswith(".")]
        assert set(plain) <= services, f"no such service: {set(plain) - services}"
    else:
        files = [word for word in words if re.fullmatch(r"(\w[\w-]*/)+[\w.-]+\.\w+", word)]
        assert all((ROOT / file).exists() for file in files), f"no such file: {files}"
