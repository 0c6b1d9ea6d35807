"""transformers never takes our package `kernels` for the hub project's, whatever our version is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

from tests.support import output_of

ROOT = Path(__file__).parents[2]
ASK = "from transformers.utils.import_utils import is_kernels_available as ask; print(ask())"


def run(code: str, folder: Path) -> str:
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    return output_of([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, cwd=folder).strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on the path that says: tokenmill is installed in a version that the hub's `kernels` could have."""
    info = tmp_path / f"tokenmill-{import_utils.KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tokenmill\nVersion: {import_utils.KERNELS_MIN_VERSION}\n"
    )
    (info / "top_level.txt").write_text("engine\nkernels\nproducer\nworker\n")
    return tmp_path


def test_without_our_guard_transformers_takes_our_kernels_for_the_hubs(installed: Path) -> None:
    """Else the tests below show nothing."""
    assert run(ASK, installed) == "True"


@pytest.mark.parametrize(
    "first", ["engine.models.loading", "worker.loading, engine.build", "kernels.attention, engine.build"]
)
def test_with_a_version_in_its_range_transformers_still_sees_no_hub_kernels(installed: Path, first: str) -> None:
    code = f"import {first}; {ASK}; import transformers.integrations.hub_kernels, kernels; print(kernels.__file__)"
    said, ours = run(code, installed).splitlines()
    assert said == "False"
    assert Path(ours) == ROOT / "kernels/__init__.py"


def test_a_process_without_our_engine_is_safe_with_the_version_that_we_release() -> None:
    assert not import_utils.is_kernels_available()
