"""Fixtures that all tests share, and the rule that a skipped test fails in CI."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import REDIS_SERVER, RedisServer, running_redis
from worker.demo.embedded import embedded_redis

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what it puts into the background so, and all children would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

NO_SKIP = os.environ.get("TOKENMILL_TEST_NO_SKIP", "") not in ("", "0")


LONG = ("tests/worker/test_interleavings.py", "tests/tokenmill/cli/test_cli.py", "tests/test_packaging.py")
"""Long files that would come late in the alphabet: begun at the end, one of them would keep a single process busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files in `LONG` first."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real redis-server that all tests of a process share; each test takes its own queue name."""
    if REDIS_SERVER is None:
        pytest.skip("no redis-server on this machine: install it, these tests prove what fakeredis cannot")
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A real redis-server for a single test, which may kill and restart it."""
    if REDIS_SERVER is None:
        pytest.skip("no redis-server on this machine: install it, these tests prove what fakeredis cannot")
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def fake_redis_url() -> Iterator[str]:
    """URL of a fakeredis server that all tests of a process share; it runs in a separate process."""
    with embedded_redis() as url:
        yield url


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.redis_server)])
def redis_url(request: pytest.FixtureRequest) -> str:
    """URL of a shared server, once fakeredis and once a real server; each test takes its own queue name."""
    if request.param == "fake":
        return str(request.getfixturevalue("fake_redis_url"))
    return str(request.getfixturevalue("redis_server").url)


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and TOKENMILL_TEST_NO_SKIP forbids that: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test that leaves groups of Triton kernels disabled: later tests of the process would run other code."""
    yield
    triton = sys.modules.get("kernels.triton")
    if triton is not None:
        assert not triton.disabled(), "the test left kernels disabled"
        assert triton._installed.__module__ == triton.__name__, "the test left `_installed` replaced"
