"""Requests made from the OpenAPI document, legal and faulty, never get status 500 or an answer that it lacks.

Many seeds by hand: `python -m tests.producer.gateway.test_schemathesis --seeds 20 --examples 100`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.producer.gateway.harness import GatewayProcess, Stack, get, post, stack
from tests.support import RedisServer, running_redis

CONFIG = """
[checks]
# An unknown id, a model that no worker serves or a value that the worker refuses are answers, not faults.
positive_data_acceptance.enabled = false
# The document is less strict than the rules where these cannot be said in a schema.
negative_data_rejection.enabled = false
# Status 503 and 504 say that Redis or a worker is away or late.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]
"""


PHASES = "examples,coverage,fuzzing,stateful"
"""The phase `coverage` sends some two thousand requests, most of them faulty; `examples` sets the number of requests
of each other phase."""


def schemathesis(
    gateway: GatewayProcess, key: str, folder: Path, seed: int, examples: int, phases: str = PHASES
) -> tuple[int, str]:
    """Run schemathesis against a gateway; return its exit status and report."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", "--no-color"]
    command += ["--header", f"Authorization: Bearer {key}", "--seed", str(seed), "--max-examples", str(examples)]
    command += ["--continue-on-failure", "--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--phases", phases, "--request-timeout", "30", f"{gateway.url}/openapi.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=3000, check=False)
    return done.returncode, done.stdout + done.stderr


def prepared(made: Stack) -> tuple[GatewayProcess, str]:
    """Start a worker and a gateway with one key."""
    path, keys = made.keys_file(fuzzer="")
    gateway = made.gateway(wait=False, api_keys=str(path), request_timeout="10", max_file_bytes="1MiB")
    made.worker()
    return gateway.wait_until_it_answers(), keys["fuzzer"]


def check_calm(gateway: GatewayProcess, key: str) -> None:
    """Check that the gateway still serves and has logged no fault of its own."""
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    answer = post(f"{gateway.url}/v1/completions", body, Authorization=f"Bearer {key}")
    assert answer.status == 200, answer
    assert get(f"{gateway.url}/healthz").status == 200
    assert "Traceback" not in gateway.log, gateway.log[gateway.log.index("Traceback") - 3000 :][:6000]


@pytest.mark.redis_server
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("phases", "examples"), [("fuzzing,stateful", 10), pytest.param(PHASES, 20, marks=pytest.mark.slow)]
)
def test_no_request_gets_an_answer_that_the_document_lacks(
    redis_server: RedisServer, tmp_path: Path, phases: str, examples: int
) -> None:
    with stack(redis_server.url, tmp_path) as made:
        gateway, key = prepared(made)
        status, report = schemathesis(gateway, key, tmp_path, 1, examples, phases)
        assert status == 0, report
        check_calm(gateway, key)


def main() -> None:
    """Run many seeds; end with status 1 and the report of the first seed that finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="First seed.")
    parser.add_argument("--seeds", type=int, default=10, help="Number of seeds.")
    parser.add_argument("--examples", type=int, default=50, help="Requests of each operation and seed.")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended
    for seed in range(given.first, given.first + given.seeds):
        with (
            tempfile.TemporaryDirectory() as name,
            running_redis(Path(name)) as server,
            stack(server.url, Path(name)) as made,
        ):
            gateway, key = prepared(made)
            status, report = schemathesis(gateway, key, Path(name), seed, given.examples)
            print(f"seed {seed}: {'no fault' if status == 0 else report}", flush=True)
            check_calm(gateway, key)
            if status:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
