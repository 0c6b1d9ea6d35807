"""Fixtures shared by the kernel tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kernels import native
from kernels.attention.flash import FlashBackend
from tests.kernels.flash_stand_in import FlashStandIn
from tests.models.conftest import one_thread, two_threads

__all__ = ["flash", "one_thread", "two_threads"]


@pytest.fixture(params=native.INSTRUCTION_SETS[1:])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library, wanted = native.library(), native.INSTRUCTION_SETS.index(request.param)
    assert library is not None
    if library.tm_choose(wanted) != wanted:
        library.tm_choose(len(native.INSTRUCTION_SETS))
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.tm_choose(len(native.INSTRUCTION_SETS))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashStandIn:
    """The flash backend runs here, on the stand-in."""
    stand_in = FlashStandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(FlashBackend, "device_types", ("cpu",))
    return stand_in
