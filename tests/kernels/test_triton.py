"""The Triton kernels in Triton's interpreter: `tests/kernels/triton`, in processes with `TRITON_INTERPRET=1`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import output_of

FOLDER = Path(__file__).parent / "triton"


def in_the_interpreter(file: Path) -> str:
    """Run a file of tests in a process with `TRITON_INTERPRET=1`, and return its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", str(file)]
    return output_of(command, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=900)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_kernels_are_right_in_tritons_interpreter(name: str) -> None:
    assert " passed" in in_the_interpreter(FOLDER / name)
