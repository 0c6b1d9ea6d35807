"""Run the tests of the engine on one thread: their tensors are small, so threads would only wait for each other.

An engine on a pretended GPU starts without the steps that warm it up and check overlap: they take seconds there.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.engine import stub


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, True], ids=["in_turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engines of `make_engine` keep a step in flight; a test that uses this runs both ways."""
    monkeypatch.setattr(stub, "OVERLAP", request.param)
    return bool(request.param)


@pytest.fixture(autouse=True)
def _short_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name != "test_selfcheck.py":
        monkeypatch.setattr("engine.start.prepare.warm_up", lambda *_: None)
        monkeypatch.setattr("engine.start.prepare.check_overlap", lambda *_: None)
