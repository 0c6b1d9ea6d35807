"""Run JavaScript with Node and OpenAI's package for it, which `make install` puts beside this file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = HERE / "node_modules"


def run_module(
    code: str, folder: Path, environ: Mapping[str, str] = os.environ, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run an ES module in `folder`; skip the test where Node or the package is missing."""
    if shutil.which("node") is None or not (MODULES / "openai").exists():
        pytest.skip("no Node with the openai package: install nodejs and npm, then run `make install`")
    if not (folder / MODULES.name).exists():
        (folder / MODULES.name).symlink_to(MODULES)  # imports are looked up from the folder of the module
    (folder / "module.mjs").write_text(code)
    command = ["node", "--require", str(HERE / "file.cjs"), "module.mjs"]
    return subprocess.run(
        command, cwd=folder, env=dict(environ), capture_output=True, text=True, timeout=timeout, check=False
    )
