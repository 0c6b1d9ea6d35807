"""Run the tests of the engine on one thread: their tensors are small, so threads would only wait for each other."""

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
