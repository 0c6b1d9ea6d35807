"""The `tokenmill` command as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tokenmill
from tests.support import RedisServer, eventually, output_of
from tests.tokenmill.batch.files import request, write
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.batch import BatchReport
from tokenmill.cli import main as cli
from tokenmill.cli import waiting
from tokenmill.cli.console import Exit
from tokenmill.cli.packages import NAMES
from tokenmill.cli.settings import option
from tokenmill.client.sync import Client
from tokenmill.protocol.version import version
from worker.demo.child import worker_process
from worker.settings import Settings


def command(queue: Queue, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tokenmill.cli.main", *arguments]


def environment(queue: Queue) -> dict[str, str]:
    return {**os.environ, "TOKENMILL_REDIS": queue.url, "TOKENMILL_QUEUE": queue.keys.queue, "COLUMNS": "200"}


def run(queue: Queue, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(queue, *arguments),
        env=environment(queue),
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_submit_prints_the_text_and_succeeds(queue: Queue, worker: MiniWorker) -> None:
    done = run(queue, "submit", "one two", "--max-tokens", "5", "--temperature", "0", "--param", "top_k=3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two \n", "")
    piped = run(queue, "submit", "-", given="from stdin")
    assert piped.stdout == "from stdin \n"


def test_submit_now_and_read_later(queue: Queue, worker: MiniWorker) -> None:
    assert run(queue, "submit", "one two", "--id", "mine", "--no-wait", "--priority", "high").stdout == "mine\n"
    assert run(queue, "tail", "mine").stdout == "one two \n"
    assert run(queue, "result", "mine").stdout == "one two \n"
    found = json.loads(run(queue, "result", "mine", "--json").stdout)
    assert (found["id"], found["status"]) == ("mine", "succeeded")
    assert "ended already" in run(queue, "cancel", "mine").stdout


def test_chat_sends_messages(queue: Queue) -> None:
    run(queue, "submit", "hi", "--system", "be brief", "--no-wait", "--id", "c")
    ((_, fields),) = queue.redis.xrange(queue.keys.lane("normal"))
    assert json.loads(fields[b"body"]) == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    }


def test_the_exit_status_says_how_the_job_ended(queue: Queue, worker: MiniWorker) -> None:
    failed = run(queue, "submit", "one FAIL")
    assert (failed.returncode, failed.stdout) == (Exit.FAILED, "one \n")
    assert "engine_error" in failed.stderr
    assert run(queue, "submit", "x", "--ttl", "0.001", "--id", "late").returncode in (Exit.EXPIRED, Exit.SUCCEEDED)
    assert run(queue, "tail", "unknown", "--timeout", "0.1").returncode == Exit.EXPIRED
    assert run(queue, "submit", "x", "--max-tokens", "0").returncode == Exit.USAGE
    assert run(queue, "submit", "x", "--param", "id=1").returncode == Exit.USAGE
    assert run(queue, "submit", "x", "--priority", "urgent").returncode == Exit.USAGE
    assert run(queue, "submit", "x", "--queue", "a:b").returncode == Exit.USAGE
    away = run(queue, "submit", "x", "--redis", "redis://user:secret@127.0.0.1:1/0")
    assert away.returncode == Exit.UNAVAILABLE
    assert "secret" not in away.stderr


def test_cancel_ends_a_queued_job(queue: Queue) -> None:
    run(queue, "submit", "x", "--id", "q", "--no-wait")
    assert "before it ran" in run(queue, "cancel", "q").stdout
    assert run(queue, "result", "q").returncode == Exit.CANCELLED


def test_ctrl_c_cancels_the_job(queue: Queue, worker: MiniWorker) -> None:
    process = subprocess.Popen(
        command(queue, "submit", "one HOLD", "--id", "long"),
        env=environment(queue),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"one "
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == Exit.INTERRUPTED
    assert b"long cancelled" in told
    eventually(lambda: queue.redis.hget(queue.keys.job("long"), "state") == b"cancelled")


def test_a_reader_that_leaves_cancels_the_job(queue: Queue, worker: MiniWorker) -> None:
    process = subprocess.Popen(
        command(queue, "submit", "one HOLD two three", "--id", "left"),
        env=environment(queue),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"one "
    process.stdout.close()
    worker.release()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == Exit.INTERRUPTED
    assert told.strip() == b"job left cancelled"


def test_info_shows_lanes_and_workers(queue: Queue) -> None:
    queue.add("a", lane="low")
    queue.redis.hset(queue.keys.worker("host:1:x"), mapping={"model": "tiny"})
    told = run(queue, "info").stdout
    assert "low     1" in told
    assert "worker host:1:x model=tiny" in told
    assert "no worker serves" not in told


def test_info_says_when_no_worker_serves_the_queue(queue: Queue) -> None:
    assert "no worker serves this queue" in run(queue, "info").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["submit", "x", "--id", "mine"],
            "job mine: still queued; `tokenmill info` shows the workers of queue {queue}",
        ),
        (["tail", "unknown"], "job unknown: queue {queue} has no such job"),
        (["result", "unknown"], "job unknown: queue {queue} has no such job"),
    ],
)
def test_a_command_that_waits_without_an_event_says_why(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    where = ["--timeout", "1", "--redis", queue.url, "--queue", queue.keys.queue]
    done = CliRunner().invoke(cli.app, [*arguments, *where])
    assert done.exit_code == Exit.EXPIRED
    assert done.stderr.count(told.format(queue=queue.keys.queue)) == 1


@pytest.mark.parametrize("command", ["tail", "result"])
def test_a_command_says_at_once_that_a_job_is_delayed_and_waits(queue: Queue, worker: MiniWorker, command: str) -> None:
    with Client(queue.url, queue.keys.queue) as client:
        client.submit("one two", id="later", delay=600)
    line = [sys.executable, "-m", "tokenmill.cli.main", command, "later"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environment(queue), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        assert re.fullmatch(r"job later: delayed, due in \d+ s; waiting\n", process.stderr.readline())
        queue.redis.zadd(queue.keys.delayed, {"later": 0})  # it is due
        assert process.communicate(timeout=60) == ("one two \n", "")
    assert process.returncode == Exit.SUCCEEDED


def test_a_command_says_what_moves_a_delayed_job_that_stays_overdue(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    with Client(queue.url, queue.keys.queue) as client:
        client.submit("x", id="later", delay=0.01)
    where = ["--timeout", "1", "--redis", queue.url, "--queue", queue.keys.queue]
    done = CliRunner().invoke(cli.app, ["tail", "later", *where])
    assert f"a worker or the clerk of queue {queue.keys.queue} moves it into its lane" in done.stderr


def test_commands_report_that_a_queue_is_paused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    queue.redis.hset(queue.keys.meta, mapping={"paused": "yes", "max_dept": "5"})
    told = f"queue {queue.keys.queue} is paused: the job waits until the queue is resumed\n"
    done = run(queue, "submit", "x", "--id", "mine", "--no-wait")
    assert (done.stdout, done.stderr) == ("mine\n", told)
    where = ["--timeout", "1", "--redis", queue.url, "--queue", queue.keys.queue]
    assert (
        "job mine: still queued; the queue is paused; waiting"
        in CliRunner().invoke(cli.app, ["tail", "mine", *where]).stderr
    )
    shown = run(queue, "info").stdout
    assert "paused: workers read nothing" in shown
    assert "meta is not understood: unknown field 'max_dept': did you mean max_depth?" in shown
    monkeypatch.setattr("tokenmill.batch.run", lambda *_, **__: BatchReport(1, 1, 0))
    told = f"queue {queue.keys.queue} is paused: the requests wait until the queue is resumed\n"
    assert CliRunner().invoke(cli.app, ["batch", "run", "in", "-o", "out", *where[2:]]).stderr.startswith(told)
    queue.redis.hset(queue.keys.meta, "paused", "no")
    assert run(queue, "submit", "x", "--no-wait").stderr == ""
    assert "paused" not in run(queue, "info").stdout


@pytest.mark.redis_server
def test_a_redis_that_requires_a_login_is_reported(own_redis: RedisServer, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [request("a")])
    with own_redis.client() as client:
        client.config_set("requirepass", "secret")
    batch = ["batch", "run", str(given), "-o", str(tmp_path / "out.jsonl")]
    for arguments in (["submit", "x", "--no-wait"], ["info"], batch):
        done = CliRunner().invoke(cli.app, [*arguments, "--redis", own_redis.url])
        assert done.exit_code == Exit.UNAVAILABLE
        assert "Redis requires a login" in done.stderr


def test_an_unreachable_redis_is_reported_with_what_to_do(queue: Queue) -> None:
    assert "start a Redis there, or name another Redis" in run(queue, "info", "--redis", "redis://127.0.0.1:1/0").stderr


@pytest.mark.redis_server
def test_a_redis_without_tls_is_reported_with_what_to_do(own_redis: RedisServer) -> None:
    done = CliRunner().invoke(cli.app, ["info", "--redis", f"rediss://127.0.0.1:{own_redis.port}/0"])
    assert done.exit_code == Exit.UNAVAILABLE
    assert "use redis://, not rediss://" in done.stderr


@pytest.mark.redis_server
def test_a_time_out_while_redis_is_away_has_the_status_of_redis_away(own_redis: RedisServer) -> None:
    done: list[Any] = []
    arguments = ["result", "unknown", "--timeout", "2", "--redis", own_redis.url]
    command = threading.Thread(target=lambda: done.append(CliRunner().invoke(cli.app, arguments)))
    with own_redis.client() as server:
        command.start()
        eventually(lambda: server.info("clients")["blocked_clients"] == 1)
    own_redis.kill()
    command.join(20)
    assert done[0].exit_code == Exit.UNAVAILABLE
    assert "not finished within 2 s; the last error" in done[0].stderr


def test_the_version_is_printed_without_a_command(queue: Queue) -> None:
    assert run(queue, "--version").stdout == f"tokenmill {version()}\n"


def test_a_mistyped_command_is_guessed(queue: Queue) -> None:
    assert "Did you mean 'worker'?" in run(queue, "wroker").stderr


def test_the_workers_help_names_every_option_whole_at_80_columns(queue: Queue) -> None:
    shown = output_of(command(queue, "worker", "--help"), env={**environment(queue), "COLUMNS": "80"})
    for name in Settings.model_fields:
        assert re.search(rf"^ +{option(name)}\b", shown, re.MULTILINE), name


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"]])
def test_help_documents_every_exit_status_and_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nsys.argv = ['tokenmill', *sys.argv[1:]]\n"
        "import tokenmill.cli.main\n"
        "try:\n    tokenmill.cli.main.main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'worker' not in sys.modules\n"
    )
    environ = {**os.environ, "TOKENMILL_TEST_NO_SKIP": "1", "TOKENMILL_SERVICE_HOST": "10.0.0.1"}
    shown = output_of([sys.executable, "-c", code, *arguments], env=environ)
    for status in Exit:
        assert str(int(status)) in shown


@pytest.mark.parametrize(
    "start",
    [
        "from tokenmill.__main__ import main; main()",
        "import os; from producer.clerk import check_environment; check_environment(os.environ)",
    ],
)
def test_a_check_of_the_environment_does_not_run_a_services_own_worker(tmp_path: Path, start: str) -> None:
    (tmp_path / "worker.py").write_text("raise ImportError('worker.py belongs to the service')\n")
    path = f".{os.pathsep}{Path(tokenmill.__file__).parents[1]}"
    environ = {**os.environ, "PYTHONPATH": path, "TOKENMILL_QUEU": "x"}
    command = [sys.executable, "-c", start, "tail", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert re.fullmatch(r"warning: .*did you mean TOKENMILL_QUEUE\?\n", done.stderr), done.stderr


@pytest.mark.parametrize("path", ["", "."])
@pytest.mark.parametrize(("name", "option"), [("worker", "--model"), ("demo", "--model"), ("gateway", "--api-keys")])
def test_a_command_of_an_extra_imports_our_packages_where_the_folder_has_files_of_their_names(
    tmp_path: Path, name: str, option: str, path: str
) -> None:
    for own in NAMES:
        (tmp_path / f"{own}.py").write_text(f"raise ImportError('{own}.py belongs to the service')\n")
    start = "import os, sys; sys.path.append(os.environ['OURS']); from tokenmill.__main__ import main; main()"
    environ = {**os.environ, "OURS": str(Path(tokenmill.__file__).parents[1]), "PYTHONPATH": path}
    command = [sys.executable, "-c", start, name]
    shown = subprocess.run([*command, "--help"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert option in shown.stdout


def test_the_demos_worker_imports_our_packages_where_the_folder_has_files_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in NAMES:
        (tmp_path / f"{own}.py").write_text(f"raise ImportError('{own}.py belongs to the service')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", str(Path(tokenmill.__file__).parents[1]))))
    with worker_process("--help") as worker:
        assert worker.process.wait(60) == 0, worker.log_tail()


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys\nsys.modules['pydantic_core._missing'] = None\nsys.argv = ['tokenmill', 'worker']\n"
        "import importlib\nreal = importlib.import_module\n"
        "def fake(name, *rest):\n"
        "    if name.startswith('worker'):\n"
        "        raise ModuleNotFoundError('no torch', name='torch')\n"
        "    return real(name, *rest)\n"
        "import tokenmill.cli.main\nimportlib.import_module = fake\ntokenmill.cli.main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert "pip install '.[worker]'" in done.stderr


def test_an_extra_that_is_missing_while_a_command_runs_is_named() -> None:
    """The worker imports torch and more only once its options are read."""
    code = (
        "import sys\nsys.argv = ['tokenmill', 'worker', '--model', 'x']\nsys.modules['prometheus_client'] = None\n"
        "import tokenmill.cli.main\ntokenmill.cli.main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (Exit.USAGE, False)
    assert "needs prometheus_client: in a clone of tokenmill, pip install '.[worker]'" in done.stderr


@pytest.mark.parametrize("arguments", [["info"], ["cancel", "x"], ["result", "mine"]])
def test_an_output_without_a_reader_and_one_without_room_have_statuses_of_their_own(
    queue: Queue, worker: MiniWorker, arguments: list[str]
) -> None:
    with Client(queue.url, queue.keys.queue) as client:
        client.submit("one two", id="mine").result(timeout=20)
    reader, closed = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, status, complaint in (
        (closed, Exit.INTERRUPTED, ""),
        (full, Exit.USAGE, "cannot write the output: No space left on device\n"),
    ):
        done = subprocess.run(
            command(queue, *arguments),
            env=environment(queue),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (status, complaint)
        os.close(output)


def test_a_text_with_characters_that_the_terminal_lacks_is_printed(queue: Queue, worker: MiniWorker) -> None:
    done = subprocess.run(
        command(queue, "submit", "h\u00e9llo"),
        env={**environment(queue), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "h\\xe9llo \n")
