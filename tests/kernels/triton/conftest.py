"""These tests run in Triton's interpreter, in a process of their own: `TRITON_INTERPRET=1` holds for a whole process.

`tests/kernels/test_triton.py` starts that process; without the variable this folder has no tests.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the programs of every launch in a shuffled order, and fail if one touches what another stores."""
    from tests.kernels.triton.races import checked

    with checked(zlib.crc32(request.node.nodeid.encode())):
        yield
