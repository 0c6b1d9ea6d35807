"""`tokenmill batch` as a process of its own."""

from __future__ import annotations

import gzip
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import eventually
from tests.tokenmill.batch.files import check_whole, request, write
from tests.tokenmill.cli.test_cli import command, environment, run
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.cli.console import Exit

pytestmark = [pytest.mark.redis_server, pytest.mark.parametrize("redis_url", ["real"], indirect=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "in.jsonl", [request(f"r{number}", f"say {number}") for number in range(20)])
    return tmp_path


def arguments(folder: Path, verb: str = "run", *more: str) -> list[str]:
    return ["batch", verb, str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *more]


IDS = [f"r{number}" for number in range(20)]


def test_a_batch_file_is_run_and_its_progress_printed_in_plain_lines(
    folder: Path, queue: Queue, worker: MiniWorker
) -> None:
    done = run(queue, *arguments(folder))
    assert (done.returncode, done.stdout) == (Exit.SUCCEEDED, "")
    assert done.stderr.splitlines()[0].startswith("0/20 done, 0 failed, 0 in flight")
    assert done.stderr.splitlines()[-1] == "20 succeeded, 0 failed of 20"
    check_whole(IDS, folder / "out.jsonl")
    assert run(queue, *arguments(folder)).returncode == Exit.SUCCEEDED


def test_a_gzip_file_with_a_failing_line_ends_with_status_1(folder: Path, queue: Queue, worker: MiniWorker) -> None:
    lines = [request("a", "x FAIL"), request("b")]
    write(folder / "plain", lines)
    (folder / "in.jsonl").write_bytes(gzip.compress((folder / "plain").read_bytes()))
    done = run(queue, *arguments(folder, "run", "--errors", str(folder / "err.jsonl"), "--window", "1"))
    assert done.returncode == Exit.FAILED
    assert done.stderr.splitlines()[-1] == "1 succeeded, 1 failed of 2"
    check_whole(["a"], folder / "err.jsonl")
    check_whole(["b"], folder / "out.jsonl")


def test_a_file_that_is_no_batch_is_refused_with_its_lines(folder: Path, queue: Queue) -> None:
    write(folder / "in.jsonl", [request("a"), "{", request("a")])
    done = run(queue, *arguments(folder))
    assert done.returncode == Exit.USAGE
    lines = done.stderr.splitlines()
    assert lines[0].startswith("line 2: invalid_json_line: ")
    assert lines[1].startswith("line 3: duplicate_custom_id: ")
    assert lines[2] == "2 errors found; nothing submitted."
    assert queue.depth() == 0
    assert run(queue, "batch", "run", "none", "-o", str(folder / "out.jsonl")).returncode == Exit.USAGE
    assert run(queue, *arguments(folder, "run", "--window", "0")).returncode == Exit.USAGE


def test_a_batch_without_redis_ends_at_once(folder: Path, queue: Queue) -> None:
    done = run(queue, *arguments(folder, "run", "--redis", "redis://user:secret@127.0.0.1:1/0"))
    assert done.returncode == Exit.UNAVAILABLE
    assert "secret" not in done.stderr
    assert list(contents(folder)) == ["in.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_batch_and_the_same_command_continues_it(folder: Path, queue: Queue, number: int) -> None:
    process = subprocess.Popen(
        command(queue, *arguments(folder, "run", "--window", "3")), env=environment(queue), stderr=subprocess.PIPE
    )
    eventually(lambda: queue.depth() == 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=20)
    assert process.returncode == Exit.INTERRUPTED
    assert b"Stopped: 0 of 20 done (0 failed). Run the same command to continue." in told
    worker = MiniWorker(queue)
    worker.start()
    assert run(queue, *arguments(folder)).returncode == Exit.SUCCEEDED
    worker.stop()
    check_whole(IDS, folder / "out.jsonl")


def test_the_requests_that_a_killed_run_left_can_be_cancelled(folder: Path, queue: Queue) -> None:
    process = subprocess.Popen(
        command(queue, *arguments(folder, "run", "--window", "3")), env=environment(queue), stderr=subprocess.PIPE
    )
    eventually(lambda: queue.depth() == 3)
    process.kill()
    process.communicate()
    done = run(queue, *arguments(folder, "cancel"))
    assert (done.returncode, done.stdout) == (Exit.SUCCEEDED, "3 requests in flight cancelled\n")
    assert queue.depth() == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("option", ["-o", "--errors"])
@pytest.mark.parametrize("precious", [b'{"precious":1}', b'{"precious":1}\n{"precious":2}', b"\xff\xfe no text"])
def test_a_file_that_is_not_the_runs_is_refused_and_keeps_every_byte(
    folder: Path, queue: Queue, option: str, precious: bytes
) -> None:
    (folder / "o.json").write_bytes(precious)
    before = contents(folder)
    options = {"-o": "out.jsonl", option: "o.json"}
    words = [word for name, file in options.items() for word in (name, str(folder / file))]
    done = run(queue, "batch", "run", str(folder / "in.jsonl"), *words)
    assert done.returncode == Exit.USAGE
    assert "exists and is no output of a batch run: remove it or name another file" in done.stderr
    assert contents(folder) == before
    assert queue.depth() == 0


@pytest.mark.parametrize("name", ["out.jsonl.state.new", "out.jsonl.new", "out.jsonl.tmp"])
def test_an_input_may_have_any_name_but_that_of_the_state(
    folder: Path, queue: Queue, worker: MiniWorker, name: str
) -> None:
    given = (folder / "in.jsonl").rename(folder / name)
    text = given.read_bytes()
    assert run(queue, "batch", "run", str(given), "-o", str(folder / "out.jsonl")).returncode == Exit.SUCCEEDED
    assert given.read_bytes() == text
    given.rename(folder / "again.state")
    before = contents(folder)
    done = run(queue, "batch", "run", str(folder / "again.state"), "-o", str(folder / "again"))
    assert (done.returncode, "name another output" in done.stderr) == (Exit.USAGE, True)
    assert contents(folder) == before


def test_a_cancel_that_does_not_name_the_run_changes_nothing_and_fails(folder: Path, queue: Queue) -> None:
    process = subprocess.Popen(command(queue, *arguments(folder)), env=environment(queue), stderr=subprocess.PIPE)
    eventually(lambda: queue.depth() == 20)
    process.kill()
    process.communicate()
    write(folder / "other.jsonl", [request("x")])
    before = contents(folder)
    given, out = str(folder / "in.jsonl"), str(folder / "out.jsonl")
    for words, complaint in {
        (given, "-o", str(folder / "another.jsonl")): "no batch run has begun here",
        (given, "-o", out, "--errors", str(folder / "err.jsonl")): "begun with the error file None",
        (given, "-o", out, "--queue", "another"): "name the same --queue and --prefix",
        (given, "-o", out, "--prefix", "another"): "name the same --queue and --prefix",
        (str(folder / "other.jsonl"), "-o", out): "belongs to another input",
        (given, "-o", given): "is the input",
    }.items():
        done = run(queue, "batch", "cancel", *words)
        assert (done.returncode, done.stdout) == (Exit.USAGE, "")
        assert complaint in done.stderr
        assert contents(folder) == before
        assert queue.depth() == 20
    elsewhere = run(queue, *arguments(folder, "cancel", "--redis", queue.url.rpartition("/")[0] + "/9"))
    assert (elsewhere.returncode, elsewhere.stdout) == (Exit.UNAVAILABLE, "")
    assert "If the run used another Redis, name it with --redis." in elsewhere.stderr
    assert contents(folder) == before
    assert run(queue, *arguments(folder, "cancel")).stdout == "20 requests in flight cancelled\n"


def test_a_batch_on_a_terminal_shows_a_bar(folder: Path, queue: Queue, worker: MiniWorker) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(queue, *arguments(folder)), env={**environment(queue), "TERM": "xterm"}, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how a terminal whose other end is gone reads on Linux
        pass
    os.close(ours)
    assert process.wait(20) == Exit.SUCCEEDED
    assert b"20/20" in shown
    assert b"in flight" in shown
