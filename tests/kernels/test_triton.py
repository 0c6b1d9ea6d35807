"""The Triton kernels in Triton's interpreter: `tests/kernels/triton`, in processes with `TRITON_INTERPRET=1`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import output_of

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_kernels_are_right_in_tritons_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", str(FOLDER / name)]
    output = output_of(command, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=900)
    assert " passed" in output
