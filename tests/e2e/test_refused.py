"""A worker whose Redis refuses it: before anything is loaded, and while it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis

from tests.e2e.process import Start
from tests.support import eventually
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.faults import refused
from worker.ops.exits import Exit
from worker.ops.links import passing

pytestmark = pytest.mark.redis_server

RULES = ["on", ">sesame", "~*", "&*", "+@all"]


def serve(url: str, *options: str, model: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker.cli", "--model", model, "--redis", url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def with_login(url: str, login: str) -> str:
    return url.replace("redis://", f"redis://{login}@")


@pytest.mark.parametrize("login", ["user:wrong", "nobody:sesame", ":sesame", ""])
def test_wrong_credentials_are_reported_before_the_model_is_loaded(own: Queue, login: str) -> None:
    own.client.execute_command("ACL", "SETUSER", "user", *RULES)
    own.client.execute_command("ACL", "SETUSER", "default", "resetpass")
    done = serve(with_login(own.url, login) if login else own.url)
    assert done.returncode == Exit.REFUSED
    assert "Redis refuses the worker's credentials" in done.stderr
    assert "model_loading" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "sesame" not in done.stderr


def test_a_user_without_the_rights_of_a_worker_is_reported_before_the_model_is_loaded(own: Queue) -> None:
    own.client.execute_command("ACL", "SETUSER", "reader", "on", ">sesame", "~*", "+@read", "+ping")
    done = serve(with_login(own.url, "reader:sesame"))
    assert (done.returncode, "model_loading" in done.stderr) == (Exit.REFUSED, False)


@pytest.mark.parametrize("lease", ["5000", "junk", ""])
def test_a_queue_with_another_lease_is_refused_before_the_model_is_loaded(own: Queue, lease: str) -> None:
    own.client.hset(own.keys.meta, "lease_ms", lease)
    done = serve(own.url, "--queue", own.keys.queue)
    assert (done.returncode, "model_loading" in done.stderr) == (Exit.REFUSED, False)
    assert f"the lease_ms of queue {own.keys.queue} is {lease}, this worker's is 30000" in done.stderr
    assert not list(own.client.scan_iter(match=own.keys.worker("*")))
    assert "Traceback" not in done.stderr


def test_a_worker_whose_model_cannot_be_loaded_claims_no_lease(own: Queue) -> None:
    done = serve(own.url, "--queue", own.keys.queue, "--lease-seconds", "3")
    assert done.returncode == Exit.LOAD
    assert "model_loading" in done.stderr
    assert not own.client.hexists(own.keys.meta, "lease_ms")


@pytest.mark.model
def test_the_loaded_model_is_logged_with_its_size(own: Queue) -> None:
    options = ("--queue", own.keys.queue, "--burst", "--num-kv-blocks", "64", "--device", "cpu")
    done = serve(own.url, *options, model="smollm2-135m")
    assert done.returncode == Exit.OK
    begun, loaded = (
        next(line for line in done.stderr.splitlines() if word in line) for word in ("_loading", "_loaded")
    )
    assert "model=smollm2-135m" in begun
    assert "MB" in begun
    assert "parameters=134515008" in loaded


def cut(admin: redis.Redis) -> None:
    """Close the workers' connections, so that they log in again: a changed password leaves open connections alone."""
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("SETUSER", "user", "resetpass", ">other"), id="another password"),
        pytest.param(("SETUSER", "user", "off"), id="switched off"),
        pytest.param(("DELUSER", "user"), id="deleted"),
        pytest.param(("SETUSER", "user", "-@all", "+ping"), id="no commands"),
        pytest.param(("SETUSER", "user", "-@write", "-@scripting"), id="no writing"),
        pytest.param(("SETUSER", "user", "resetkeys", "~elsewhere:*"), id="no keys"),
    ],
)
def test_credentials_that_end_while_a_worker_runs_end_it_with_their_status(
    own: Queue, start: Start, change: tuple[str, ...]
) -> None:
    own.client.execute_command("ACL", "SETUSER", "user", *RULES)
    own.url = with_login(own.url, "user:sesame")
    worker = start(own, FAKE_STEP="0.005")
    job = own.add({"prompt": "x", "max_tokens": 10_000})
    eventually(lambda: own.client.exists(own.keys.out(job)), 30)
    own.client.execute_command("ACL", *change)
    cut(own.client)
    assert worker.wait(30) == Exit.REFUSED
    assert "Traceback" not in worker.log
    assert "Redis refuses the worker's credentials" in worker.log
    assert "sesame" not in worker.log


def test_a_password_that_is_wanted_from_now_on_ends_a_worker_that_has_none(own: Queue, start: Start) -> None:
    worker = start(own)
    eventually(lambda: "worker_ready" in worker.log, 30)
    own.client.config_set("requirepass", "later")
    with command_client(with_login(own.url, ":later")) as admin:
        cut(admin)
        assert worker.wait(30) == Exit.REFUSED
    assert "Traceback" not in worker.log


def test_after_a_change_of_the_password_a_stopped_worker_still_hands_its_jobs_back(own: Queue, start: Start) -> None:
    """As in a rotation: the password changes first, open connections stay, then the workers are restarted."""
    worker = start(own, FAKE_STEP="0.02", max_num_seqs="1", drain_seconds="0.2", lease_seconds="3")
    job, _ = (own.add({"prompt": "x", "max_tokens": 10_000}) for _ in range(2))
    eventually(lambda: own.client.hget(own.keys.job(job), "state") == b"running", 30)
    shown = own.client.keys(own.keys.worker("*"))[0]
    for _ in range(4):  # beats, after which every thread has its connection
        last = own.client.hget(shown, "updated_ms")
        eventually(lambda: own.client.hget(shown, "updated_ms") not in (last, None), 10)  # noqa: B023
    own.client.config_set("requirepass", "later")
    assert worker.stop() == Exit.OK
    assert own.client.hmget(own.keys.job(job), "state", "tries", "deaths") == [b"queued", b"0", b"0"]
    assert own.client.zcard(own.keys.returned) == 2
    assert "job_not_handed_back" not in worker.log


@pytest.mark.parametrize(
    "error",
    [
        redis.AuthenticationError("invalid username-password pair or user is disabled."),
        redis.exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        redis.ResponseError("Protocol error: unauthenticated multibulk length"),
        redis.ResponseError("NOPERM ACL failure in script: User user has no permissions to run the 'xadd' command"),
    ],
)
def test_a_refusal_is_never_taken_for_an_outage(error: redis.RedisError) -> None:
    assert refused(error)
    assert not passing(error)
