"""Mistyped, pasted and interrupted commands end with one line and an exit status, never with a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import RedisServer, eventually, output_of

TOKENMILL = [sys.executable, "-m", "tokenmill"]
CLERK = [sys.executable, "-c", "from rq.cli import main; main()", "worker", "--serializer", "json"]
CLERK += ["--worker-class", "producer.clerk.ClerkWorker", "clerk", "--url"]
COMMANDS = {
    "submit": ("submit", "x"),
    "tail": ("tail", "x"),
    "result": ("result", "x"),
    "cancel": ("cancel", "x"),
    "info": ("info",),
    "run": ("batch", "run", "in.jsonl", "-o", "out.jsonl"),
    "batch cancel": ("batch", "cancel", "in.jsonl", "-o", "out.jsonl"),
    "worker": ("worker", "--model", "x"),
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(
        [*TOKENMILL, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def check_line(done: subprocess.CompletedProcess[str], start: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(start)
    assert "sesame" not in line


@pytest.mark.parametrize("name", [*COMMANDS, "demo"])
def test_a_wrong_url_is_one_line_in_every_command(name: str) -> None:
    arguments = COMMANDS.get(name, ("demo",))
    check_line(run(*arguments, "--redis", "redis://:sesame@h/0?socket_timout=3"), "--redis: the URL has an unknown")


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("TOKENMILL_REDIS", "redis://:ses#ame@h:1", "the URL must not hold a #"),
        ("TOKENMILL_QUEUE", "a:b", "must match"),
        ("TOKENMILL_PREFIX", "a:b", "must match"),
    ],
)
@pytest.mark.parametrize("name", ["info", "batch cancel", "worker"])
def test_the_error_of_a_wrong_variable_names_the_variable(name: str, variable: str, value: str, complaint: str) -> None:
    check_line(run(*COMMANDS[name], **{variable: value}), f"{variable}: {complaint}")


def test_an_option_overrides_its_variable_and_its_error_names_the_option() -> None:
    check_line(run("info", "--prefix", "a b", TOKENMILL_PREFIX="c:d"), "--prefix: must match")
    check_line(run("worker", "--model", "x", "--queue", "a b", TOKENMILL_QUEUE="c:d"), "--queue: must match")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOKENMILL_MAX_NUM_SEQS", "0"),
        ("TOKENMILL_BURST", "perhaps"),
        ("TOKENMILL_DEVICE", "tpu"),
        ("TOKENMILL_KV_CACHE_MEMORY", "much"),
        ("TOKENMILL_HTTP_PORT", "tcp://10.0.0.1:80"),
        ("TOKENMILL_LOG_LEVEL", "LOUD"),
    ],
)
def test_the_error_of_a_workers_wrong_variable_names_the_variable(variable: str, value: str) -> None:
    check_line(run("worker", "--model", "x", **{variable: value}), f"{variable}: ")


def test_a_misspelt_variable_is_warned_of() -> None:
    done = run("info", "--redis", "redis://127.0.0.1:1/0", TOKENMILL_QUEU="x", TOKENMILL_MAX_NUM_SEQ="1")
    assert (
        "variable TOKENMILL_QUEU is no setting of tokenmill and is ignored; did you mean TOKENMILL_QUEUE?"
        in done.stderr
    )
    assert "did you mean TOKENMILL_MAX_NUM_SEQS?" in done.stderr
    done = run("worker", "--model", "/nowhere", "--redis", "redis://127.0.0.1:1/0", TOKENMILL_MAX_NUM_SEQ="1")
    (line,) = (line for line in done.stderr.splitlines() if "variable_ignored" in line)
    assert "nearest=TOKENMILL_MAX_NUM_SEQS" in line
    assert "variable=TOKENMILL_MAX_NUM_SEQ" in line
    done = run("worker", TOKENMIL_MODEL="x")
    assert done.returncode == 2
    assert "did you mean TOKENMILL_MODEL?" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOKENMILL_CALLBACK_SECRET", "change-me"),
        ("TOKENMILL_CALLBACK_SECRET", "<sesame>"),
        ("TOKENMILL_CALLBACK_SECRET", "whsec_sesame!"),
        ("TOKENMILL_CALLBACK_SECRET", "whsec_"),
        ("TOKENMILL_CALLBACK_SECRET", "whsec_…"),
        ("TOKENMILL_CALLBACK_SECRET", "\udcff"),
        ("TOKENMILL_CALLBACK_TIMEOUT_SECONDS", "soon"),
        ("TOKENMILL_REDIS", "redis://:sesame@h:port"),
        ("TOKENMILL_QUEUE", "a:b"),
    ],
)
@pytest.mark.redis_server
def test_a_clerk_with_a_wrong_variable_ends_with_one_line(redis_server: RedisServer, variable: str, value: str) -> None:
    command = [*CLERK, redis_server.url]
    environ = {**os.environ, variable: value, "TOKENMILL_CALLBACK_HOST": "x"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    warning, line = done.stderr.splitlines()
    assert "did you mean TOKENMILL_CALLBACK_HOSTS?" in warning
    assert line.startswith(f"{variable}: ")
    assert "sesame" not in line


@pytest.mark.redis_server
@pytest.mark.parametrize("password", ["päss", "p%C3%A4ss", "%E4", "<secret>", "change-me"])
def test_a_wrong_password_of_any_characters_is_one_line(own_redis: RedisServer, password: str) -> None:
    with own_redis.client() as admin:
        admin.config_set("requirepass", "right")
    url = own_redis.url.replace("redis://", f"redis://:{password}@")
    for name in ("submit", "info", "cancel"):
        done = run(*COMMANDS[name], "--redis", url)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 5
        assert password not in line


def guarded(pid: int) -> bool:
    """Return whether the process imports packages already: before that, Ctrl-C meets the start of Python itself."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return "hiredis" in (text := maps.read()) or "pydantic_core" in text
    except OSError:
        return False


@pytest.mark.parametrize("after", [0.0, 0.1])
@pytest.mark.parametrize("name", ["submit", "run", "worker"])
def test_ctrl_c_during_the_imports_leaves_no_traceback(name: str, after: float) -> None:
    arguments = [*TOKENMILL, *COMMANDS[name], "--redis", "redis://127.0.0.1:1/0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: guarded(process.pid) or process.poll() is not None, 20, 0.001)
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert "Traceback" not in told
    assert process.returncode in (130, 0, 2, 5)  # it may have come to its own end


def test_the_command_is_ready_for_ctrl_c_before_it_imports_anything() -> None:
    code = (
        "import __future__, sys; old = {*sys.modules}; import tokenmill.__main__; print(sorted({*sys.modules} - old))"
    )
    own = ["tokenmill", "tokenmill.__main__", "tokenmill.cli", "tokenmill.cli.interrupt"]
    assert output_of([sys.executable, "-c", code]).strip() == str(own)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_command_whose_sigint_is_ignored_from_outside_goes_on(ignored: bool) -> None:
    code = "from tokenmill.cli.interrupt import guard, interruptible\nimport signal, os, sys\nguard()\n"
    code += "with interruptible():\n    os.kill(os.getpid(), signal.SIGINT)\n    print('went on')\n"
    prepare = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
    prepare += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", prepare, code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((0, "went on\n") if ignored else (-signal.SIGINT, ""))


def test_processes_of_tests_take_sigint_however_the_tests_were_started() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    command = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); import tests.conftest, subprocess\n"
    command += "print(subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True, text=True).stdout)"
    assert output_of([sys.executable, "-c", command, code]).strip() == "True"
