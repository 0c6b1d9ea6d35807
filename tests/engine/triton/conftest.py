"""These tests run in Triton's interpreter, in a process of their own: `TRITON_INTERPRET=1` holds for a whole process.

`tests/engine/test_triton.py` starts that process; without the variable this folder has no tests.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
