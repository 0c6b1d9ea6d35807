"""What rehearsals need."""

from __future__ import annotations

import pytest

from tests.deploy.sandbox import BWRAP


@pytest.fixture(scope="session", autouse=True)
def bubblewrap(request: pytest.FixtureRequest) -> None:
    if BWRAP is None:
        pytest.skip("no bubblewrap on this machine: install it, rehearsals run in its boxes")
