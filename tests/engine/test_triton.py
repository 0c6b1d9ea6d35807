"""The engine on Triton kernels in Triton's interpreter: `tests/engine/triton`, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_triton import in_the_interpreter

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_engine_is_right_with_interpreted_kernels(name: str) -> None:
    assert " passed" in in_the_interpreter(FOLDER / name)
