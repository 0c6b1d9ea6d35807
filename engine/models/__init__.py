"""Configs, weights and decoders.

Importing this package first settles that our `kernels` is not the hub project's package of that import name, which
transformers uses where it finds it: transformers goes by the version of whatever distribution brings the name.
"""

from __future__ import annotations

import sys


def _disown_kernels() -> None:
    """Ask transformers whether the hub's `kernels` is installed while ours can't be seen; it keeps the answer."""
    ours = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's own mark for "there is no such module"
    try:
        from transformers.utils import import_utils

        ask = getattr(import_utils, "is_kernels_available", None)
        if ask is not None:
            ask()
    finally:
        del sys.modules["kernels"]
        if ours is not None:
            sys.modules["kernels"] = ours


_disown_kernels()
