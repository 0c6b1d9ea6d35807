"""The text of the scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import tokenmill


def test_a_process_runs_its_scripts_after_an_upgrade_has_replaced_their_files(tmp_path: Path) -> None:
    shutil.copytree(Path(tokenmill.__file__).parent, tmp_path / "tokenmill")
    code = """
        import shutil, sys
        sys.path.insert(0, sys.argv[1])
        from tokenmill.protocol import lua
        assert lua.__file__.startswith(sys.argv[1])
        shutil.rmtree(sys.argv[1])
        print(lua.source("renew"))
    """
    command = [sys.executable, "-c", "if True:" + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "KEYS" in done.stdout, done.stderr
